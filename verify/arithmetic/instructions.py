"""Instructions and functions: error bounds of the transcendental functions and divisions that
attention kernels call.

What documents give in units in the last place counts as so many 2**-23, relative.  The PTX ISA and
the CUDA C++ Programming Guide count from the correctly rounded result, so half a place is added to
each exponential and tanh.  The roundings of a fp32 argument are counted where it is computed.
docs/arithmetic.md says what is documented and what measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verify.arithmetic.dtypes import DTYPES

ULP = 2.0**-23

_PTX = "PTX ISA 9.1"
_CUDA = "CUDA C++ Programming Guide 13, mathematical functions: observed maxima, no guarantee"
_IEEE = "IEEE 754-2019: correctly rounded"


@dataclass(frozen=True)
class Function:
    """|computed - f(x)| <= error_at(|x|) |f(x)| + absolute.

    error: relative.  slope: what it grows by with |x|.  argument: the format that the argument is
    rounded to before, so that an exponential of base 2 errs by |x| ln 2 times its unit roundoff
    more; results are of that format. absolute: half a subnormal, what is flushed, or all the error
    there is.  source: where the figures are from. exact_at_integers: arches on which 2^n was
    measured to be exact at every integer n from -126 to 127; no document says so. one_at_zero:
    where it is from that f(0) is 1, not only nearly; "" where nothing says so.
    """

    error: float
    source: str
    slope: float = 0.0
    absolute: float = 0.0
    argument: str = "float32"
    exact_at_integers: tuple[str, ...] = ()
    one_at_zero: str = ""

    @property
    def uniform(self) -> bool:
        """Whether `error` says all: fp32 in, fp32 out, the same relative error for every
        argument."""
        return not self.slope and self.argument == "float32"

    def error_at(self, size: float) -> float:
        """Relative error at |x| = size, that of the rounded argument included; an argument in fp32
        is counted by its user."""
        own = self.error + self.slope * size
        if self.argument == "float32":
            return own
        return (1 + own) * math.exp(DTYPES[self.argument].unit_roundoff * math.log(2) * size) - 1


_FLUSHED = 2.0**-126
_HALF_SUBNORMAL = 2.0**-25  # of fp16
_EXACT = ("sm_90",)  # an H100: reports/nvidia-h100-80gb-hbm3/probes.md
# Both of these were measured, too: the results at the edges, as bits, in the same report.
_OF_ZERO = "CUDA Math API 13.0, exp2f and expf (crt/math_functions.h 13.0.88): 1 for +-0"

EXP: dict[str, Function] = {
    "ex2.approx": Function(
        2.5 * ULP,
        f"{_PTX}, ex2: 2 ulp, .ftz or not",
        absolute=_FLUSHED,
        exact_at_integers=_EXACT,
        one_at_zero="PTX ISA, section 9.7.3 (ex2), table of special inputs: +1.0 for -0.0 and +0.0",
    ),
    "exp2f": Function(2.5 * ULP, f"{_CUDA}: 2 ulp", exact_at_integers=_EXACT, one_at_zero=_OF_ZERO),
    "expf": Function(2.5 * ULP, f"{_CUDA}: 2 ulp", one_at_zero=_OF_ZERO),
    "vexp": Function(
        2.5 * ULP,
        "SLEEF's class of 1 ulp, counted as 2",
        one_at_zero="the polynomial is 1 + x (1 + ...); measured",
    ),
    "numpy": Function(
        4.5 * ULP, "numpy's float32 loops are within 4 ulp", one_at_zero="C11, F.10.3; measured"
    ),
    "exp_u20": Function(
        20.5 * ULP,
        "torch's vectorised exp with 20 ulp; at most 5.5 seen",
        one_at_zero="the polynomial is 1 + x (1 + ...); measured",
    ),
    # torch's exp for fp16 and bf16 flash attention on CPUs; exp(0) = 0.99995.
    "fexp_u20": Function(1.13e-4, "measured: at most 985 ulp, 1.125e-4"),
    # FlashAttention-4: x = integer + fraction, 1 + f (0.695146 + f (0.227564 + f 0.0771191)),
    # clamped below 2**-127.
    "exp2_poly3": Function(
        8.8e-5,
        "measured over every fraction of 23 bits in fp32: 8.769e-5",
        absolute=_FLUSHED,
        one_at_zero="1 + 0 (...)",
    ),
    "__expf": Function(
        2.5 * ULP, f"{_CUDA}: 2 + floor(|1.173 x|) ulp", slope=1.173 * ULP, absolute=_FLUSHED
    ),
    "ex2.approx.f16": Function(
        2.0**-9.9, f"{_PTX}, ex2: 2^-9.9", absolute=_HALF_SUBNORMAL, argument="float16"
    ),
    "ex2.approx.ftz.bf16": Function(
        2.0**-7, f"{_PTX}, ex2: 2^-7", absolute=_FLUSHED, argument="bfloat16"
    ),
}

TANH: dict[str, Function] = {
    "tanhf": Function(2.5 * ULP, f"{_CUDA}: 2 ulp"),
    "tanh.approx": Function(2.0**-11 + 0.5 * ULP, f"{_PTX}, tanh: 2^-11 relative"),
    "tanh.approx.f16": Function(
        0.0, f"{_PTX}, tanh: 2^-10.987 absolute", absolute=2.0**-10.987, argument="float16"
    ),
    # The document says 2^-8; all 65536 arguments tried on an H100 err by up to 1.00007 of that, at
    # 0.746.
    "tanh.approx.bf16": Function(
        0.0, "measured on an H100: 1.00007 * 2^-8", absolute=1.0001 * 2.0**-8, argument="bfloat16"
    ),
}

LOG: dict[str, Function] = {
    "lg2.approx": Function(
        2.0**-22, f"{_PTX}, lg2: 2^-22, absolute on (0.5, 2), else relative", absolute=2.0**-22
    ),
    "log2f": Function(ULP, f"{_CUDA}: 1 ulp"),
    "logf": Function(ULP, f"{_CUDA}: 1 ulp"),
    "__logf": Function(
        3 * ULP, f"{_CUDA}: 2^-21.41, absolute on [0.5, 2], else 3 ulp", absolute=2.0**-21.41
    ),
    "vlog": Function(ULP, "SLEEF's class of 1 ulp"),
}

DIVISION: dict[str, Function] = {
    "div.rn": Function(ULP / 2, _IEEE, absolute=2.0**-150),
    "div.full": Function(2 * ULP, f"{_PTX}, div.full: 2 ulp", absolute=_FLUSHED),
    "div.approx": Function(
        2 * ULP, f"{_PTX}, div.approx: 2 ulp for divisors in [2^-126, 2^126]", absolute=_FLUSHED
    ),
    "rcp.rn": Function(ULP / 2, _IEEE, absolute=2.0**-150),
    "rcp.approx": Function(ULP, f"{_PTX}, rcp: 1 ulp, .ftz or not", absolute=_FLUSHED),
}

EXP_ERROR: dict[str, float] = {
    name: function.error for name, function in EXP.items() if function.uniform
}
TANH_ERROR: dict[str, float] = {
    name: function.error for name, function in TANH.items() if function.uniform
}
# absolute on (0.5, 2), relative elsewhere: the worst logarithm in use
LOG_ERROR = LOG["lg2.approx"].error


def exp_error(name: str) -> float:
    """Relative error of the named exponential, where one number says it; raises ValueError that
    lists those."""
    try:
        return EXP_ERROR[name]
    except KeyError:
        raise ValueError(
            f"numerics.softmax.exp: {name!r} is none of {', '.join(EXP_ERROR)}"
        ) from None


def exp_error_at_integers(name: str, arch: str) -> float:
    """Relative error of the named exponential of base 2 at integers: none where none was measured,
    else as anywhere."""
    return 0.0 if arch in EXP[name].exact_at_integers else exp_error(name)


def tanh_error(name: str) -> float:
    """Relative error of the named tanh, where one number says it; raises ValueError that lists
    those."""
    try:
        return TANH_ERROR[name]
    except KeyError:
        raise ValueError(
            f"numerics.softmax.softcap_tanh: {name!r} is none of {', '.join(TANH_ERROR)}"
        ) from None
