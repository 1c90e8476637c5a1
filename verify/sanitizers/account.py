"""The account of a run of the sanitizers, `sanitizer.json`, as typed data."""

from __future__ import annotations

from typing import Any, TypedDict


class Planted(TypedDict):
    """A planted fault, or its correct twin, under one tool.  wanted: "caught", "clean" or "any";
    holds: whether it came; record: the one that shows the fault, None if there is none."""

    variant: str
    about: str
    tool: str
    wanted: str
    outcome: str
    holds: bool
    record: dict[str, Any] | None


class Process(TypedDict):
    """One process under a tool.  total: records that count."""

    total: int
    seconds: float


class Tried(TypedDict):
    """One config and dtype of a variant under one tool.  cases: outcome by case id."""

    variant: str
    source_hash: str
    tool: str
    outcome: str
    cases: dict[str, str]
    processes: list[Process]


class Left(TypedDict):
    """A variant that was not tried."""

    variant: str
    reason: str


class Waiver(TypedDict):
    """A record that is known to be false.  dead: nothing matched it."""

    tool: str
    kind: str
    kernel: str
    reason: str
    proof: str
    dead: bool


class Account(TypedDict):
    """One run of the sanitizer lane, as far as pages show it."""

    run: str
    device: dict[str, Any]
    sanitizer: str
    tools: list[str]
    whole: bool
    seconds: float
    planted: list[Planted]
    tried: list[Tried]
    not_run: list[Left]
    waivers: list[Waiver]
