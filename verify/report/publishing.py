"""Publishing: a report replaces another only if it covers at least as much, or if somebody says
so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verify.document import text
from verify.report import write
from verify.report.json_file import read
from verify.report.kept import with_kept
from verify.report.schema import DTypeReport, Report, ReportError, VariantReport

# Of as many draws, a few are repeats or refused, more or fewer from seed to seed.
SHARE = 0.9


class LossError(ReportError):
    """A report that would be replaced by one that covers less.  losses: one line each."""

    def __init__(self, folder: Path, losses: list[str]) -> None:
        super().__init__(f"{folder} covers more than the new report, which is not published")
        self.losses = losses


def publish(
    report: Report, folder: Path, *, replace: bool = False, keep: bool = False
) -> tuple[Path, list[str]]:
    """Write a report into a folder that may hold one; returns the page, and what was lost by it,
    one line each.

    keep: what the one there says of variants that the new one did not judge stays
    (`verify.report.kept`).  Raises LossError, without `replace`, if it covers less than the one
    that lies there or if that one does not read; ReportError, with `keep`, if it does not read.
    """
    if keep and (folder / "report.json").exists():
        report = with_kept(report, read(folder))
    lost = _before(folder, report)
    if lost and not replace:
        raise LossError(folder, lost)
    return write(report, folder)[-1], lost


def _before(folder: Path, report: Report) -> list[str]:
    if not (folder / "report.json").exists():
        return []
    try:
        return losses(read(folder), report)
    except ReportError as error:
        return [f"what lies there cannot be compared: {error}"]


def losses(old: Report, new: Report) -> list[str]:
    """What an old report covers and a new one does not, one line each; empty if the new one covers
    at least as much.

    A report covers a variant and a dtype if a case of them was judged; a group of oracles if one of
    its oracles judged a case; a coverage bin if a case is in it; an architecture if a build for it
    was compiled.  The number of judged cases of a variant and dtype must be at least SHARE of the
    old one.
    """
    after = {variant["ref"]: variant for variant in new["variants"]}
    return [
        line
        for variant in old["variants"]
        for line in _of_variant(variant, after.get(variant["ref"]))
    ]


def _of_variant(old: VariantReport, new: VariantReport | None) -> Iterator[str]:
    if old["cases"] and (new is None or not new["cases"]):
        yield f"{old['ref']}: {text.count(old['cases'])} cases, none in the new report"
        return
    dtypes = {} if new is None else {dtype["dtype"]: dtype for dtype in new["dtypes"]}
    judged = set[str]().union(*map(_groups, dtypes.values()))
    for dtype in old["dtypes"]:
        for line in _of_dtype(dtype, dtypes.get(dtype["dtype"]), judged):
            yield f"{old['ref']}, {line}"
    compiled = (
        set() if new is None else {builds["arch"] for builds in new["builds"] if builds["compiled"]}
    )
    for builds in old["builds"]:
        if builds["compiled"] and builds["arch"] not in compiled:
            yield (
                f"{old['ref']}: {builds['compiled']} builds for {builds['arch']}, none in the new"
                " report"
            )


def _of_dtype(old: DTypeReport, new: DTypeReport | None, judged: set[str]) -> Iterator[str]:
    """judged: the groups that were judged in some dtype of the new variant."""
    if not old["cases"]:
        return
    if new is None or not new["cases"]:
        yield f"{old['dtype']}: {text.count(old['cases'])} cases, none in the new report"
        return
    if new["cases"] < SHARE * old["cases"]:
        yield f"{old['dtype']}: {text.count(new['cases'])} cases, {text.count(old['cases'])} before"
    if missing := sorted(_lost(_groups(old) - _groups(new), judged)):
        yield f"{old['dtype']}: nothing judged in {', '.join(missing)}"
    if empty := sorted(_bins(old) - _bins(new)):
        yield f"{old['dtype']}: coverage bins that were filled and are empty: {', '.join(empty)}"


def _lost(missing: set[str], judged: set[str]) -> set[str]:
    """Those groups that are lost indeed.  A problem outside the support has a dtype of its own:
    where two dtypes of a variant draw the same one, it is one case, and the other dtype's."""
    if not missing & judged:
        return missing
    from verify.oracles import groups  # which imports torch

    known = groups()
    return {
        name for name in missing if not (name in judged and name in known and known[name].outside)
    }


def _groups(dtype: DTypeReport) -> set[str]:
    return {oracle["group"] for oracle in dtype["oracles"] if oracle["cases"]}


def _bins(dtype: DTypeReport) -> set[str]:
    return {name for name, cases in dtype["bins"].items() if cases}
