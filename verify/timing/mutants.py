"""mutants.json as typed data: how many mutants a minute the suite convicts on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypedDict

from verify.evidence.strict_json import Free, Integer, Number, decode, dumps, loads

SCHEMA_VERSION: Final = 1
NAME: Final = "mutants.json"


class MutantRate(TypedDict):
    """Mutants of one language that are convicted on record, and were judged again.

    sample: how many there are; judged: those for which there was time; convicted: of these, by the
    question on record.  seconds: wall time of all that were judged, in one process.  reason: why
    none could be judged, or "".
    """

    language: str
    sample: Integer
    judged: Integer
    convicted: Integer
    seconds: Number
    reason: str


class MutantRates(TypedDict):
    """One run of `verify bench mutants`."""

    schema: Literal[1]
    run: str
    started: str
    device: dict[str, Free]
    rates: list[MutantRate]


def per_minute(rates: list[MutantRate]) -> float:
    """Convicted mutants a minute; 0 if none was judged."""
    seconds = sum(float(one["seconds"]) for one in rates)
    return 60 * sum(one["convicted"] for one in rates) / seconds if seconds else 0.0


def parse_rate(line: str) -> MutantRate:
    """The rate in a line.  Raises ValueError."""
    return decode(MutantRate, loads(line), "rate")


def parse(text: str) -> MutantRates:
    """The record in a text.  Raises ValueError."""
    return decode(MutantRates, loads(text), "mutants")


def write(record: MutantRates, folder: Path) -> Path:
    """Write mutants.json into a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    path.write_text(dumps(record, depth=2) + "\n", encoding="utf-8")
    return path
