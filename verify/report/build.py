"""From evidence to a report: counts, worst cases, coverage, one status per variant.  Equal evidence
gives equal reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any

from verify.brief import counted
from verify.evidence import NO_KERNEL, Evidence, VariantEntry, Verdict, Verdicts
from verify.evidence.flat_numerics import BACKWARD, FORWARD, in_parts
from verify.evidence.known_failures import Xfails
from verify.problem.factors import Pair
from verify.report import (
    contract,
    kept_scores,
    merged_runs,
    mutation,
    pairs,
    pooled,
    power,
    ranking,
    resources,
    statistics,
    tallies,
    unjudged,
)
from verify.report.failures import _failing
from verify.report.merged_runs import several
from verify.report.schema import (
    SCHEMA_VERSION,
    DTypeReport,
    Group,
    NotRun,
    Report,
    ReportError,
    Status,
    VariantReport,
)
from verify.report.states import score_mods
from verify.statistics.pool import pools


@dataclass(frozen=True)
class _Judged:
    """The verdicts on one dtype of a variant, and the pairs of levels that met in its cases."""

    verdicts: Verdicts = field(default_factory=Verdicts)
    met: AbstractSet[Pair] = frozenset()


BinsRequired = Callable[[VariantEntry, str], Sequence[str]]


def build(
    evidence: Evidence,
    bins_required: Sequence[str] | BinsRequired | None = None,
    xfails: Xfails | None = None,
) -> Report:
    """The report of a run, or of several on one kind of device together.

    bins_required: the coverage bins that every dtype of every variant must fill, or a function
    (variant, dtype) -> bins; None asks `verify.problem.coverage.bins_reachable` for those that the
    variant's support leaves open.  xfails: known defects, which the failing cases that they explain
    are shown with. Raises ReportError for evidence without a run record, of several devices, or of
    several sources of one variant.
    """
    merged_runs.refuse_mixed(evidence)
    runs = evidence.runs
    required = _required(bins_required)
    by_variant: dict[str, dict[str, _Judged]] = defaultdict(dict)
    for (ref, dtype), verdicts in evidence.verdicts.by_dtype().items():
        by_variant[ref][dtype] = _Judged(verdicts, pairs.met(verdicts.judged))
    met = [each.met for dtypes in by_variant.values() for each in dtypes.values()]
    pooled_rows = pools(evidence.verdicts)
    entries = {entry.ref: entry for entry in evidence.variants}
    entries |= {
        ref: _unknown(ref)
        for ref in [*by_variant, *(b.variant for b in evidence.builds)]
        if ref not in entries
    }
    known = xfails or Xfails()
    variants = [
        _variant(entries[ref], by_variant[ref], evidence, required, known)
        for ref in sorted(entries)
    ]
    report: Report = {
        "schema": SCHEMA_VERSION,
        "run": several(run.run for run in runs),
        "started": runs[0].started,
        "profile": several(run.profile for run in runs),
        "device": merged_runs.device(runs),
        "versions": merged_runs.versions(runs),
        "status": "grey",
        "reasons": _reasons(evidence, set(entries)),
        "cases": sum(variant["cases"] for variant in variants),
        "failures": sum(variant["failures"] for variant in variants),
        "variants": variants,
        "lost": unjudged.cases(evidence.lost),
        "torn": list(evidence.torn),
        "unstable": [{"case": case, "oracle": oracle} for case, oracle in evidence.unstable],
        "not_run": _not_run(evidence),
        "pools": pooled.reports(pooled_rows),
        "accuracy": ranking.reports(evidence.verdicts),
        "power": power.reports(evidence.verdicts, pooled_rows),
        "mutation": mutation.reports(variants),
        "pairs": pairs.report(set[Pair]().union(*met)),
    }
    starts = merged_runs.starts(runs, evidence.ended)
    if len(starts) > 1 or evidence.ended:
        report["runs"] = starts
    if evidence.interrupted:
        report["interrupted"] = unjudged.cases(evidence.interrupted)
    if evidence.left_out:
        report["left_out"] = merged_runs.left_out(evidence)
    report["status"] = overall(report)
    return report


def _required(given: Sequence[str] | BinsRequired | None) -> BinsRequired:
    if given is None:
        return lambda variant, dtype: _reachable(variant)
    if callable(given):
        return given
    bins = tuple(given)
    return lambda variant, dtype: bins


def _reachable(entry: VariantEntry) -> tuple[str, ...]:
    """The required bins that the variant's declared support leaves open."""
    from verify.problem.coverage import bins_reachable
    from verify.variant import Support

    if not entry.support:
        return ()
    known = {f.name for f in fields(Support)}
    support: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in entry.support.items()
        if name in known
    }
    support["score_mods"] = score_mods(entry.support)
    try:
        return tuple(sorted(bins_reachable(Support(**support))))
    except (TypeError, ValueError) as error:
        raise ReportError(
            f"{entry.ref}: its support on record is no declaration of this version: {error}"
        ) from None


def _unknown(ref: str) -> VariantEntry:
    """Stands for a variant with verdicts and no declaration on record."""
    return VariantEntry(
        ref=ref,
        name=ref,
        family="",
        path="",
        source_hash="",
        configs=(),
        support={},
        numerics={},
        contract={},
        undeclared=True,
    )


def _reasons(evidence: Evidence, known: set[str]) -> list[str]:
    """What keeps the whole report, and no single variant, from being green."""
    reasons = unjudged.reasons(evidence, lambda variant: variant not in known)
    if evidence.torn:
        reasons.append(f"{counted(len(evidence.torn), 'line')} of evidence cut short by a kill")
    reasons += [
        f"{n.variant} not run: {n.reason}"
        for n in evidence.not_run
        if n.variant not in known and n.dtype != NO_KERNEL
    ]
    return reasons


def overall(report: Report) -> Status:
    """Green needs at least one variant, and all that were run; those listed as not run, with the
    reason, do not count.

    What lies beside the report counts like a variant.
    """
    listed = {row["variant"] for row in report["not_run"] if not row["dtype"]}
    here = [
        v["status"]
        for v in report["variants"]
        if v["cases"] or v["status"] == "red" or v["ref"] not in listed
    ]
    found = {*here, *(entry["status"] for entry in report.get("beside", []))}
    if "red" in found:
        return "red"
    return "green" if here and found == {"green"} and not report["reasons"] else "grey"


def _not_run(evidence: Evidence) -> list[NotRun]:
    rows = {(n.variant, n.dtype, n.reason) for n in evidence.not_run}
    rows |= {(v.ref, "", v.unavailable) for v in evidence.variants if v.unavailable is not None}
    return [
        {"variant": variant, "dtype": dtype, "reason": reason}
        for variant, dtype, reason in sorted(rows)
    ]


def _variant(
    entry: VariantEntry,
    by_dtype: Mapping[str, _Judged],
    evidence: Evidence,
    required: BinsRequired,
    known: Xfails,
) -> VariantReport:
    verdicts = Verdicts.together(each.verdicts for each in by_dtype.values())
    declared = [str(dtype) for dtype in entry.support.get("dtypes", ())]
    others = by_dtype.keys() | {d.dtype for d in evidence.drawn if d.variant == entry.ref}
    dtypes = [
        _dtype(
            entry,
            dtype,
            by_dtype.get(dtype, _Judged()),
            evidence,
            required(entry, dtype),
        )
        for dtype in [*dict.fromkeys(declared), *sorted(others - set(declared))]
    ]
    reasons = [f"{d['dtype']}: {reason}" for d in dtypes for reason in d["reasons"]]
    reasons += unjudged.reasons(evidence, lambda variant: variant == entry.ref)
    if not entry.source_hash:
        reasons.append("no declaration on record")
    if entry.unavailable is not None:
        reasons = [f"unavailable: {entry.unavailable}", *([] if not verdicts else reasons)]
    growth = tallies.growth(verdicts, "memory_growth")
    on_device = tallies.growth(verdicts, "device_memory_growth")
    builds = resources.by_arch(
        (b for b in evidence.builds if b.variant == entry.ref), entry.configs
    )
    broken = [
        f"{b['arch']}: {len(b['failing'])} of {b['builds']} builds fail"
        for b in builds
        if b["failing"]
    ]
    further = sorted({table.shape.config for table in verdicts.tables} - {"-", *entry.configs})
    report: VariantReport = {
        "ref": entry.ref,
        "name": entry.name,
        "family": entry.family,
        "path": entry.path if not PurePath(entry.path).is_absolute() else PurePath(entry.path).name,
        "source_hash": entry.source_hash,
        "configs": [*entry.configs, *further],
        "entries": list(entry.entries),
        "status": _status(bool(broken) or bool(verdicts.failing), reasons, bool(dtypes)),
        "reasons": reasons + broken,
        "undeclared": entry.undeclared,
        "unavailable": entry.unavailable,
        "cases": sum(d["cases"] for d in dtypes),
        "failures": sum(d["failures"] for d in dtypes),
        "support": entry.support,
        "numerics": in_parts(entry.numerics, FORWARD),
        "gradients": entry.gradients and in_parts(entry.gradients, BACKWARD),
        "contract": entry.contract,
        "dtypes": dtypes,
        "failing": _failing(verdicts, known),
        "builds": builds,
        "measured": contract.cells(verdicts),
    }
    if entry.further_configs > len(further):
        report["further_configs"] = entry.further_configs - len(further)
    if growth is not None:
        report["growth"] = growth
    if on_device is not None:
        report["device_growth"] = on_device
    return report


def _status(failed: bool, reasons: Sequence[str], ran: bool) -> Status:
    if failed:
        return "red"
    return "green" if ran and not reasons else "grey"


def _dtype(
    entry: VariantEntry,
    dtype: str,
    found: _Judged,
    evidence: Evidence,
    required: Sequence[str],
) -> DTypeReport:
    verdicts = found.verdicts
    judged = verdicts.judged
    measured = judged.where(lambda shape, said: bool(said.measures))
    bins = tallies.bins(judged)
    missing = sorted({name for name in required if not bins[name]})
    groups: list[Group] = [
        {"group": d.group, "drawn": d.drawn, "refused": d.refused}
        for d in evidence.drawn
        if (d.variant, d.dtype) == (entry.ref, dtype)
    ]
    reasons = _shortfalls(verdicts, judged, missing, len(set(required)))
    if not judged:
        reasons = [
            n.reason for n in evidence.not_run if n.variant == entry.ref and n.dtype in ("", dtype)
        ] or reasons
    reported: DTypeReport = {
        "dtype": dtype,
        "status": _status(bool(verdicts.failing), reasons, True),
        "reasons": reasons,
        "cases": len(judged.cases),
        "failures": _cases(judged.failing),
        "drawn": sum(group["drawn"] for group in groups),
        "refused": sum(group["refused"] for group in groups),
        "groups": groups,
        "bins": {name: bins[name] for name in sorted(bins)},
        "bins_missing": missing,
        "pairs_met": len(found.met),
        "oracles": tallies.oracles(verdicts.counted),
        "tensors": statistics.tensors(measured),
        "lse_ulp": statistics.spread(measured, "lse_ulp"),
        "bound_ratio": statistics.spread(measured, "bound_ratio"),
        "seconds": statistics.timings(judged),
        "samples": statistics.samples(measured),
    }
    if scores := kept_scores.scores(verdicts):
        reported["scores"] = scores
    return reported


def _shortfalls(
    verdicts: Verdicts, judged: Verdicts, missing: Sequence[str], required: int
) -> list[str]:
    reasons = []
    if failures := _cases(judged.failing):
        reasons.append(f"{failures} of {counted(len(judged.cases), 'case')} fail")
    elif shrunk := _cases(verdicts.failing):
        reasons.append(f"{counted(shrunk, 'case')} failed while shrinking")
    if not judged:
        reasons.append("not run")
    elif missing:
        reasons.append(f"{len(missing)} of {required} coverage bins empty")
    return reasons


def _cases(verdicts: Iterable[Verdict]) -> int:
    """Several oracles may judge one case; it counts once."""
    return len({verdict.case for verdict in verdicts})
