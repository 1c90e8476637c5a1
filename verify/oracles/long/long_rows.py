"""Long rows: chosen rows of O and LSE of a long sequence differ from fp64 by at most their own
derived bounds.

A row of O and LSE depends on one query alone, so chosen rows can be judged in full with the bounds
of the oracle bound, without the other rows. docs/long-sequences.md says which rows are chosen.

Premises: none, as for bound.
"""

from __future__ import annotations

from verify.arithmetic.dtypes import dtype_named
from verify.evidence import Finding
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.selected_positions import Chosen, positions
from verify.judging.trial import Trial
from verify.oracles import Oracle


def judge_rows(
    oracle: str, trial: Trial, run: Launch, what: str = ""
) -> tuple[Finding | None, dict[str, float]]:
    """Compare the chosen rows of O and LSE that see a key with reference and bounds.  what: words
    before a tensor's name."""
    p, rows = trial.problem, positions(trial.problem, "rows")
    truth = trial.truth_at(rows)
    live, float32 = ~truth.empty, dtype_named("float32")
    assert run.out is not None
    checked = [
        (Chosen(f"{what}out", rows, truth.out, truth.out_bound, p.format_out, live), run.out)
    ]
    if run.lse is not None:
        natural = trial.natural_lse(run.lse)
        checked.append(
            (Chosen(f"{what}lse", rows, truth.lse, truth.lse_bound, float32, live), natural)
        )
    found: Finding | None = None
    measures: dict[str, float] = {}
    for chosen, whole in checked:
        finding, measures[f"long_r_{chosen.name.split()[-1]}"] = chosen.judge(oracle, whole)
        found = found or finding
    return found, measures


def judge(trial: Trial) -> Ruling:
    """Check r <= 1 for every element of the chosen rows of O and LSE."""
    finding, measures = judge_rows("long_rows", trial, trial.first)
    return Ruling(finding, measures)


ORACLE = Oracle(
    name="long_rows",
    group="long",
    catches=(
        "indices that wrap at 15, 16 or 31 bits, wrong keys and rows past them, tails of the last"
        " tile: in the chosen rows"
    ),
    judge=judge,
    needs=frozenset(),
    concerns=lambda trial: trial.problem.distribution != "gather",
    rank=20,
)
