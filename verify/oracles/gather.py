"""Gather: one key wins every row by 160 powers of two, so O is that key's row of V, bit for bit,
and LSE is its logit.

K holds distinct codes of +-1. q_i is the code of one visible key pi(i), so large that every other
weight is below 2^-160 of the winner's: zero in fp32. Hence O = V[pi(i)] bit for bit, and LSE is the
winning logit. The winner's own weight is near 1, and 16 bits round it to 1. In fp32, and if tf32
cuts the weight (one fma per exponent leaves it below 1), O is rounded to the 8 bits that V has
before it is compared; and it must be within the bound of a row of one key, since what is 0 rounds
nothing (docs/tolerance.md, *Exact sums*). The rows of V differ clearly, so the finding can name the
row that was read instead. An O in 8 bits is the rounded multiple of the row, and an element that
lies within 2^-9 of the middle between two numbers may be either. LSE is the winner's score S. Every
unit adds the products of the codes exactly, and the row sum is the winner's weight and zeros. So,
without a prescale, scores in 16 bits or merged parts, what is rounded is the factor of the scores
(r roundings), its product, a fused exponent's residual, the sum with the logarithm (1 each), and
changes of base (4): (r + 7) u |S|, beside the errors of the exponential at 0 and of the logarithm
at 1. The oracle catches wrong indices: layouts, swizzles, tails, head maps; in 8 bits, an O that is
cut instead of rounded. It does not judge kernels that round the maximum up (`maximum.excess`,
`maximum.step`): the winner's P is not 1 there.

Backward: the same codes, with integers in V and dO. If the saved O is V[pi(i)] bit for bit,
delta_i = sum dO O and the winner's dP = dO . V are sums of the same integers, below 2^24. Both are
exact in any order, hence equal. So dS = P (dP - delta) = 0 at the winner for any P, and also at the
other keys, because their P = exp(S - LSE^) underflows: **dQ = dK = 0**, exactly. Rows whose saved O
differs are not judged, nor are keys that one of these rows selects.

dV_j is the sum of P_i dO_i over the rows that select j. P_i = exp(S_i - LSE^_i) is 1 except for the
rounding of LSE^, which is known, and the error of the kernel's own exponent, which is delta of
docs/tolerance-backward.md without kappa, since the products of the codes are exact. In bf16, and
mostly in fp16, P's dtype rounds all of [exp(z - delta), exp(z + delta)] to 1. Then dV is the sum of
integers, rounded once if necessary. Otherwise the error that P can have is allowed, and no more.

The oracle does not judge a backward whose declaration allows another correct result:

- a D that is summed up from P dP and a saved LSE (`delta_of`), and sums in bfloat16: D is not dP;
- K rounded after the multiplication by the scale;
- delta or sums stored in 16 bits;
- an exponential that is not known to vanish;
- a field of `GradientNumerics` that the oracle does not name.

No field of `Numerics` matters: the oracle reads the saved O and LSE, and the backward uses nothing
else of the forward. If a backward computes its own softmax, P_i = exp(0) / 1 = 1; then every row is
judged and dV has no slack, for any scaling of Q and K.

The backward catches wrong indices, the delta of another row or head, a delta with a small error
(2^-9 passes the bound in bf16), lost and doubled rows, and a P that is not 1.

Premises: the gap between scores is that of the products (linear_scores, position_free_scores), only
visible keys have weight (visible_mass_only, rows_average_values), and O is rounded once,
after a known factor at most (known_output). The backward reads the saved O and does not need that.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from references.positions import slices
from references.premises import Premise
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.instructions import LOG_ERROR
from verify.arithmetic.rounding import cast
from verify.arithmetic.unit import Unit
from verify.cell.arena import bits
from verify.judging.by_rows import key_rows
from verify.judging.comparison import compare
from verify.judging.findings import Ruling, convict, first, place
from verify.judging.invariants import KNOWN, KNOWN_GRADIENTS, beyond
from verify.judging.metamorphic import beyond_arithmetic
from verify.judging.selected_sums import selected_sums
from verify.judging.trial import Trial
from verify.judging.truth import LateTruth, Truth
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.known_answers import (
    GATHER_NEEDS,
    gather_gain,
    gather_possible,
    gather_targets,
)
from verify.tolerance.arithmetic import ForwardArithmetic, U, relative
from verify.tolerance.exact_sums import exact_below, exact_unit, of_one_key
from verify.tolerance.resolution import resolve
from verify.tolerance.scaled_output import stored
from verify.variant import Declaration

TRUTH = "gather"
"""The note of a trial that holds its reference and bounds; one that is there is not computed."""
TARGETS = "gather targets"
"""The note of a trial that holds its `gather_targets`."""

_GRADIENT_NEEDS = GATHER_NEEDS | {Premise.VISIBLE_MASS_ONLY, Premise.ROWS_AVERAGE_VALUES}
NEEDS = _GRADIENT_NEEDS | {Premise.KNOWN_OUTPUT}

# significant bits of V's patterns; an output that need not be exact is rounded to as many bits
# before it is compared
_KEPT = 8
_ROWS = 1 << 10  # rows that are compared at once
# relative: what O may be off by before it is rounded to V's patterns all the same
_OFF = 2.0 ** -(_KEPT + 1)

# Exponentials that are 0 at a losing key's exponent, 160 below the winner's in base 2.
_VANISHING = (
    "ex2.approx",
    "exp2f",
    "expf",
    "vexp",
    "__expf",
    "ex2.approx.f16",
    "ex2.approx.ftz.bf16",
)


def judge(trial: Trial) -> Ruling:
    """Check O = V[target] bit for bit, and LSE within its bound.  fp32 outputs, and those of a unit
    that cuts the winner's weight (tf32), are first rounded to _KEPT bits."""
    p, run = trial.problem, trial.first
    assert run.out is not None
    targets = trial.noted(TARGETS, lambda own: gather_targets(own.problem))
    live = targets >= 0
    v = trial.expanded[2]
    cut = resolve(trial.declaration.numerics, trial.config, p, trial.arch).values.operand_error > 0
    if not cut and p.dtype_out != "float32" and _same(trial, targets):
        return _judge_lse(trial, live)
    want = selected_rows(p, v, targets)
    got = _rounded(run.out.float()) if cut or p.dtype_out == "float32" else run.out
    if p.scaled_output is None:
        bad = live[..., None] & ~(got == want)
    else:
        got = run.out.double()
        ends = [_stored(want * off, p) for off in (1 - _OFF, 1 + _OFF)]
        inside = (torch.minimum(*ends) <= got) & (got <= torch.maximum(*ends))
        bad = live[..., None] & ~inside
        want = _stored(want, p)
    if bool(bad.any()):
        bad &= ~beyond_arithmetic(trial)[..., None]
    if bool(bad.any()):
        at = first(bad)
        b, h, i, _ = at
        values = v[b, h // p.group]
        values = values if p.scaled_output is None else _stored(values, p)
        message = (
            f"out[b={b}, h={h}, q={i}] should be row {int(targets[b, h, i])} of"
            f" V{_which(got[b, h, i], values)}; {int(bad.any(-1).sum())} of {live.numel()}"
            f" rows are wrong (first element {place('out', at)}: got {float(run.out[at]):.9g},"
            f" should be {float(want[at]):.9g})"
        )
        return convict(
            "gather", message, name="out", bad=bad, got=float(run.out[at]), bound=float(want[at])
        )
    if p.scaled_output is None and got is not run.out and (off := _off(trial, want, live)):
        return off
    return _judge_lse(trial, live)


def _same(trial: Trial, targets: Tensor) -> bool:
    """Whether all rows see a key and O has the bits of the selected rows of V; some rows at a
    time."""
    p, out = trial.problem, trial.first.out
    assert out is not None
    v = trial.expanded[2]
    stored = v.to(out.dtype)
    if not p.seqlen_kv or bool((targets < 0).any()) or bool((stored.to(v.dtype) != v).any()):
        return False
    table = bits(stored.contiguous()).flatten(0, 2)
    wanted, got = key_rows(p, targets).flatten(), bits(out.contiguous()).flatten(0, 2)
    parts = slices(len(wanted), _ROWS)
    return all(torch.equal(table.index_select(0, wanted[part]), got[part]) for part in parts)


def _judge_lse(trial: Trial, live: Tensor) -> Ruling:
    """Check LSE of the live rows within its bound."""
    run = trial.first
    if run.lse is None:
        return Ruling()
    natural, truth = trial.natural_lse(run.lse), _truth(trial)
    limit = truth.lse_bound
    if (known := _lse_error(trial, truth.lse)) is not None:
        limit = torch.minimum(limit, known).masked_fill(limit.isinf(), torch.inf)
    compared = compare(natural, truth.lse.nan_to_num(neginf=0.0), limit, dtype_named("float32"))
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
        bound=float(limit[at]),
    )


def _off(trial: Trial, want: Tensor, live: Tensor) -> Ruling | None:
    """Return the conviction of an O that rounds to the rows of V, but is too far from one; or
    None."""
    out, bound = trial.first.out, _truth(trial).out_bound
    assert out is not None
    bad = live[..., None] & ~((out.double() - want.double()).abs() <= bound)
    if not bool(bad.any()):
        return None
    at = first(bad)
    got, expected, limit = (float(x[at]) for x in (out, want, bound))
    message = (
        f"out is {got:.9g} at {place('out', at)}, should be {expected:.9g}, one element of V,"
        f" within {limit:.3g}: no other key has any weight; {int(bad.sum())} of {bad.numel()}"
        " elements are wrong"
    )
    return convict("gather", message, name="out", bad=bad, got=got, bound=limit)


def _truth(trial: Trial) -> Truth | LateTruth:
    """Return reference and bounds where one key of a row has all the weight, computed once per
    trial."""
    return trial.noted(TRUTH, _one_key_truth)


def _one_key_truth(trial: Trial) -> Truth:
    a = one_key_arithmetic(trial)
    return trial.truth if a is None else trial.truth_of(a)


def one_key_arithmetic(trial: Trial) -> ForwardArithmetic | None:
    """Return the declared arithmetic where one key of a row has all the weight; None where nothing
    follows from that."""
    if beyond(trial.declaration.numerics, KNOWN) or trial.declaration.undeclared:
        return None
    a = of_one_key(trial.arithmetic)
    if not a.prescaled and _exact_products(trial.problem, a.scores):
        a = replace(a, scores=exact_unit(a.scores), operand_roundings=0.0, in_order=False)
    return a.without_interval


def _exact_products(p: Problem, unit: Unit) -> bool:
    """Return whether the unit adds the products of the codes exactly, in units of the last of the
    gain's three bits."""
    return math.frexp(gather_gain(p))[0] * 8 * p.head_dim < exact_below(unit)


def _lse_error(trial: Trial, lse: Tensor) -> Tensor | None:
    """Return the allowed error of LSE, shaped like it, where Q K^T is exact and the row sum is the
    winner's weight; None where that is not known."""
    p, declared = trial.problem, trial.declaration.numerics
    a = resolve(declared, trial.config, p, trial.arch)
    if beyond(declared, KNOWN) or a.prescaled or a.score_format or a.merged:
        return None
    if not _exact_products(p, a.scores):
        return None
    size = lse.abs().nan_to_num(posinf=0.0)
    # The scale's factor and the product with it; the residual of a fused exponent; the sum with the
    # logarithm; a change of base, and one there and back.
    of_score = relative(a.scale_roundings + 7, U) * size
    small = a.exps + relative(2 * a.blocks, U)
    return of_score + small + U * (1 + size * U) + LOG_ERROR * (1 + 2 * (small + U * size))


def selected_rows(p: Problem, x: Tensor, targets: Tensor) -> Tensor:
    """Return the rows of K or V that the rows select, (batch, heads_q, seqlen_q, dim); that of key
    0 where a row sees none."""
    if not p.seqlen_kv:
        return x.new_zeros(*targets.shape, x.shape[-1])
    found = x.flatten(0, 2).index_select(0, key_rows(p, targets).flatten())
    return found.view(*targets.shape, x.shape[-1])


def _rounded(tensor: Tensor) -> Tensor:
    """Round fp32 to _KEPT significant bits, to nearest."""
    drop = 24 - _KEPT
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (1 << (drop - 1))) & ~((1 << drop) - 1)).view(torch.float32)


def _stored(values: Tensor, problem: Problem) -> Tensor:
    """What an O in 8 bits of these values holds, fp64."""
    scaled = stored(values.double(), problem.scaled_output)
    return cast(scaled.numpy(), problem.format_out).double()


def _which(row: Tensor, values: Tensor) -> str:
    """Name the row of V that equals the result, or return ""."""
    hits = (values == row).all(-1).nonzero().flatten()
    return f", is row {int(hits[0])}" if len(hits) else ""


def excludes(declaration: Declaration) -> str | None:
    """Return the reason why O need not be a row of V bit for bit, or None."""
    numerics = declaration.numerics
    up = numerics.softmax.maximum.excess or numerics.softmax.maximum.step
    return "subtracts more than the maximum: the winner's P is not 1" if up else None


def judge_backward(trial: Trial) -> Ruling:
    """Check dQ = dK = 0 for rows whose saved O is the selected row of V, bit for bit: dS is 0
    there, since P underflows at the losing keys, and dP and delta are equal exact sums at the
    winner.  dV: see `verify.judging.selected_sums`."""
    p, run = trial.problem, trial.first
    targets = gather_targets(p)
    live = targets >= 0
    index = targets.clamp(min=0)[..., None].expand(*targets.shape, p.head_dim_v)
    v = trial.expanded[2].repeat_interleave(p.group, 1)
    want = v.gather(2, index) if p.seqlen_kv else v.new_zeros(*targets.shape, p.head_dim_v)
    exact = torch.ones_like(live) if trial.own_softmax else (trial.start[0] == want).all(-1) | ~live
    selected_by_inexact = torch.zeros(p.batch, p.heads_kv, p.seqlen_kv, dtype=torch.bool)
    b, h, i = (live & ~exact).nonzero(as_tuple=True)
    selected_by_inexact[b, h // p.group, targets[b, h, i]] = True
    measures = (
        {"gather_backward_exact_rows": float(exact[live].double().mean())}
        if bool(live.any())
        else {}
    )
    for name, asked in (("dq", exact), ("dk", ~selected_by_inexact)):
        got = run.outputs[name]
        bad = asked[..., None] & ~(got == 0)
        if bool(bad.any()):
            at = first(bad)
            message = (
                f"{name} is {float(got[at]):.6g} at {place(name, at)}, should be 0: every row"
                f" selects one key, where dP and delta are equal sums of integers; {int(bad.sum())}"
                f" of {bad.numel()} elements are not 0"
            )
            return convict(
                "gather_backward", message, name=name, bad=bad, got=float(got[at]), bound=0.0
            )
    wanted, slack = selected_sums(trial, targets, live)
    output = p.format
    low, high = (cast((wanted + side * slack).numpy(), output).double() for side in (-1, 1))
    got = run.outputs["dv"].double()
    bad = ~((got >= low) & (got <= high))
    if not bool(bad.any()):
        return Ruling(measures=measures)
    at = first(bad)
    message = (
        f"dv is {float(got[at]):.9g} at {place('dv', at)}, should be {float(wanted[at]):.9g}, the"
        f" sum of dO over the rows that select this key, within {float(slack[at]):.3g};"
        f" {int(bad.sum())} of {bad.numel()} elements are wrong"
    )
    return convict(
        "gather_backward", message, name="dv", bad=bad, got=float(got[at]), bound=float(slack[at])
    )


def excludes_backward(declaration: Declaration) -> str | None:
    """Return the reason why dQ and dK need not be 0, or dV not the sum of dO, or None."""
    declared = declaration.gradients
    if declared is None:
        return "declares no gradients"
    if declared.softmax.exp not in _VANISHING:
        return f"declares {declared.softmax.exp}, which is not known to vanish"
    # If K is rounded after it is scaled, the winner's P is not 1, unless the backward computes its
    # own softmax; a rounded delta is not dP, and sums stored in 16 bits are not exact.  The
    # forward's declaration does not matter: the saved O and LSE are read.
    return beyond(
        declared,
        (*KNOWN_GRADIENTS, "products.prescale")
        if declared.softmax.source == "own"
        else KNOWN_GRADIENTS,
    )


GROUP = Group(
    name="gather_backward",
    about="one key wins every row, V and dO hold integers: dQ and dK are 0, dV scatters dO",
    entry="backward",
    family="exact",
    distributions=("gather_integers",),
    excludes_problem=gather_possible,
)

FORWARD = Oracle(
    name="gather",
    group="gather",
    catches="wrong indexing: layouts, strides, tails, swizzles, head maps, page tables",
    judge=judge,
    excludes=excludes,
    needs=NEEDS,
)

BACKWARD = Oracle(
    name="gather_backward",
    group="gather_backward",
    catches=(
        "wrong indexing in a backward, delta of another row or head, lost or doubled rows and keys,"
        " a P that is not 1"
    ),
    judge=judge_backward,
    excludes=excludes_backward,
    needs=_GRADIENT_NEEDS,
)

ORACLES = (FORWARD, BACKWARD)
