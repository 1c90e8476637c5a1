"""Mutation scores: how many small changes of a kernel's source the suite convicts
(docs/mutation.md).

They are no part of a run's evidence: mutants were judged before, on a machine without a GPU.  A
score counts for a variant whose source is the one that was mutated.
"""

from __future__ import annotations

from collections.abc import Iterable

from verify.report.campaign_schema import MutationReport
from verify.report.mutation_scores import SCORES
from verify.report.schema import Report, VariantReport


def reports(variants: Iterable[VariantReport]) -> list[MutationReport]:
    """An entry for each variant whose source has a score, in their order."""
    found: list[MutationReport] = []
    for variant in variants:
        source, numbers = SCORES.get(variant["ref"], ("", (0, 0, 0, 0)))
        if source and source == variant["source_hash"]:
            killed, counted, judged, chosen = numbers
            found.append(
                {
                    "variant": variant["ref"],
                    "killed": killed,
                    "counted": counted,
                    "judged": judged,
                    "chosen": chosen,
                }
            )
    return found


def scored(report: Report) -> Report:
    """A report of an earlier day with the scores of its sources; one that has scores keeps them."""
    if "mutation" in report:
        return report
    whole: Report = {**report, "mutation": reports(report["variants"])}
    # in the schema's order, as it is read back
    return {name: whole[name] for name in Report.__annotations__ if name in whole}  # type: ignore
