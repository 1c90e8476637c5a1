"""Split and merge: attention over two ranges of keys, merged by their LSE in fp64, is attention
over both.

O = sum_i w_i O_i with w_i = exp(LSE_i - LSE), and LSE = ln sum_i exp(LSE_i). This also holds if a
row sees no key of one range; the LSE of that range then counts as -inf. If B_i bounds O_i, L_i
bounds LSE_i and L = max_i L_i, no w_i has an error factor above exp(L_i + L). So the merged O is
within sum_i w_i [exp(L_i + L) B_i + expm1(L_i + L) |O_i - O|], and the merged LSE within L. The
keys are split in the middle, at an end, one key from an end, or at random. The kernel must give an
LSE and support lengths that differ and problems without a mask.

Premises: the second range's keys begin at 0 (position_free_scores) and keep their factor
(factors_by_head), a range's LSE counts its keys alone (visible_mass_only) and divides its O
(rows_average_values), and O is neither scaled nor rounded twice (exact_output).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import dtype_named
from verify.judging.findings import Ruling
from verify.judging.metamorphic import RelatedResult, check_within_bounds, failed, part_bound
from verify.judging.parts import Part, with_mask
from verify.judging.together import Wanted
from verify.judging.trial import Trial
from verify.oracles import Group, Oracle
from verify.problem import Problem
from verify.problem.coverage import square_only
from verify.problem.source import Source
from verify.variant import Declaration, Support
from verify.variant.support import up


def _least(support: Support) -> int:
    """Return the fewest keys that a range can have."""
    return up(support.min_seqlen, support.seqlen_kv_multiple)


def split(problem: Problem, support: Support) -> int:
    """Return where the second range of keys begins: in the middle, at an end, one key from an end,
    or at random; at a multiple that the support has."""
    least, step = _least(support), support.seqlen_kv_multiple
    kind, word = (int(n) for n in Source(problem).raw("k", "split", 2))
    keys = problem.seqlen_kv
    chosen = (keys // 2, word % (keys + 1), word % (keys + 1), 1, keys - 1, 0)[kind % 6]
    return max(least, min(chosen // step * step, keys - least))


def parts(problem: Problem, support: Support) -> tuple[Part, Part]:
    """Return the two ranges of keys, each of a length that the support has."""
    at = split(problem, support)
    return Part.of(problem, keys=range(at)), Part.of(problem, keys=range(at, problem.seqlen_kv))


def possible(problem: Problem, support: Support) -> bool:
    """Return whether the support has both ranges as problems."""
    if problem.seqlen_kv < 2 * _least(support):
        return False
    return all(part.problem(problem, support) is not None for part in parts(problem, support))


def adapt(problem: Problem, support: Support) -> Problem | None:
    """Replace a mask that a range of keys alone cannot have, such as a random one; make the keys
    long enough for two ranges."""
    if problem.seqlen_kv < 2 * _least(support):
        problem = problem.but(seqlen_kv=2 * _least(support))
    return with_mask(problem, support, lambda candidate: possible(candidate, support))


@dataclass(frozen=True)
class Merged:
    """O and LSE of the whole, merged from its parts, fp64, and their allowed errors."""

    out: Tensor
    out_bound: Tensor
    lse: Tensor
    lse_bound: Tensor


def merge(trials: Sequence[Trial]) -> Merged:
    """Merge the parts: O = sum_i w_i O_i with w_i = exp(LSE_i - LSE), LSE = ln sum_i exp(LSE_i)
    (Dao et al., flash decoding).

    If a row sees no key of a part, the LSE that the contract promises counts as -inf.  If
    |ln(computed / exact exp(LSE_i))| <= L_i and L = max_i L_i, no w_i has an error factor above
    exp(L_i + L), so O is within sum_i w_i [exp(L_i + L) B_i + expm1(L_i + L) |O_i - O|], and LSE
    within L.
    """
    outs, lses = (
        torch.stack(found) for found in zip(*(_as_merged(trial) for trial in trials), strict=True)
    )
    truths = [trial.truth for trial in trials]
    bounds, exact = (
        torch.stack([getattr(truth, name) for truth in truths]) for name in ("out_bound", "out")
    )
    bounds = part_bound(bounds, exact, trials[0].problem.format_out)
    logs, slack = (
        torch.stack([getattr(truth, name) for truth in truths]) for name in ("lse", "lse_bound")
    )
    total = torch.logsumexp(logs, 0)
    weight = torch.where(logs == -math.inf, 0.0, torch.exp(logs - total))[..., None]
    slack = torch.where(logs == -math.inf, 0.0, slack)
    largest = slack.amax(0)
    off = (slack + largest)[..., None]
    mean = (weight * exact).sum(0)
    bound = weight * (torch.exp(off) * bounds + torch.expm1(off) * (exact - mean).abs())
    lse = torch.logsumexp(lses, 0)
    share = torch.where(lse == -math.inf, 0.0, torch.exp(lses - lse))[..., None]
    return Merged(
        (share * outs).sum(0),
        # A part that is not judged can be NaN, for any weight.
        torch.where((weight > 0) | bounds.isinf() & (logs != -math.inf)[..., None], bound, 0.0)
        .nan_to_num(nan=math.inf, posinf=math.inf)
        .sum(0),
        lse,
        largest,
    )


def _as_merged(trial: Trial) -> tuple[Tensor, Tensor]:
    """Return a part's O and LSE, fp64; promised values of rows without a key become 0 (if NaN) in
    O and -inf in LSE."""
    run, contract = trial.first, trial.declaration.contract
    assert run.out is not None
    assert run.lse is not None
    out, lse = run.out.double(), trial.natural_lse(run.lse)
    promised = trial.truth.empty & (
        lse.isnan() if math.isnan(contract.empty_row_lse) else run.lse == contract.empty_row_lse
    )
    if math.isnan(contract.empty_row_out):
        out = out.masked_fill(promised[..., None], 0.0)
    return out, lse.masked_fill(promised, -math.inf)


def _ranges(trial: Trial) -> list[Trial]:
    """Return the trials of both ranges of keys."""
    return trial.noted("split_merge", _split)


def _split(trial: Trial) -> list[Trial]:
    support = trial.declaration.support
    trials = []
    for part in parts(trial.problem, support):
        problem = part.problem(trial.problem, support)
        assert problem is not None
        tag = f"keys {part.keys.start}..{part.keys.stop}"
        trials.append(trial.beside(tag, problem, inputs=part.inputs(trial)))
    return trials


def launches(trial: Trial) -> list[Wanted]:
    """The first launches of both ranges."""
    return [Wanted(each) for each in _ranges(trial)]


def judge(trial: Trial) -> Ruling:
    """Run both ranges of keys, merge their O and LSE, and compare with the whole within bounds."""
    trials = _ranges(trial)
    for other in trials:
        found = failed(other)
        if found is not None:
            return found
    at = trials[0].problem.seqlen_kv
    when = f"merged from keys 0..{at} and {at}..{trial.problem.seqlen_kv}"
    return check_within_bounds("split_merge", when, _results(trial, merge(trials)))


def _results(trial: Trial, merged: Merged) -> Iterator[RelatedResult]:
    run, truth, live = trial.first, trial.truth, ~trial.truth.empty
    assert run.out is not None
    assert run.lse is not None
    out = trial.problem.format_out
    yield RelatedResult(
        "out", run.out, truth.out_bound, merged.out, merged.out_bound, truth.out, out, live
    )
    lse, natural = dtype_named("float32"), trial.natural_lse(run.lse)
    yield RelatedResult(
        "lse", natural, truth.lse_bound, merged.lse, merged.lse_bound, truth.lse, lse, live
    )


def excludes(declaration: Declaration) -> str | None:
    """Return the reason why a variant's results cannot be merged, or None."""
    if declaration.contract.lse is None:
        return "gives no LSE"
    if square_only(declaration.support):
        return "supports no lengths that differ"
    return None if "full" in declaration.support.masks else "supports no problem without a mask"


GROUP = Group(
    name="split_merge",
    about="two ranges of keys, merged by their LSE",
    family="relations",
    adapt=adapt,
)
ORACLE = Oracle(
    name="split_merge",
    group="split_merge",
    catches=(
        "an LSE that is not the logarithm of O's divisor; wrong rows that see no key of a range of"
        " keys"
    ),
    judge=judge,
    launches=launches,
    excludes=excludes,
    needs=frozenset(
        {
            Premise.POSITION_FREE_SCORES,
            Premise.VISIBLE_MASS_ONLY,
            Premise.ROWS_AVERAGE_VALUES,
            Premise.FACTORS_BY_HEAD,
            Premise.EXACT_OUTPUT,
        }
    ),
    concerns=lambda trial: trial.problem.pairs > 0,
)
