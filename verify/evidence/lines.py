"""One file of evidence: what its lines say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from verify.evidence import strict_json
from verify.evidence.records import (
    KINDS,
    OF_VERDICTS,
    SCHEMA_VERSION,
    Begin,
    Built,
    Drawn,
    EvidenceError,
    Finding,
    Interruption,
    NotRun,
    Passed,
    Record,
    RunInfo,
    VariantEntry,
    Verdict,
)
from verify.evidence.run_records import OpenBegins, RunRecords
from verify.evidence.tables import Packer


def read_file(file: Path, name: str, shared: dict[Any, Any]) -> RunRecords:
    """What a file holds; `together` joins its tables with those of others.

    name: what messages call it.  shared: `Packer`'s.  Raises EvidenceError for a whole line that is
    not a record, and for evidence of another schema version.
    """
    found = RunRecords(file.parent)
    packer = Packer(shared)
    begins = OpenBegins()
    lists: dict[type[Record], list[Any]] = {
        RunInfo: found.runs,
        VariantEntry: found.variants,
        Interruption: found.interruptions,
        Drawn: found.drawn,
        NotRun: found.not_run,
        Built: found.builds,
    }
    with file.open("rb", 1 << 18) as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = _record(line)
            except (EvidenceError, strict_json.ShapeError) as error:
                raise EvidenceError(f"{name}:{number}: {error}") from None
            if record is None:
                if line.strip():
                    found.torn.append(f"{name}:{number}")
                continue
            if isinstance(record, Verdict | Passed):
                _take(record, packer)
                begins.judged(record)
            elif isinstance(record, Begin):
                begins.add(record)
            else:
                lists[type(record)].append(record)
    found.tables = packer.tables
    found.begins = begins.open
    return found


# Nearly every line is one of these, and begins as `Recorder.write` writes it.
_READERS = {
    f'{{"kind":"{kind}",'.encode()[:16]: strict_json.reader(KINDS[kind])
    for kind in ("begin", *OF_VERDICTS)
}


def _record(line: bytes) -> Record | None:
    """The record in a line; None for one that does not parse: it was cut short, by a kill or a full
    disk, wherever it is.  Raises EvidenceError or ShapeError for a whole line that is no record."""
    read = _READERS.get(line[:16])
    if read is not None:
        try:
            return read(line)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            pass  # what follows takes it, or says what is wrong
    try:
        data = strict_json.loads(line)
        kind = _kind(data)
        return strict_json.decode(KINDS[kind], data, kind)
    except RecursionError:
        raise EvidenceError("is nested too deeply") from None
    except (EvidenceError, strict_json.ShapeError):
        raise
    except ValueError:
        return None


@cache
def _is_ratio(measure: str) -> bool:
    """Whether it is an error over its bound: "r_out", "long_r_dq"."""
    return re.fullmatch(r"(?:.*_)?r_(?:out|lse|dq|dk|dv)", measure) is not None


def _held_to_its_measures(verdict: Verdict) -> Verdict:
    """A passing verdict as recorded, but failing where one of its own measures says that an element
    is out of bounds.

    Whatever wrote such a record, a judge with a fault or a kernel, it is no evidence that a kernel
    is right.
    """
    if verdict.outcome != "pass":
        return verdict
    broken = _broken(verdict.measures)
    if broken is None:
        return verdict
    r = verdict.measures[broken]
    message = f"recorded as passing with {broken} = {r:.4g}: above 1 an element is out of its bound"
    finding = Finding(oracle=verdict.oracle, message=message, got=r, bound=1.0)
    return replace(verdict, outcome="fail", finding=finding)


def _broken(measures: Mapping[str, float]) -> str | None:
    """The first measure that says that an element is out of its bound."""
    for name, r in measures.items():
        if not r <= 1 and _is_ratio(name):
            return name
    return None


def _take(record: Verdict | Passed, packer: Packer) -> None:
    """Put a record's verdicts, as they count, where all are."""
    if isinstance(record, Verdict):
        packer.add(_held_to_its_measures(record))
    elif any(_broken(told.measures) for told in record.told):
        for verdict in record.verdicts:
            packer.add(_held_to_its_measures(verdict))
    else:
        packer.add_passed(record)


def _kind(data: Any) -> str:
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise EvidenceError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    if kind == "run" and data.get("schema") != SCHEMA_VERSION:
        raise EvidenceError(
            f"evidence of schema {data.get('schema')!r}; this version reads {SCHEMA_VERSION}"
        )
    return kind
