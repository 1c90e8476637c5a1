"""Instructions: error bounds of the transcendental functions that attention kernels call.

Relative errors unless said.  Sources: PTX ISA 9.1 (ex2.approx, lg2.approx, tanh.approx), CUDA 13 programming guide
(exp2f, expf, tanhf), the SLEEF accuracy classes, torch's vectorised exp with 20 ulp; numpy's float32 loops are within 4 ulp.
Half an ulp of fp32 is added to each for the rounding of the argument's last operation.
"""

from __future__ import annotations

ULP = 2.0**-23

EXP_ERROR: dict[str, float] = {
    "ex2.approx": 2.5 * ULP,
    "exp2f": 2.5 * ULP,
    "expf": 2.5 * ULP,
    "vexp": 2.5 * ULP,
    "numpy": 4.5 * ULP,
    "exp_u20": 20.5 * ULP,
    "fexp_u20": 1.13e-4,  # torch's exp for fp16 and bf16 flash attention on CPUs: at most 985 ulp, measured; exp(0) = 0.99995
}

TANH_ERROR: dict[str, float] = {
    "tanhf": 2.5 * ULP,
    "tanh.approx": 2.0**-11 + 0.5 * ULP,
}

# Absolute on (0.5, 2), relative elsewhere: lg2.approx.f32, the worst logarithm in use.
LOG_ERROR = 2.0**-22


def exp_error(name: str) -> float:
    """Relative error of the named exponential; raises ValueError that lists the known ones."""
    try:
        return EXP_ERROR[name]
    except KeyError:
        raise ValueError(f"numerics.exp: {name!r} is none of {', '.join(EXP_ERROR)}") from None


def tanh_error(name: str) -> float:
    """Relative error of the named tanh; raises ValueError that lists the known ones."""
    try:
        return TANH_ERROR[name]
    except KeyError:
        raise ValueError(f"numerics.softcap_tanh: {name!r} is none of {', '.join(TANH_ERROR)}") from None
