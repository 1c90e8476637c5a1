"""Records: what a line of evidence may say (docs/report-schema.md), as data without behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from verify.evidence.strict_json import Free, Integer, Number, NumberOrText

SCHEMA_VERSION: Final = 1

Outcome = Literal["pass", "fail", "inapplicable"]
INAPPLICABLE = "inapplicable"
"""The name under which `Verdict.observed` holds the reason why an oracle was not asked."""
NO_KERNEL = "(no kernel)"
"""The dtype of a `NotRun` about a given file that is no kernel, so that nothing of it is to run."""
Reason = Literal["signal", "time"]
"""Why a run was ended: by SIGINT or SIGTERM, or since its time was over."""
Phase = Literal["generate", "shrink", "reuse", "witness"]

# Shrinking walks towards small failing cases, so its verdicts are no sample of anything: they count
# in no statistic.
COUNTED_PHASES: tuple[Phase, ...] = ("generate", "reuse", "witness")


class EvidenceError(ValueError):
    """A run directory or a record that cannot be used; the message names the file and the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Who ran what, where and when.  started: ISO 8601, UTC.  device:
    `verify.machine.device.fingerprint()`."""

    run: str
    started: str
    profile: str
    device: dict[str, Free]
    versions: dict[str, str] = field(default_factory=dict)
    schema: Literal[1] = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantEntry:
    """A variant that the run knew, with its declarations as data
    (`verify.variant.Variant.describe`).

    configs: those that every run judges.  further_configs: how many more it has.
    """

    ref: str
    name: str
    family: str
    path: str
    source_hash: str
    configs: tuple[str, ...]
    support: dict[str, Free]
    numerics: dict[str, Free]
    contract: dict[str, Free]
    entries: tuple[str, ...] = ("forward",)
    gradients: dict[str, Free] | None = None
    unavailable: str | None = None
    undeclared: bool = False
    further_configs: Integer = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Written before a launch: a begin that neither a verdict nor an `Interruption` follows is a
    case that took its judge with it.

    ahead: how many cases the same process has begun just before, to launch them together; it
    judges them in this order.
    """

    case: str
    phase: Phase
    time: Number  # seconds since the epoch
    variant: str = ""
    ahead: Integer = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    """A case that was begun, and whose judge was ended from outside before its verdict."""

    case: str
    variant: str
    reason: Reason
    time: Number = 0.0  # seconds since the epoch; `Recorder.write` fills it in


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What an oracle holds against a case: got and bound at the worst place, `count` of `total`
    elements at fault.

    before: ids of the last cases that the same process had run before it, in order; before_count:
    of all of them.
    """

    oracle: str
    message: str
    got: NumberOrText | None = None
    bound: NumberOrText | None = None
    where: str = ""
    count: Integer = 0
    total: Integer = 0
    replay: str = ""
    before: tuple[str, ...] = ()
    before_count: Integer = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One oracle's judgement of one case.

    seconds: of generate, run, reference, bound, record.  measures, where the oracle has them
    (docs/report-schema.md): for T of out, lse, dq, dk, dv: r_T (worst error / bound), max_error_T
    and error_bound_T (the largest error and the bound at that element), worst_index_T,
    worst_reference_T and worst_bound_T (the element with the worst r); ulp50_out and ulp99_out
    (median and 99th percentile of the errors of O in ulp), best50_out and best99_out (the same of O
    rounded correctly); rows_T, z2_T, z_T, toward_T,
    slack_T, least_T, share_T, part_T, weight_T, weighed_T (sums over judged rows,
    docs/statistics.md); power_CLASS,
    tutorial_CLASS and close_CLASS (the smallest fault of a class that this case, or another rule on
    its inputs, would have convicted, docs/power.md); bound_ratio (median bound
    / best bound of that dtype), lse_ulp (largest LSE error in fp32 ulp), seqlen_kv; memory_growth
    (bytes that the kernel's process took in a run and kept, from 64 MiB on), device_memory_growth
    (bytes of torch's allocator that a run left taken, beyond the most before), device_memory_taken
    (bytes that the device had less after a run, for whatever process, from 64 MiB on).  observed:
    what an oracle found out that is no number, by the name of the property; by INAPPLICABLE, why it
    was not asked.
    """

    case: str
    variant: str
    config: str
    dtype: str
    oracle: str
    group: str
    outcome: Outcome
    phase: Phase
    problem: str
    seconds: dict[str, Number] = field(default_factory=dict)
    measures: dict[str, Number] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)
    bins: tuple[str, ...] = ()
    finding: Finding | None = None
    time: Number = 0.0  # seconds since the epoch; `Recorder.write` fills it in

    @property
    def counted(self) -> bool:
        return self.phase in COUNTED_PHASES


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one oracle told of a case that it did not convict; see `Verdict`."""

    oracle: str
    measures: dict[str, Number] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)
    bins: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A case that no oracle convicts: all verdicts on it, which a campaign records in one line.

    passing, inapplicable: names of oracles.  told: of those with more to say.  All else is of each
    verdict (`Verdict`); the case's id holds the variant, config, group and problem.
    """

    case: str
    dtype: str
    phase: Phase
    seconds: dict[str, Number] = field(default_factory=dict)
    passing: tuple[str, ...] = ()
    inapplicable: tuple[str, ...] = ()
    told: tuple[Told, ...] = ()
    time: Number = 0.0  # seconds since the epoch; `Recorder.write` fills it in

    @staticmethod
    def of(verdicts: Sequence[Verdict]) -> Passed | None:
        """What one record can say of them, all on one case; None if it would lose something."""
        first = verdicts[0]
        if len({each.oracle for each in verdicts}) < len(verdicts):
            return None
        whole = (*place_of(first.case), first.case, first.dtype, first.phase, first.seconds)
        for each in verdicts:
            own = each.variant, each.config, each.group, each.problem, each.case, each.dtype
            if (*own, each.phase, each.seconds) != whole or each.finding or each.time:
                return None
            if each.outcome == "fail":
                return None
        return Passed(
            case=first.case,
            dtype=first.dtype,
            phase=first.phase,
            seconds=first.seconds,
            passing=tuple(v.oracle for v in verdicts if v.outcome == "pass"),
            inapplicable=tuple(v.oracle for v in verdicts if v.outcome != "pass"),
            told=tuple(
                Told(oracle=v.oracle, measures=v.measures, observed=v.observed, bins=v.bins)
                for v in verdicts
                if v.measures or v.observed or v.bins
            ),
        )

    @property
    def outcomes(self) -> list[tuple[str, Outcome]]:
        """Each oracle and what it came to."""
        found: list[tuple[str, Outcome]] = [(oracle, "pass") for oracle in self.passing]
        return found + [(oracle, "inapplicable") for oracle in self.inapplicable]

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts that were recorded."""
        variant, config, group, problem = place_of(self.case)
        told = {each.oracle: each for each in self.told}
        found = []
        for oracle, outcome in self.outcomes:
            more = told.get(oracle) or Told(oracle=oracle)
            found.append(
                Verdict(
                    case=self.case,
                    variant=variant,
                    config=config,
                    dtype=self.dtype,
                    oracle=oracle,
                    group=group,
                    outcome=outcome,
                    phase=self.phase,
                    problem=problem,
                    seconds=self.seconds,
                    measures=more.measures,
                    observed=more.observed,
                    bins=more.bins,
                    time=self.time,
                )
            )
        return found


def place_of(case: str) -> tuple[str, str, str, str]:
    """Variant, config, group and problem of a case's id; the case itself and nothing else if it is
    none."""
    parts = case.rsplit(":", 3)
    return (parts[0], parts[1], parts[2], parts[3]) if len(parts) == 4 else (case, "", "", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """How many problems were drawn for a variant, and how many of them its support refused.
    Records add up."""

    variant: str
    dtype: str
    group: str
    drawn: Integer
    refused: Integer


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRun:
    """A variant (or one dtype of it) that this run did not try, and why."""

    variant: str
    reason: str
    dtype: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """One build of a variant, compiled for `arch` without running it: what the compiler says it
    needs, or why it failed.

    resources: `verify.variant.Resources` as data; None where compiling failed (`error` says why),
    or where the build was left to a larger profile (`error` is empty).  error: also what a compiled
    build breaks of its own declaration.  spill_budget: as declared; None where there is none.
    sass: `verify.cuda.sass.Counts` as data; None where `unread` says why, and in older records.
    code: a hash of the binary; empty where there is none, and in older records.
    """

    variant: str
    arch: str
    build: str
    seconds: Number
    resources: dict[str, Integer] | None
    error: str = ""
    spill_budget: Integer | None = None
    sass: dict[str, dict[str, Integer]] | None = None
    unread: str = ""
    code: str = ""


Record = RunInfo | VariantEntry | Begin | Interruption | Verdict | Passed | Drawn | NotRun | Built
KINDS: dict[str, type[Record]] = {
    "run": RunInfo,
    "variant": VariantEntry,
    "begin": Begin,
    "interrupted": Interruption,
    "verdict": Verdict,
    "passed": Passed,
    "drawn": Drawn,
    "not_run": NotRun,
    "built": Built,
}
OF_VERDICTS: Final = ("verdict", "passed")
"""The kinds of records that say what was judged of a case."""
