"""Layout diagnosis: whether a failing plain function would be right in another tensor layout.

Only the results show whether a function expects (batch, heads, seqlen, head_dim) or
(batch, seqlen, heads, head_dim).  So a function that fails in one layout is tried on the same case
in the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from verify.cell.layout_twins import LAYOUTS, twin
from verify.cell.process import InfrastructureError
from verify.judging.findings import Ruling
from verify.judging.history import Hearing
from verify.judging.run_checks import held
from verify.judging.trial import Trial
from verify.oracles import bound, kept_scores

_TRIES = 3  # failing cases of a variant to try in other layouts, until one of them passes


@dataclass
class Layouts:
    """The layouts of plain functions.

    right: a variant's ref -> the layout in which it is right, or "" if none is known.
    tried: a variant's ref -> failing cases tried so far.
    """

    right: dict[str, str] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)

    def explained(self, trial: Trial, ruling: Ruling) -> Ruling:
        """The ruling; if the function is right in another layout, its finding names that layout."""
        told = trial.refuses or trial.entry == "backward"  # the forward's verdict says it
        if ruling.finding is None or not trial.declaration.twins or told:
            return ruling
        if ruling.finding.oracle == kept_scores.NAME:  # the layout is right: O is within `bound`
            return ruling
        layout = self._right(trial)
        if not layout:
            return ruling
        first = ruling.finding.message.partition("\n")[0]
        message = (
            f'this function computes attention in {LAYOUTS[layout]}; say LAYOUT = "{layout}" in the'
            f" file ({first})"
        )
        return replace(ruling, finding=replace(ruling.finding, message=message))

    def _right(self, trial: Trial) -> str:
        ref = trial.declaration.ref
        if not self.right.get(ref) and self.tried.get(ref, 0) < _TRIES and _differ(trial):
            self.tried[ref] = self.tried.get(ref, 0) + 1
            self.right[ref] = next(
                (layout for layout in trial.declaration.twins if _holds(trial, layout)), ""
            )
        return self.right.get(ref, "")


def _differ(trial: Trial) -> bool:
    """Whether the layouts have different shapes: not for one head and one token."""
    p = trial.problem
    return {p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_kv} != {1} and p.pairs > 0


def _holds(trial: Trial, layout: str) -> bool:
    """Whether the function is within its bounds on the same case with tensors in that layout."""
    declaration = replace(trial.declaration, name=twin(trial.declaration.name, layout))
    hearing = Hearing(trial.hearing.case, trial.hearing.history)
    other = replace(
        trial,
        declaration=declaration,
        with_best=False,
        hearing=hearing,
        notes={},
        launches={},
        _plans={},
        _beside={},
    )
    other.__dict__["inputs"] = trial.inputs  # a cached property
    try:
        sound = all(ruling.finding is None for _, _, ruling in held(other))
        # If a bound is infinite, any number is within it, and the layout is not known.
        known = sound and bool(other.truth.out_bound.isfinite().all())
        return known and bound.FORWARD.judge(other).finding is None
    except InfrastructureError:
        return False
