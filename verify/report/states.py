"""What a reader must see of a declaration before its verdict means anything: lenient bounds, a
narrow support, what is claimed, and what was not judged.

None of these is a verdict: a lenient or narrow kernel may be right, and so may a plain function
with unexplained cases.  `--strict` turns these into a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from verify.document import text
from verify.report.kept_scores import judged_as, unexplained
from verify.report.schema import DTypeReport, Report, VariantReport
from verify.variant import MASK_KINDS, STRIDED
from verify.variant.numerics import leaves

# A support that ends below three tiles of 64 keys, or that spans fewer lengths than these, never
# asks for a second rescale.
LENGTHS = 129
# The smallest k of a matrix instruction: below it a kernel is a softmax of a few products.
HEAD_DIM = 16
# Judged cases with a bound / best bound; of fewer, the median says little.
CASES = 8
# Median of bound / best bound above which a declaration is lenient, by how coarse its words are:
# four times, or more, the largest that honest arithmetic of that kind shows (docs/report-schema.md
# has the measurements).
FLOORS = {"fine": 16.0, "8 bits": 128.0, "16 bits": 256.0, "scaled bf16": 8192.0, "tf32": 8192.0}
# No honest kernel rounds a factor or a finished sum more often (7 in the longest chain), or
# rescales later (8 in FlashAttention-4).
COUNTED = {
    "softmax.scale_roundings": 8,
    "output.roundings": 8,
    "sums.roundings": 8,
    "softmax.maximum.lag": 16,
}

# The states that `--strict` objects to.
GRAVE = ("lenient", "narrow", "unexplained")
CLAIMS = (
    "What each variant says that it computes, and nothing beyond it is judged. Lenient: the bounds"
    " that follow from its own declaration are so wide that passing says little. Narrow: it claims"
    " so few lengths or head dims that passing says little. Unexplained: a plain function exceeds,"
    " in some cases, the bounds that it keeps in the others."
)

_COARSE = (
    *("products.accumulator", "products.score_accumulator", "softmax.scores"),
    *("score_gradient.delta", "sums.atomics_dtype"),
)
_SIXTEEN = ("float16", "bfloat16")


class State(NamedTuple):
    """One thing to see before the verdict.  said: "bound 107x the best", without the name."""

    name: Literal["lenient", "narrow", "undeclared", "unexplained", "growing"]
    said: str

    def __str__(self) -> str:
        return f"{self.name}: {self.said}"


def states(variant: VariantReport) -> list[State]:
    """What marks one variant.  An undeclared function is judged by the weakest honest arithmetic,
    which it did not declare."""
    found = [State("narrow", said) for said in _narrow(variant["support"])]
    if growth := variant.get("growth"):
        found.append(
            State("growing", f"its process grows by {growth / (1 << 20):.0f} MiB in most runs")
        )
    if growth := variant.get("device_growth"):
        said = f"it keeps {growth / 1024:,.1f} KiB more of the device's memory in most runs"
        found.append(State("growing", said))
    if variant["undeclared"]:
        said = "; ".join(
            filter(None, ("judged by the weakest honest arithmetic", judged_as(variant)))
        )
        beyond = (State("unexplained", said) for said in unexplained(variant))
        return [State("undeclared", said), *beyond, *found]
    return [*(State("lenient", said) for said in _lenient(variant)), *found]


def claimed(variant: VariantReport) -> bool:
    """Whether it was judged and its claims are on record: a file that does not load claims
    nothing."""
    return bool(variant["support"]) and bool(variant["cases"] or variant["failing"])


def marks(variant: VariantReport) -> list[str]:
    """The names of its grave states, each once."""
    return list(dict.fromkeys(state.name for state in states(variant) if state.name in GRAVE))


def strictly(report: Report) -> list[str]:
    """What `--strict` objects to, one line per variant and state."""
    return [
        f"{variant['ref']}: {state}"
        for variant in report["variants"]
        for state in states(variant)
        if state.name in GRAVE
    ]


def _lenient(variant: VariantReport) -> Iterator[str]:
    for declared in _declared(variant):
        for field, most in COUNTED.items():
            count = declared.get(field, 0)
            if isinstance(count, int | float) and not count <= most:
                yield f"{field} is {text.number(float(count))}, honest kernels have at most {most}"
    for dtype in variant["dtypes"]:
        kind, ratio = _widest(variant, dtype)
        if ratio is not None and not ratio <= FLOORS[kind]:
            yield f"bound {text.number(ratio)}x the best ({dtype['dtype']})"


def _widest(variant: VariantReport, dtype: DTypeReport) -> tuple[str, float | None]:
    """The kind of arithmetic that is declared for a dtype, and the largest median of bound / best
    bound of its oracles."""
    medians = [
        spread["median"]
        for oracle in dtype["oracles"]
        if (spread := oracle.get("bound_ratio")) is not None and spread["count"] >= CASES
    ]
    worst = max(medians, key=lambda ratio: math.inf if math.isnan(ratio) else ratio, default=None)
    kinds = {kind(declared, dtype["dtype"]) for declared in _declared(variant)}
    return max(kinds, key=FLOORS.__getitem__, default="fine"), worst


def _declared(variant: VariantReport) -> list[Mapping[str, Any]]:
    """The declarations that its own bounds follow from: a backward alone says nothing of a
    forward."""
    forward = [] if variant["entries"] == ["backward"] else [variant["numerics"]]
    backward = [] if variant["gradients"] is None else [variant["gradients"]]
    return [leaves(declared) for declared in (*forward, *backward)]


def kind(declared: Mapping[str, Any], dtype: str) -> str:
    """How coarse the declared words make the arithmetic of inputs in that dtype: a key of
    FLOORS."""
    if dtype.startswith("float8"):
        return "8 bits"
    if dtype == "float32" and declared.get("products.float32_products", "ieee") == "tf32":
        return "tf32"
    words = [declared.get(field) or "float32" for field in _COARSE]
    if declared.get("products.prescale", "none") != "none":
        operand = declared.get("products.operands", "input")
        rounded = dtype if operand == "input" else operand
        if rounded == "bfloat16":
            return "scaled bf16"
        words.append(rounded)
    narrow = any(word in _SIXTEEN or (word == "input" and dtype in _SIXTEEN) for word in words)
    return "16 bits" if narrow else "fine"


def _narrow(support: Mapping[str, Any]) -> Iterator[str]:
    least, most = _lengths(support)
    if most is not None and (most < LENGTHS or most - least + 1 < LENGTHS):
        yield _span("seqlen", least, most)
    dims = _integers(support.get("head_dims"))
    if dims and max(dims) < HEAD_DIM:
        yield f"head dim <= {max(dims)}"


def _lengths(support: Mapping[str, Any]) -> tuple[int, int | None]:
    least, most = support.get("min_seqlen"), support.get("max_seqlen")
    return least if isinstance(least, int) else 1, most if isinstance(most, int) else None


def _span(name: str, least: int, most: int | None) -> str:
    if most is None:
        return f"any {name}" if least <= 1 else f"{name} >= {least}"
    if least <= 1:
        return f"{name} <= {most}"
    return f"{name} = {most}" if least == most else f"{name} {least} to {most}"


def _integers(value: Any) -> list[int]:
    return (
        [item for item in value if isinstance(item, int)] if isinstance(value, list | tuple) else []
    )


def claims(variant: VariantReport) -> str:
    """The claimed support in one line, and the words of its arithmetic that make bounds wide; plain
    text."""
    support = variant["support"]
    dims = _integers(support.get("head_dims"))
    parts = [f"head dim {text.intervals(dims) or 'none'}", _span("seqlen", *_lengths(support))]
    parts.append(_masks(support) + (" and intersections" if support.get("intersections") else ""))
    grouped = support.get("grouped_heads")
    parts += ["grouped heads only" if grouped == "only" else "grouped heads"] * bool(grouped)
    parts += [text.value(word) for word in score_mods(support)]
    parts += [said for name, said in _MISSING.items() if support.get(name) is False]
    for name in ("seqlen_q", "seqlen_kv"):
        if (step := support.get(f"{name}_multiple", 1)) != 1:
            parts.append(f"{name} a multiple of {step}")
    if (windows := support.get("windows", "any")) != "any":
        parts.append(f"{windows} windows only")
    if (scales := support.get("scales", "any")) != "any":
        parts.append(f"{scales} scale only")
    if (layouts := support.get("layouts", "any")) != "any":
        parts.append(f"{layouts} tensors only")
    if (storages := [*support.get("storages", [STRIDED])]) != [STRIDED]:
        parts.append(f"{' or '.join(storages)} storage")
    if variant["contract"].get("lse", "natural") is None and "forward" in variant["entries"]:
        parts.append("returns no LSE")
    return text.one_line("; ".join([*parts, *_words(variant)]))


def score_mods(support: Mapping[str, Any]) -> tuple[str, ...]:
    """The score mods of a support on record; older records have "softcap": true instead."""
    words = support.get("score_mods", ("softcap",) if support.get("softcap") else ())
    return tuple(map(str, words)) if isinstance(words, list | tuple) else ()


def _masks(support: Mapping[str, Any]) -> str:
    masks = support.get("masks", ())
    if isinstance(masks, list | tuple) and {*MASK_KINDS} - {"causal.square"} <= {*map(str, masks)}:
        return "any mask"
    return f"masks {text.value(masks)}"


_SPELT = {"16 bits": "16-bit scores or sums", "tf32": "tf32 products"}
_MISSING = {
    "cross_lengths": "seqlen_q = seqlen_kv only",
    "longer_q": "seqlen_q <= seqlen_kv only",
}


def _words(variant: VariantReport) -> Iterator[str]:
    """What is coarse in the declared arithmetic, where it was declared."""
    found: dict[str, list[str]] = {}
    for dtype in variant["dtypes"] if not variant["undeclared"] else ():
        for name in sorted(
            {kind(one, dtype["dtype"]) for one in _declared(variant)} & _SPELT.keys()
        ):
            found.setdefault(name, []).append(dtype["dtype"])
    for name, dtypes in found.items():
        yield f"{' and '.join(dtypes)} with {_SPELT[name]}"


def gradients(variant: VariantReport) -> str:
    """Why none of its gradients was judged; empty where some were, or where nothing of it was."""
    if not claimed(variant):
        return ""
    if "backward" not in variant["entries"]:
        return "no declared backward"
    judged = any({"dq", "dk", "dv"} & d["tensors"].keys() for d in variant["dtypes"])
    return "" if judged else "no case measured them"


def unjudged(variant: VariantReport) -> str:
    """ "gradients: not judged (no declared backward)", or nothing."""
    reason = gradients(variant)
    return f"gradients: not judged ({reason})" if reason else ""
