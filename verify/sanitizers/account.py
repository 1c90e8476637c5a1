"""The account of a run of the sanitizers, `sanitizer.json`, as typed data."""

from __future__ import annotations

from typing import Final, Literal, NotRequired, TypedDict

from verify.evidence.strict_json import Free, Integer, Number

SCHEMA_VERSION: Final = 1

# One error record, as `verify.sanitizers.records.Record` names its parts, without those that are
# empty, and without all its words.
Shown = dict[str, str | list[str]]


class Planted(TypedDict):
    """A planted fault, or its correct twin, under one tool.  wanted: "caught", "clean" or "any";
    holds: whether it came; reasons: why it is inconclusive; record: the one that shows the fault,
    null if there is none; blind: why the tool is not required to see the fault, by design; copy_of:
    the shipped variant that it is a known-bad copy of, or ""; spare: one of its ways must catch it,
    and no tool is required to; hangs: it is such a copy, and did not answer before its deadline,
    which catches it; tries: how many times its process ran it, once unless it says so; held: in how
    many of them what is wanted came."""

    variant: str
    about: str
    tool: str
    wanted: str
    outcome: str
    holds: bool
    reasons: list[str]
    record: Shown | None
    seconds: Number
    blind: NotRequired[str]
    copy_of: NotRequired[str]
    spare: NotRequired[bool]
    hangs: NotRequired[bool]
    tries: NotRequired[Integer]
    held: NotRequired[Integer]


class Process(TypedDict):
    """One process under a tool.  cases: how many it was given; total: records that count;
    exit_code: null if it had to be killed."""

    cases: Integer
    outcome: str
    reasons: list[str]
    total: Integer
    exit_code: Integer | None
    seconds: Number


class Tried(TypedDict):
    """One config and dtype of a variant under one tool.  cases: outcome by case id."""

    variant: str
    family: str
    source_hash: str
    config: str
    dtype: str
    tool: str
    outcome: str
    cases: dict[str, str]
    processes: list[Process]


class Failed(TypedDict):
    """One reason why a case is not clean: `verify.sanitizers.failures.Failure`, as data.

    tool: "" if the case failed without one.  record: null if there is none.
    """

    variant: str
    config: str
    dtype: str
    case: str
    tool: str
    outcome: str
    message: str
    frame: str
    replay: str
    record: Shown | None


class Left(TypedDict):
    """A variant that was not tried."""

    variant: str
    reason: str


class KnownFalse(TypedDict):
    """A waiver: a record that is known to be false.  ends: its accesses are where the kernel
    begins and ends; used: a record matched it; dead: none did, and one had to; shown_by: the twin
    of which a record must."""

    tool: str
    kind: str
    kernel: str
    words: str
    source: str
    ends: NotRequired[bool]
    reason: str
    evidence: str
    version: str
    dead: bool
    used: NotRequired[bool]
    shown_by: NotRequired[str]


class Stage(TypedDict):
    """Processes of one kind: "planted" (those that show that the tools are alive, without copies),
    "copies" (known-bad ones under a tool), "delays" (copies that no tool caught), "builds" (first
    runs in plain cells, and compiling in any process, which other stages count too) or "variants".
    begun, ended: in seconds of the run.  busy: the sum of their seconds."""

    begun: Number
    ended: Number
    processes: Integer
    busy: Number


class Count(TypedDict):
    """How often a planted fault was tried under a tool, and how often what is wanted came.  by: the
    tool's version, "" for delays; of the run's own if it says none.  runs: in which ones."""

    variant: str
    tool: str
    by: NotRequired[str]
    wanted: str
    held: Integer
    tried: Integer
    runs: list[str]


class Further(TypedDict):
    """A run with another tool, or another version of one, that is shown with this one: Triton's
    sanitizers, or a newer compute-sanitizer.  As in `Account`."""

    run: str
    device: dict[str, Free]
    sanitizer: str
    tools: list[str]
    seconds: Number
    planted: list[Planted]
    tried: list[Tried]
    failures: list[Failed]
    cut: str


class Account(TypedDict):
    """One run of the sanitizer lane.  whole: nothing was left out by an option.  cut: why the run
    ended early, or "": outcomes are then "not run" of what was left.  workers: processes at the
    same time.  stages: by name.  counts: how often planted faults were caught, in this run and in
    those that were added to it.  further: of these, runs that tried what this one has not."""

    schema: Literal[1]
    run: str
    device: dict[str, Free]
    sanitizer: str
    tools: list[str]
    whole: bool
    seconds: Number
    planted: list[Planted]
    tried: list[Tried]
    failures: NotRequired[list[Failed]]
    not_run: list[Left]
    waivers: list[KnownFalse]
    cut: NotRequired[str]
    workers: NotRequired[Integer]
    stages: NotRequired[dict[str, Stage]]
    counts: NotRequired[list[Count]]
    further: NotRequired[list[Further]]
