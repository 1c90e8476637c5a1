"""The results of a case beside its truth: of one, and of many whose tensors are stacked.

Results are compared element by element; largest elements, places and shares are of a case.  So the
tensors of cases of one shape are put together along the batch, the operations of one case compare
them all, and the numbers of all cases come back at once.  A case alone is a stack of one.

`compare_together` gives each trial its part.  It is used for the launch and the truth that it was
made from, and for no other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from verify.arithmetic.dtypes import DType, dtype_named
from verify.judging.comparison import Comparison, compare, summaries, ulps_of
from verify.judging.known_forward import explained_lse, explained_out
from verify.judging.lattice import Explained, explanations
from verify.judging.launch import Launch
from verify.judging.stacked import joined, shape_class, together
from verify.judging.trial import Trial
from verify.judging.truth import Truth
from verify.tolerance.backward import GradientTruth

# Elements of the results of one stack; some twenty tensors of their size live at once.
MOST = 1 << 20
_NOTE = "compared"
_SINGLE = dtype_named("float32")


class Noted(Protocol):
    """What is known of a case's launch beside a truth."""

    @property
    def run(self) -> Launch: ...

    @property
    def truth(self) -> Truth | GradientTruth: ...


N = TypeVar("N", bound=Noted)


@dataclass(frozen=True)
class Compared:
    """One tensor of a case.  explained: what it needs of its interval, if it has one and the
    declaration is the kernel's own."""

    comparison: Comparison
    measures: dict[str, float]
    explained: Explained | None = None

    @property
    def worst(self) -> float:
        """The largest r; 0 of a tensor without elements."""
        return next(iter(self.measures.values()))


@dataclass(frozen=True)
class Results:
    """The tensors of a case by name, of that launch and truth.  saved: r of the O and LSE that a
    backward got, the largest; 0 if it gets none."""

    run: Launch
    truth: Truth | GradientTruth
    tensors: Mapping[str, Compared]
    saved: float = 0.0


def results_of(trial: Trial) -> Results:
    """Those of the first launch: computed together with others', or now."""
    return noted(trial, _NOTE, Results, _truth(trial)) or _results([trial])[0]


def noted(trial: Trial, note: str, kind: type[N], truth: Truth | GradientTruth) -> N | None:
    """The trial's note of that kind, if it is of its first launch and of that truth."""
    found = trial.notes.get(note)
    if isinstance(found, kind) and found.run is trial.first and found.truth is truth:
        return found
    return None


def compare_together(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Compare the results of those trials that have company, and give each its part; return the
    stacks.  The trials have been launched, and their truths are known."""
    kinds: dict[Hashable, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(_kind(trial), []).append(trial)
    found = []
    for alike in kinds.values():
        size = sum(x.numel() for x in alike[0].first.outputs.values())
        most = max(MOST // max(size, 1), 1)
        for start in range(0, len(alike), most):
            stack = alike[start : start + most]
            if len(stack) > 1 and _compare(stack):
                found.append(stack)
    return found


def _compare(stack: Sequence[Trial]) -> bool:
    try:
        found = _results(stack)
    except (RuntimeError, ValueError):  # which of them it was, each will say when it is alone
        return False
    for trial, own in zip(stack, found, strict=True):
        trial.notes[_NOTE] = own
    return True


def _kind(trial: Trial) -> Hashable:
    """What trials of one stack share."""
    truth = _truth(trial)
    known = (f.name for f in fields(truth) if getattr(truth, f.name) is not None)
    names = frozenset(known), frozenset(trial.first.outputs)
    kernel = trial.declaration.ref, trial.config.name, trial.entry
    return shape_class(trial.problem), trial.problem.batch, kernel, names


def _truth(trial: Trial) -> Truth | GradientTruth:
    return trial.known_gradients if trial.entry == "backward" else trial.known_truth


def _results(stack: Sequence[Trial]) -> list[Results]:
    return _backward(stack) if stack[0].entry == "backward" else _forward(stack)


def _outputs(stack: Sequence[Trial], name: str) -> Tensor:
    return together([trial.first.outputs[name] for trial in stack])


def _parts(
    name: str,
    compared: Comparison,
    truth: tuple[Tensor, Tensor],
    cases: int,
    told: Sequence[Explained] | None,
) -> list[Compared]:
    """Each case's part.  truth: with its bound; told: what each case needs."""
    measures = summaries(name, compared, *truth, cases)
    every: Sequence[Explained | None] = told or [None] * cases
    errors, ratios = (x.chunk(cases) for x in (compared.error, compared.ratio))
    return [
        Compared(Comparison(error, ratio), numbers, own)
        for error, ratio, numbers, own in zip(errors, ratios, measures, every, strict=True)
    ]


def _forward(stack: Sequence[Trial]) -> list[Results]:
    first, cases = stack[0], len(stack)
    whole = joined([trial.known_truth for trial in stack])
    judged = not first.declaration.undeclared
    output, live = first.problem.format_out, ~whole.empty
    got = _outputs(stack, "out")
    compared = compare(got, whole.out, whole.out_bound, output).among(live[..., None])
    told = explained_out(whole, got, output, cases) if judged else None
    truth = whole.out, whole.out_bound
    out = _parts("out", compared, truth, cases, told)
    ulps = ulps_of("out", compared.error, truth, live, output, cases)
    for own, more in zip(out, ulps, strict=True):
        own.measures.update(more)
    tensors = [{"out": own} for own in out]
    if first.first.lse is not None:
        for of_case, lse in zip(tensors, _lse(stack, whole, live), strict=True):
            of_case["lse"] = lse
    return [
        Results(trial.first, trial.known_truth, own)
        for trial, own in zip(stack, tensors, strict=True)
    ]


def _lse(stack: Sequence[Trial], whole: Truth, live: Tensor) -> list[Compared]:
    first, cases = stack[0], len(stack)
    raw = _outputs(stack, "lse")
    natural, want = first.natural_lse(raw), whole.lse.nan_to_num(neginf=0.0)
    compared = compare(natural, want, whole.lse_bound, _SINGLE).among(live)
    base2 = first.declaration.contract.lse == "base2"
    told = None if first.declaration.undeclared else explained_lse(whole, raw, base2, cases)
    found = _parts("lse", compared, (whole.lse, whole.lse_bound), cases, told)
    # near 0 an ulp is no useful unit: LSE is the sum of two larger terms
    ulp = torch.exp2(torch.floor(torch.log2(whole.lse.abs().clamp_(min=1.0))) - 23)
    far = (compared.error / ulp).nan_to_num_(nan=torch.inf).masked_fill_(~live, -torch.inf)
    if far.numel():
        for own, most in zip(found, far.reshape(cases, -1).amax(1).tolist(), strict=True):
            if most >= 0:
                own.measures["lse_ulp"] = most
    return found


def _backward(stack: Sequence[Trial]) -> list[Results]:
    first, cases = stack[0], len(stack)
    whole = joined([trial.known_gradients for trial in stack])
    output, tensors = first.problem.format, [dict[str, Compared]() for _ in stack]
    for name in first.first.outputs:
        got, want, bound = (
            _outputs(stack, name),
            getattr(whole, name),
            getattr(whole, f"{name}_bound"),
        )
        compared, told = compare(got, want, bound, output), None
        if whole.intervals is not None and got.numel() and not first.declaration.undeclared:
            told = explanations(got, whole.intervals[name], output, cases)
        for own, part in zip(
            tensors, _parts(name, compared, (want, bound), cases, told), strict=True
        ):
            own[name] = part
    return [
        Results(trial.first, trial.known_gradients, own, saved)
        for trial, own, saved in zip(stack, tensors, _saved(stack), strict=True)
    ]


def _saved(stack: Sequence[Trial]) -> list[float]:
    """The largest r of the saved O and LSE of each case; NaN if an r is."""
    first, cases = stack[0], len(stack)
    if first.own_softmax:
        return [0.0] * cases
    truth = joined([trial.truth for trial in stack])
    out, lse = (together([t.saved.outputs[name] for t in stack]) for name in ("out", "lse"))
    found = compare_saved(truth, out, first.natural_lse(lse), first.problem.format_out)
    worst = [x.ratio.reshape(cases, -1).amax(1) for x in found if x.ratio.numel()]
    return torch.stack(worst).amax(0).tolist() if worst else [0.0] * cases


def compare_saved(
    truth: Truth, out: Tensor, lse: Tensor, output: DType
) -> tuple[Comparison, Comparison]:
    """The O and natural LSE that a forward saved for a backward, beside their truth."""
    live = ~truth.empty
    bound = torch.where(live[..., None], truth.out_bound, torch.inf)
    natural, want = torch.where(live, lse, 0.0), truth.lse.nan_to_num(neginf=0.0)
    return (
        compare(out, truth.out, bound, output),
        compare(natural, want, truth.lse_bound, _SINGLE),
    )
