"""Edits of the CuTe forwards' texts that were tried for speed, and ablations that show what a part
costs.  `speed_rounds` times them; docs/benchmarks.md has the results.

An ablation gives wrong results: it leaves a part out, and bounds what making that part faster could
gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kernels.cuda.family import Choice, Family, Launch
from verify.cuda.edits import Edit, edited
from verify.variant import Config, Variant

_EXPONENT = r"x\(r, c\) = ptx::ex2\(__fmaf_rn\(x\(r, c\), factor, -shift\)\);"
_EXPONENT_8 = r"x\(r, c\) = ptx::ex2\(__fmaf_rn\(factor, x\(r, c\), -shift\)\);"
_RESCALE = (
    r"(?s)(    CUTE_UNROLL\n    for \(int c = 0; c < size<1>\(o\); \+\+c\) \{\n"
    r"      o\(r, c\) \*= alpha;\n    \}\n)(?=    row_sum\(r\) = row_sum\(r\) \* alpha)"
)
# O is rescaled only where the maximum of one of the warp's rows has grown.
LAZY_RESCALE = (
    Edit(_RESCALE, r"    if (__any_sync(0xffffffff, alpha != 1.0f)) {\n\1    }\n", times=None),
)

# of cute-flash-forward
NO_EXPONENTIALS = (Edit(_EXPONENT, "x(r, c) = __fmaf_rn(x(r, c), factor, -shift);"),)
QUERIES_STAY = (
    Edit(
        r"(?m)^( +)copy\(LoadRows\{\}, from_q\(_, _, step\), to_q\(_, _, step\)\);$",
        r"\1if (block == walk.some.low) copy(LoadRows{}, from_q(_, _, step), to_q(_, _, step));",
    ),
)


def rescale(*, lazy: bool) -> tuple[Edit, ...]:
    """Whether O is left alone where no maximum of the warp's rows has grown."""
    return (Edit(r"kLazy = BLOCK_N == 128", f"kLazy = {str(lazy).lower()}"),)


def blocks_of_a_multiprocessor(number: int) -> tuple[Edit, ...]:
    """As many must have room: it bounds the registers of a thread."""
    return (Edit(r"HEAD_DIM <= 64 && BLOCK_M <= 64 \? 3 : 2", str(number)),)


# of cute-hopper-fp8-forward
NO_EXPONENTIALS_8 = (Edit(_EXPONENT_8, "x(r, c) = __fmaf_rn(factor, x(r, c), -shift);"),)
NO_TRANSPOSITION = (Edit(r"(?m)^( +)transpose<kTransposers>\(from, to, warp\);$", r"\1(void)to;"),)
NO_CONVERSION = (
    Edit(
        r"ptx::pack<kFormat>\(p\(first\), p\(first \+ 1\), p\(first \+ 4\), p\(first \+ 5\)\)",
        "__float_as_uint(p(first))",
    ),
)
# 2^x by a polynomial of degree 3 (error 6e-4, where e4m3 keeps 2^-4) on the multiply-add units.
_POLYNOMIAL = """\
CUTE_DEVICE float exp2_by_polynomial(float z) {
  z = fmaxf(z, -126.0f);
  float whole = z + 12582912.0f;
  float rest = z - (whole - 12582912.0f);
  float p = __fmaf_rn(rest, 0.05550411f, 0.2402265f);
  p = __fmaf_rn(rest, p, 0.6931472f);
  p = __fmaf_rn(rest, p, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(whole) << 23));
}

"""


def polynomial_exponentials(of: int) -> tuple[Edit, ...]:
    """One in `of` exponentials by a polynomial."""
    return (
        Edit(
            r"template <class X, class O, class Statistic>\nCUTE_DEVICE void weigh",
            rf"{_POLYNOMIAL}\g<0>",
        ),
        Edit(
            _EXPONENT_8,
            f"float z = __fmaf_rn(factor, x(r, c), -shift);\n"
            f"      x(r, c) = c % {of} == 0 ? exp2_by_polynomial(z) : ptx::ex2(z);",
        ),
    )


@dataclass(frozen=True, eq=False)
class _Made:
    """The launches of a family with its texts edited, with that much shared memory at least."""

    family: Family
    edits: tuple[Edit, ...]
    shared_bytes: int

    @cache  # noqa: B019 - lives as long as its trial
    def __call__(self, *choice: object) -> Launch:
        made = self.family.make(*choice)  # type: ignore[arg-type]
        made = replace(made, shared_bytes=max(made.shared_bytes, self.shared_bytes))
        return replace(made, source=edited(made.source, self.edits)) if self.edits else made


def family_of(
    shipped: Variant, config: Config, edits: tuple[Edit, ...] = (), shared_bytes: int = 0
) -> Family:
    """That variant's family with this config, listed or not, and its texts edited; shared_bytes:
    more than a block needs leaves fewer blocks on a multiprocessor."""
    family: Family = shipped.forward.__self__  # type: ignore[union-attr]
    return replace(family, configs=(config,), make=_Made(family, edits, shared_bytes))


def choice_of(config: Config, dtype: str, head_dim: int) -> Choice:
    """The build of these."""
    return config, dtype, head_dim, "", "strided"
