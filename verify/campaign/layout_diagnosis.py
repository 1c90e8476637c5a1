"""Layout: whether a plain function that fails would be right if its tensors lay in another order.

Nothing tells (batch, heads, seqlen, head_dim) from (batch, seqlen, heads, head_dim) but the
results.  So a function that is wrong in the layout on trial is asked the same case in the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from verify.cell.layout_twins import LAYOUTS, twin
from verify.cell.process import InfrastructureError
from verify.judging.findings import Ruling
from verify.judging.history import Hearing
from verify.judging.run_checks import held
from verify.judging.trial import Trial
from verify.oracles import bound

_TRIES = 3  # failing cases of a variant that are asked in other layouts, if none of them holds


@dataclass
class Layouts:
    """What is known of the layouts of plain functions, by the ref of their variants: "", or the one
    in which they are right."""

    right: dict[str, str] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)

    def told(self, trial: Trial, ruling: Ruling) -> Ruling:
        """The ruling; its finding names the layout in which the function is right, if there is
        one."""
        if ruling.finding is None or not trial.declaration.undeclared or trial.refuses:
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
            self.right[ref] = next((layout for layout in LAYOUTS if _holds(trial, layout)), "")
        return self.right.get(ref, "")


def _differ(trial: Trial) -> bool:
    """Whether the layouts differ in shape: not where there is one head and one token."""
    p = trial.problem
    return {p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_kv} != {1} and p.pairs > 0


def _holds(trial: Trial, layout: str) -> bool:
    """Whether the function is within its bounds on the same case, its tensors in that layout."""
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
        # Where a bound is infinite, any number holds.
        known = sound and bool(other.truth.out_bound.isfinite().all())
        return known and bound.FORWARD.judge(other).finding is None
    except InfrastructureError:
        return False
