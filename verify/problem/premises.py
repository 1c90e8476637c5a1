"""What an oracle needs, held against what a problem's features break.

Default deny: an oracle that names no premises is asked about no problem that has a feature.
"""

from __future__ import annotations

from dataclasses import fields, replace

from references.output_scale import ScaledOutput
from references.premises import Feature, Premise
from verify.problem.problem import Problem
from verify.variant import Support

Needs = frozenset[Premise] | None
"""The premises that an oracle needs; None where it names none."""


def broken(needs: Needs, problem: Problem) -> str | None:
    """Why an oracle with these needs is not asked about a problem, or None."""
    if not problem.features:  # of most problems, and asked many times a case
        return None
    reasons = (broken_by(needs, feature) for feature in _breaking(needs, problem))
    return next(reasons, None)


def broken_by(needs: Needs, feature: Feature) -> str | None:
    """Why an oracle with these needs is not asked beside one feature, or None."""
    if not feature.breaks or (needs is not None and not needs & feature.breaks):
        return None
    if needs is None:
        return f"names no premises, and {feature.label} is a feature"
    return f"needs {' and '.join(sorted(needs & feature.breaks))}, which {feature.label} breaks"


def without_broken(needs: Needs, problem: Problem, support: Support) -> Problem:
    """The problem without the features that break these needs, as far as the support allows it.

    A feature goes with all fields of its label; an 8-bit O, with its dtype and its scale.
    """
    for feature in _breaking(needs, problem):
        defaults = {
            field.name: field.default
            for field in fields(problem)
            if getattr(getattr(problem, field.name), "label", field.name) == feature.label
        }
        if isinstance(feature, ScaledOutput):
            defaults = {"dtype_out": "", "output_scale": 1.0}
        plainer = replace(problem, **defaults)  # type: ignore[arg-type]
        if support.refusal(plainer) is None:
            problem = plainer
    return problem


def _breaking(needs: Needs, problem: Problem) -> list[Feature]:
    return [f for f in problem.features if needs is None or needs & f.breaks]
