"""A report with one case, to be computed again."""

import dataclasses
from dataclasses import asdict

from tests.harness.fake_campaign import evidence, verdict
from verify.problem import Problem
from verify.problem.case import Case
from verify.report import (
    Report,
    build,
)
from verify.tolerance import MODEL
from verify.variant import Numerics

CONFIG = "m64n64"


def report(problem: Problem, **measures: float) -> Report:
    """A report with that one case; measures: {"dq_reference": 0.5, ...}."""
    found = evidence(0)
    group = "gradients" if {"dq_index", "dk_index", "dv_index"} & measures.keys() else "accuracy"
    named = {
        f"worst_{what}_{tensor}": value
        for key, value in measures.items()
        for tensor, what in [key.split("_")]
    }
    named |= {f"r_{name.rsplit('_', 1)[1]}": 0.5 for name in named}
    case = Case("triton-fwd", CONFIG, group, problem).id
    one = verdict(
        "triton-fwd",
        problem.dtype,
        0,
        case=case,
        config=CONFIG,
        problem=problem.name,
        measures=named,
    )
    entries = [
        dataclasses.replace(e, numerics=asdict(Numerics()))
        for e in found.variants
        if e.ref == "triton-fwd"
    ]
    runs = tuple(
        dataclasses.replace(run, versions={**run.versions, "bounds": MODEL}) for run in found.runs
    )
    made = dataclasses.replace(
        found, runs=runs, verdicts=(one,), variants=tuple(entries), builds=()
    )
    return build(made, ())
