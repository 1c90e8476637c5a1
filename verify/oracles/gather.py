"""Gather: one key wins every row by 160 powers of two, so O is that row of V, bit for bit, and LSE
is its logit."""

from __future__ import annotations

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.metamorphic import beyond_arithmetic
from verify.judging.trial import Trial
from verify.oracles import Oracle
from verify.problem.known_answers import gather_targets
from verify.tolerance.arithmetic import resolve
from verify.variant import Declaration

# significant bits of V's patterns: an output that need not be exact is compared after rounding to
# as many
_KEPT = 8


def judge(trial: Trial) -> Ruling:
    """All other weights underflow to zero, the winner's is near exp(0), which 16 bits round to 1:
    16-bit outputs must equal V bitwise, unless tf32 cuts the winner's weight instead."""
    p, run = trial.problem, trial.first
    assert run.out is not None
    targets = gather_targets(p)
    live = targets >= 0
    _, _, v = trial.expanded
    per_head = v.repeat_interleave(p.group, 1)
    index = targets.clamp(min=0)[..., None].expand(*targets.shape, p.head_dim_v)
    want = per_head.gather(2, index) if p.seqlen_kv else torch.zeros_like(run.out)
    cut = resolve(trial.declaration.numerics, trial.config, p, trial.arch).values.operand_error > 0
    got = _rounded(run.out.float()) if cut or p.dtype_out == "float32" else run.out
    bad = live[..., None] & ~(got == want)
    if bool(bad.any()):
        bad &= ~beyond_arithmetic(trial)[..., None]
    if bool(bad.any()):
        at = first(bad)
        b, h, i, _ = at
        message = (
            f"out[b={b}, h={h}, q={i}] should be row {int(targets[b, h, i])} of"
            f" V{_which(got[b, h, i], per_head[b, h])}; {int(bad.any(-1).sum())} of {live.numel()}"
            f" rows are wrong (first element {place('out', at)}: got {float(run.out[at]):.9g},"
            f" should be {float(want[at]):.9g})"
        )
        return convict(
            "gather", message, name="out", bad=bad, got=float(run.out[at]), bound=float(want[at])
        )
    if run.lse is None:
        return Ruling()
    natural, truth = trial.natural_lse(run.lse), trial.truth
    compared = compare(
        natural, truth.lse.nan_to_num(neginf=0.0), truth.lse_bound, dtype_named("float32")
    )
    wrong = live & ~(compared.ratio <= 1)
    if not bool(wrong.any()):
        return Ruling()
    at = first(wrong)
    message = (
        f"lse is {float(natural[at]):.9g} at {place('lse', at)}, should be the winning logit"
        f" {float(truth.lse[at]):.9g}; {int(wrong.sum())} of {wrong.numel()} rows are wrong"
    )
    return convict(
        "gather",
        message,
        name="lse",
        bad=wrong,
        got=float(natural[at]),
        bound=float(truth.lse_bound[at]),
    )


def _rounded(tensor: Tensor) -> Tensor:
    """fp32 rounded to _KEPT significant bits, to nearest."""
    drop = 24 - _KEPT
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (1 << (drop - 1))) & ~((1 << drop) - 1)).view(torch.float32)


def _which(row: Tensor, values: Tensor) -> str:
    """Which row of V was read instead, in words, if one was."""
    hits = (values == row).all(-1).nonzero().flatten()
    return f", is row {int(hits[0])}" if len(hits) else ""


def excludes(declaration: Declaration) -> str | None:
    """Why O need not be a row of V bit for bit, or None."""
    numerics = declaration.numerics
    up = numerics.maximum_excess or numerics.maximum_step
    return "subtracts more than the maximum: the winner's P is not 1" if up else None


ORACLE = Oracle(
    name="gather",
    group="gather",
    catches="wrong indexing: layouts, strides, tails, swizzles, head maps, page tables",
    judge=judge,
    excludes=excludes,
)
