"""The report as data, schema version 3: what `report.json` holds.  docs/report-schema.md describes
it for other readers.

All mappings here are TypedDicts, so that a report is plain data.  Floats may be NaN or infinite in
memory and are the strings "nan", "inf", "-inf" in the file.  Within a version, fields may be added;
a reader ignores those it does not know.
"""

from __future__ import annotations

from typing import Final, Literal, NotRequired, TypedDict

from verify.evidence.strict_json import Free, Integer, Number, NumberOrText
from verify.report.campaign_schema import (
    AccuracyReport,
    MutationReport,
    PairsReport,
    PoolReport,
    PowerReport,
    ScoresReport,
)

SCHEMA_VERSION: Final = 3

# What a kernel may write, as measures and reports call it, in the order of every table.
TENSORS = ("out", "lse", "dq", "dk", "dv")

# green: every required coverage bin filled, no failure.  red: a failure.  grey: not run, or
# incomplete.
Status = Literal["green", "red", "grey"]


class ReportError(ValueError):
    """A report that cannot be read or built; one line, for the person who must act."""


class Distribution(TypedDict):
    """Of one measure over the counted cases.  histogram: cases per interval between neighbours of
    the measure's edges (docs/report-schema.md)."""

    count: Integer
    not_finite: Integer
    minimum: Number
    median: Number
    p90: Number
    p99: Number
    maximum: Number
    histogram: list[Integer]


class WorstCase(TypedDict):
    """The case with the largest r of one tensor.

    replay: its command where it needs more than the case's id (`replay`).
    index, reference, bound: the element that used most of its bound, flat in the tensor's logical
    shape, and what its fp64 reference and its bound were, so that another machine can compute them
    again; None where nothing says so.
    """

    tensor: str
    r: Number
    case: str
    config: str
    oracle: str
    index: Integer | None
    reference: Number | None
    bound: Number | None
    replay: NotRequired[str]


class TensorReport(TypedDict):
    """One tensor that a kernel writes: r of every counted case that has one, and the worst of
    them."""

    worst: WorstCase
    r: Distribution


class Oracle(TypedDict):
    """One oracle on one dtype of one variant.  cases: judged (passed or failed), counted phases
    only.

    r: the largest of each tensor that it measured, by name out of TENSORS.  r, lse_ulp and
    bound_ratio are absent where it measured none.  reasons: why a case was not applicable -> number
    of cases; a case whose values can show nothing has no reason.  A file leaves out an inapplicable
    of 0.
    """

    oracle: str
    group: str
    cases: Integer
    failures: Integer
    inapplicable: NotRequired[Integer]
    reasons: NotRequired[dict[str, Integer]]
    r: NotRequired[dict[str, Number]]
    lse_ulp: NotRequired[Distribution | None]
    bound_ratio: NotRequired[Distribution | None]


class Group(TypedDict):
    """Problems drawn for a group of oracles, and how many of them the variant's declared support
    refused; a file leaves out a 0."""

    group: str
    drawn: Integer
    refused: NotRequired[Integer]


class Timing(TypedDict):
    """Seconds of one step of judging, over the counted cases."""

    median: Number
    maximum: Number
    total: Number


class Sample(TypedDict):
    """One tensor of one case, for the plots; error_bound is the bound at the element with the
    largest error."""

    seqlen_kv: Number
    r: Number | None
    max_error: Number | None
    error_bound: Number | None


class DTypeReport(TypedDict):
    """One dtype of one variant.  cases, failures: distinct cases, whatever the number of oracles
    that judged them.

    `reasons` say why it is not green.  bins: cases per coverage bin.  pairs_met: pairs of levels
    that met in a case (`verify.problem.factors`); missing in reports of an earlier day.  tensors,
    samples: by name out of TENSORS; no samples of the LSE, which no plot shows.  scores: of a plain
    function.
    """

    dtype: str
    status: Status
    reasons: list[str]
    cases: Integer
    failures: Integer
    drawn: Integer
    refused: Integer
    groups: list[Group]
    bins: dict[str, Integer]
    bins_missing: list[str]
    pairs_met: NotRequired[Integer]
    oracles: list[Oracle]
    tensors: dict[str, TensorReport]
    lse_ulp: Distribution | None
    bound_ratio: Distribution | None
    seconds: dict[str, Timing]
    samples: dict[str, list[Sample]]
    scores: NotRequired[ScoresReport]


class Failure(TypedDict):
    """The smallest failing case of one (variant, config, oracle), of `cases` failing ones,
    shrinking included.

    shrunk: how many of `cases` were met while shrinking and so count in no statistic; missing in
    reports of an earlier day. known: where that defect is told and until when it is expected (see
    verify/evidence/known_failures.py); missing where it is news.
    """

    variant: str
    config: str
    oracle: str
    dtype: str
    cases: Integer
    case: str
    problem: str
    phase: str
    message: str
    got: NumberOrText | None
    bound: NumberOrText | None
    where: str
    count: Integer
    total: Integer
    replay: str
    known: NotRequired[str]
    shrunk: NotRequired[Integer]


class InstructionsReport(TypedDict):
    """What the builds of one config, with the same kinds of MMA instructions, execute for each MMA
    instruction, as their SASS shows.

    config: "" for builds that name none.  builds: those that have MMA instructions and were read.
    mma: kinds of MMA (`verify.variant.build.INSTRUCTIONS`), without the sum.  other, arithmetic:
    instructions other than MMA, and FP32 and integer instructions, for each MMA of the kernel:
    smallest and largest of the builds.  *_loop: the same in the loops with most MMA instructions;
    empty where there is none.
    """

    config: str
    builds: Integer
    mma: list[str]
    other: list[Number]
    other_loop: list[Number]
    arithmetic: list[Number]
    arithmetic_loop: list[Number]


class SameReport(TypedDict):
    """A config whose binaries are all those of an earlier one.  builds: how many were compared."""

    config: str
    other: str
    builds: Integer


class BuildsReport(TypedDict):
    """What a variant's builds need on one architecture, as the compiler says; nothing was run.

    builds: those listed; compiled: those that compiled and are what they declare; failing: those
    that did not compile or break their declaration, by name, with the `error` of the first; the
    rest was left out.  registers per thread, shared memory per block, stack per thread: the largest
    over the builds, memory in bytes, None where no build says.  spilling: builds that spill
    registers; spill_build: the worst of them, by the sum of its spill_stores and spill_loads, bytes
    per thread; spill_budget: what it declares that it may spill, None without a budget.  seconds:
    of all compilations.  instructions: by config.  unread: compiled builds whose instructions were
    not read, with the `unread_reason` of the first.  kinds: by kind of instruction of KINDS, the
    smallest and largest number in a build that was read.  same: configs that no number here counts,
    since their binaries are those of others.  The last six are missing in older reports.
    """

    arch: str
    builds: Integer
    compiled: Integer
    failing: list[str]
    error: str
    registers: Integer | None
    shared: Integer | None
    stack: Integer | None
    spilling: Integer
    spill_build: str
    spill_stores: Integer
    spill_loads: Integer
    seconds: Number
    spill_budget: NotRequired[Integer | None]
    instructions: NotRequired[list[InstructionsReport]]
    unread: NotRequired[Integer]
    unread_reason: NotRequired[str]
    kinds: NotRequired[dict[str, list[Integer]]]
    same: NotRequired[list[SameReport]]


class Cell(TypedDict):
    """One property of one variant.  measured, declared: each word, and the dtypes that it was found
    or declared for. contradicts: the evidence of a contradiction, or an empty text."""

    measured: dict[str, list[str]]
    declared: dict[str, list[str]]
    contradicts: str


class VariantReport(TypedDict):
    """One variant.  path: relative to the collection, or the file's name alone.  entries:
    "forward", "backward" or both.

    configs: those that every run judges, and further ones that this run judged; further_configs:
    how many further ones it did not, if there are any.
    gradients: the declared numerics of its backward.  builds: by architecture, empty where none is
    on record.  measured: what raw outputs show of each property of contract and numerics, by its
    name; missing in reports of an earlier day.  growth: of a kernel that keeps memory, the median
    of the bytes by which its process grew in a run; device_growth: of one that keeps device memory,
    the same.
    """

    ref: str
    name: str
    family: str
    path: str
    source_hash: str
    configs: list[str]
    entries: list[str]
    status: Status
    reasons: list[str]
    undeclared: bool
    unavailable: str | None
    cases: Integer
    failures: Integer
    support: dict[str, Free]
    numerics: dict[str, Free]
    gradients: dict[str, Free] | None
    contract: dict[str, Free]
    dtypes: list[DTypeReport]
    failing: list[Failure]
    builds: list[BuildsReport]
    measured: NotRequired[dict[str, Cell]]
    further_configs: NotRequired[Integer]
    growth: NotRequired[Number]
    device_growth: NotRequired[Number]


class Lost(TypedDict):
    """A case that was launched and never judged: its judge died, or the run is not over.

    Among `interrupted` it is one that was under way when the user, or the end of the time, ended
    the run.
    """

    case: str
    phase: str
    variant: str


class Unstable(TypedDict):
    """A case that an oracle both passed and failed."""

    case: str
    oracle: str


class NotRun(TypedDict):
    """A variant, or one dtype of it, that was not tried, and why."""

    variant: str
    dtype: str
    reason: str


class Started(TypedDict):
    """One of the runs that are reported together, and when it first began.  ended_early: somebody,
    or its time, ended it before it had asked everything; missing where it came to its end."""

    run: str
    started: str
    profile: str
    ended_early: NotRequired[bool]


class LeftOut(TypedDict):
    """Evidence of a run that does not count for a variant, since a later run knew another source of
    it: how many cases, and how many of them fail."""

    variant: str
    run: str
    cases: Integer
    failures: Integer


class BesideReport(TypedDict):
    """What a file beside the report ("probes", "sanitizer", "bench", "profiles") says of the
    device or of the kernels.

    said: one line.  A file in which nothing was measured has no entry.
    """

    name: str
    status: Status
    said: str


class Report(TypedDict):
    """One campaign on one device: a run, or several together, whose different names and profiles
    are listed with commas.

    started: the first of them.  What the runs know differently of device and versions is listed
    alike.  pools, accuracy, power, mutation, pairs, beside: missing in reports of an earlier day.
    runs: in order of time; missing where there is one, which came to its end.  left_out: sorted by
    variant; missing where nothing was.  interrupted: missing where there is none.
    """

    schema: Literal[3]
    run: str
    started: str
    profile: str
    device: dict[str, Free]
    versions: dict[str, str]
    status: Status
    reasons: list[str]
    cases: Integer
    failures: Integer
    variants: list[VariantReport]
    lost: list[Lost]
    torn: list[str]
    unstable: list[Unstable]
    not_run: list[NotRun]
    pools: NotRequired[list[PoolReport]]
    accuracy: NotRequired[list[AccuracyReport]]
    power: NotRequired[list[PowerReport]]
    mutation: NotRequired[list[MutationReport]]
    pairs: NotRequired[PairsReport]
    beside: NotRequired[list[BesideReport]]
    runs: NotRequired[list[Started]]
    left_out: NotRequired[list[LeftOut]]
    interrupted: NotRequired[list[Lost]]


def worst_cases(report: Report) -> list[tuple[VariantReport, WorstCase]]:
    """The worst case of every tensor of every (variant, dtype): what CI computes again from its
    id."""
    return [
        (variant, found["worst"])
        for variant in report["variants"]
        for d in variant["dtypes"]
        for found in d["tensors"].values()
    ]
