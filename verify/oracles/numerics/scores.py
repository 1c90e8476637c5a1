"""Scores: probes for scores rounded to 16 bits, operands scaled and rounded before the product, and
tf32 in place of fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verify.arithmetic.rounding import to_bits, to_format
from verify.judging.trial import Trial
from verify.oracles.numerics.hypotheses import (
    NARROW,
    Claim,
    excess,
    logit_difference,
    nearest,
    run_if_supported,
)
from verify.problem import Problem
from verify.problem.source import Source

_ROWS = 64
_SCALE = 0.1372  # not a power of two, with or without a factor of log2(e)
_LIMIT = 12.0
_LOG2_E = math.log2(math.e)


def rounding(trial: Trial) -> Claim | None:
    """Test the rounding of scores: raw scores of two keys near 4096, about 16 apart, in steps of
    1/4; 16 bits round them to multiples of 4 or of 32."""
    p = trial.problem
    if p.head_dim < 8:
        return None
    steps = torch.arange(_ROWS)
    q, k = torch.zeros(_ROWS, p.head_dim), torch.zeros(_ROWS, p.head_dim)
    q[:, 0], k[:2, 0] = 64.0, 64.0
    q[:, 1], k[1, 1] = (steps % 8).float(), 0.25
    q[:, 2], k[1, 2] = (steps // 8).float(), 2.0
    q[:, 3], k[0, 3] = 1.0, 8.0
    probe = run_if_supported(trial, "rounding of scores", _pair(p), q, k, _one_hot(p))
    if probe is None:
        return None
    raw = (q.double() @ k.double().T)[:, :2]
    possible = {"float32": raw * p.scale}
    for name in (*NARROW, "float8_e4m3fn"):
        rounded = to_format(name)
        possible[name] = rounded(raw) * p.scale
        possible[f"{name}, scaled and rounded"] = rounded(raw * p.scale)
        possible[f"{name}, scaled for base 2 and rounded"] = (
            rounded(raw * p.scale * _LOG2_E) / _LOG2_E
        )
    return _claim(probe, "scores", trial.declaration.numerics.softmax.scores, "float32", possible)


def prescaling(trial: Trial) -> Claim | None:
    """Test prescaling: two products of different 16-bit numbers nearly cancel, so a rounding of q
    or k before the product shows."""
    p = trial.problem
    if p.head_dim < 8 or p.format.itemsize == 1:
        return None
    if trial.declaration.support.scales == "any":
        p = p.but(softmax_scale=_SCALE)
    bits = 24 if p.dtype == "float32" else p.format.precision
    exact, source = to_bits(bits), Source(p)
    q, k = (
        torch.zeros(_ROWS, p.head_dim, dtype=torch.float64),
        torch.zeros(_ROWS, p.head_dim, dtype=torch.float64),
    )
    mantissas = source.integers("q", "prescaling", 0, 65536, (_ROWS, 2)).double()
    fine = source.integers("k", "prescaling", 0, 65536, (_ROWS, 2)).double()
    q[:, :2] = exact(64 + (mantissas + fine / 65536) / 1024)
    k[0, 0] = k[1, 1] = 64.0
    # The term that makes both scores nearly equal, in three parts that the format holds.
    missing = (q[:, 0] - q[:, 1]) * 64 + torch.linspace(-12, 12, _ROWS, dtype=torch.float64)
    for place in (2, 3, 4):
        q[:, place] = exact(missing)
        k[1, place] = 1.0
        missing = missing - q[:, place]
    probe = run_if_supported(trial, "prescaling", _pair(p), q, k, _one_hot(p))
    if probe is None:
        return None
    possible = {"none": (q @ k.T)[:, :2] * p.scale}
    operands = to_format(p.dtype) if p.dtype != "float32" else to_format("bfloat16")
    for factor, said in ((1.0, ""), (_LOG2_E, ", for base 2")):
        scaled, root = p.scale * factor, math.sqrt(abs(p.scale) * factor)
        name = p.dtype if p.dtype != "float32" else "bfloat16"
        possible[f"q, rounded to {name}{said}"] = (operands(q * scaled) @ k.T)[:, :2] / factor
        sides = operands(q * math.copysign(root, p.scale)), operands(k * root)
        possible[f"sqrt, rounded to {name}{said}"] = (sides[0] @ sides[1].T)[:, :2] / factor
    if p.dtype == "float32":
        for name, rounded in {
            "tf32": to_bits(11),
            "tf32, truncated": to_bits(11, truncate=True),
            "bfloat16": to_bits(8),
        }.items():
            possible[f"none, but products of {name}"] = (rounded(q) @ rounded(k).T)[:, :2] * p.scale
    return _claim(probe, "operands", _declared(trial, p), "none", possible)


def _declared(trial: Trial, p: Problem) -> str:
    numerics = trial.declaration.numerics
    if p.dtype == "float32" and numerics.products.float32_products != "ieee":
        return f"{numerics.products.prescale}, products may be {numerics.products.float32_products}"
    return numerics.products.prescale


def _pair(p: Problem) -> Problem:
    return p.but(batch=1, heads_q=p.group, heads_kv=1, seqlen_q=_ROWS, seqlen_kv=_ROWS)


def _one_hot(p: Problem) -> Tensor:
    values = torch.zeros(_ROWS, p.head_dim_v)
    values[0, 0] = values[1, 1] = 1.0
    return values


def _claim(probe: Trial, name: str, declared: str, honest: str, logits: dict[str, Tensor]) -> Claim:
    """Return the claim that fits the rows best, of pairs of logits (rows, 2); the first row is left
    out, since it sees one key under a causal mask."""
    got = logit_difference(probe)[0, 0, 1:]
    possible = {
        said: (pair[1:, 1] - pair[1:, 0]).clamp(-_LIMIT, _LIMIT) for said, pair in logits.items()
    }
    got = got.clamp(-_LIMIT, _LIMIT)
    word = nearest(got, possible, _LIMIT)
    where = torch.zeros(probe.problem.shape_out, dtype=torch.bool)
    where[:, :, 1:, :2] = True
    apart = (got - possible[honest]).abs()
    at = int(apart.nan_to_num(nan=math.inf).argmax())
    evidence = (
        f"row {at + 1} has a logit difference of {float(got[at]):.4g}, should be"
        f" {float(possible[honest][at]):.4g}"
    )
    return Claim(name, word, declared, excess(probe, where), word != honest, evidence)
