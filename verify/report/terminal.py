"""The lines of a report around the table of verdicts on a terminal: claims, marks, and what was not
judged or left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from verify.document import text
from verify.report.headline import failures
from verify.report.headline import headline as first_line
from verify.report.outcome import incomplete
from verify.report.rate import rate
from verify.report.schema import Report, VariantReport
from verify.report.states import GRAVE, claimed, claims, gradients, marks, states


class Beside:
    """Cells that stand beside the verdicts of a dtype, by what its variant declares and what was
    measured."""

    def __init__(self, report: Report | None) -> None:
        self._variants = (
            {} if report is None else {variant["ref"]: variant for variant in report["variants"]}
        )

    def leniency(self, ref: str, dtype: str) -> str:
        """Median of bound / best bound."""
        variant = self._variants.get(ref)
        found = (
            [d["bound_ratio"] for d in variant["dtypes"] if d["dtype"] == dtype] if variant else []
        )
        return text.number(found[0]["median"]) if found and found[0] is not None else "-"

    def gradients(self, ref: str) -> str:
        """What stands where no gradient was measured."""
        variant = self._variants.get(ref)
        return "not judged" if variant and gradients(variant) else "-"

    def marks(self, ref: str) -> str:
        """ ", narrow": what is grave about the variant's declaration."""
        variant = self._variants.get(ref)
        return "".join(f", {name}" for name in (marks(variant) if variant else ()))


def headline(report: Report) -> Text:
    """The first line: new failures stand out, known ones are marked."""
    found = failures(report)
    style = "bold red" if found.new else "yellow" if found.known else "bold"
    return Text(text.one_line(first_line(report)), style=style)


def notes(report: Report) -> Iterator[Text]:
    """Lines under the table: claims, states and failure rate of every variant that was judged, why
    gradients were not, and evidence of older sources that does not count."""
    judged = [variant for variant in report["variants"] if claimed(variant)]
    for variant in judged:
        yield Text(f"{text.one_line(variant['ref'])} claims {claims(variant)}", style="dim")
        for state in states(variant):
            yield Text(
                f"  {text.one_line(state)}", style="bold yellow" if state.name in GRAVE else "dim"
            )
        if said := rate(variant):
            yield Text(f"  {said}", style="dim")
    yield from _unjudged(judged)
    for one in report.get("left_out", []):
        where = f"{text.one_line(one['variant'])} of run {text.one_line(one['run'])}"
        said = f"{one['cases']:,} cases, {one['failures']:,} failing"
        yield Text(f"left out: {where} ({said}): its source has changed since")


def _unjudged(judged: Sequence[VariantReport]) -> Iterator[Text]:
    reasons = [(gradients(variant), variant["ref"]) for variant in judged]
    for reason, refs in text.grouped((ref, reason) for reason, ref in reasons if reason):
        yield Text(f"gradients: not judged ({reason}): {text.one_line(', '.join(refs))}")


def gaps(report: Report) -> Iterator[Text]:
    """What keeps a report from being whole, one line each."""
    for name, why in incomplete(report):
        yield Text(
            f"incomplete: {text.one_line(f'{name}: {why}' if name else why)}", style="yellow"
        )
