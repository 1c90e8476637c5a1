"""docs/schema/: the committed JSON Schemas are those of the code; published files follow them."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_campaign import evidence
from verify import cli
from verify.bundle import ROOT
from verify.evidence import Interruption, Recorder
from verify.evidence.records import Passed, Told
from verify.report import build, dumps
from verify.report.json_schema import schemas

SCHEMAS = {name: json.loads(text) for name, text in schemas().items()}
REPORTS = sorted((ROOT / "reports").glob("*/report.json"))
ACCOUNTS = [
    path
    for name in ("sanitizer.json", "bench.json")
    for path in sorted((ROOT / "reports").glob(f"*/{name}"))
]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": int | float,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


KNOWN = {"$schema", "$ref", "$defs", "title", "description", "default", "format", "type", "enum"}
KNOWN |= {"const", "anyOf", "oneOf", "properties", "required", "additionalProperties", "items"}
KNOWN |= {"minimum", "maximum"}


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    """Where a value does not follow a schema, in the keywords that ours use."""
    assert schema.keys() <= KNOWN
    if "$ref" in schema:
        definition = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        yield from violations(value, definition, root, at)
    options = schema.get("anyOf") or schema.get("oneOf") or []
    found = [list(violations(value, option, root, at)) for option in options]
    if options and ([] not in found or ("oneOf" in schema and found.count([]) != 1)):
        yield f"{at}: none of {min(found, key=len)}"
    kinds = schema.get("type", [*TYPES])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not any(isinstance(value, TYPES[kind]) for kind in kinds) or (
        isinstance(value, bool) and "boolean" not in kinds
    ):
        yield f"{at}: {value!r} is no {' or '.join(kinds)}"
    elif "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        yield f"{at}: {value!r} is too large"
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{at}: {value!r} is not the value"
    yield from inside(value, schema, root, at)


def inside(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    """The same of what an object or an array holds."""
    if isinstance(value, list):
        # `read` checks every item, by the same types and in less time.
        for number, item in enumerate(value[:20]):
            yield from violations(item, schema.get("items", {}), root, f"{at}[{number}]")
    if not isinstance(value, dict):
        return
    yield from (f"{at}.{name}: missing" for name in schema.get("required", []) if name not in value)
    for name, item in value.items():
        expected = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
        if expected is False:
            yield f"{at}.{name}: not known"
        else:
            yield from violations(item, expected, root, f"{at}.{name}")


def wrong(name: str, value: Any) -> list[str]:
    return list(violations(value, SCHEMAS[name], SCHEMAS[name], "$"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_is_that_of_the_code(name: str) -> None:
    text = (ROOT / "docs" / "schema" / name).read_text(encoding="utf-8")
    assert text == schemas()[name], "write it again: python -m verify report --schema docs/schema"


def test_the_command_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", "report", "--schema", str(tmp_path / "new")])
    assert cli.main() == cli.CLEAN
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == schemas()


@pytest.mark.parametrize("path", REPORTS + ACCOUNTS, ids=lambda path: f"{path.parent.name}")
def test_published_files_follow_them(path: Path) -> None:
    assert wrong(path.name, json.loads(path.read_text(encoding="utf-8"))) == []


def test_known_failures_follow_theirs() -> None:
    data = tomllib.loads((ROOT / "xfails.toml").read_text(encoding="utf-8"))
    data["xfail"] = [one | {"expires": one["expires"].isoformat()} for one in data["xfail"]]
    assert wrong("xfails.json", data) == []
    data["xfail"][0]["where"] = "here"
    assert wrong("xfails.json", data) == ["$.xfail[0].where: not known"]


def test_every_kind_of_record_follows_its_own(tmp_path: Path) -> None:
    found = evidence(6)
    with Recorder(tmp_path, "gw0") as recorder:
        for records in (found.runs, found.variants, found.lost, found.verdicts, found.drawn):
            for one in records:
                recorder.write(one)
        ended = Interruption(case="v:c:accuracy:p", variant="v", reason="time")
        for other in (*found.not_run, *found.builds, ended):
            recorder.write(other)
        told = (Told(oracle="bound", measures={"r_out": 0.5}),)
        passed = Passed(
            case="v:c:accuracy:p", dtype="float16", phase="generate", passing=("bound",), told=told
        )
        recorder.write(passed)
    lines = [json.loads(line) for line in (tmp_path / "gw0.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {
        option["properties"]["kind"]["const"] for option in SCHEMAS["evidence.json"]["oneOf"]
    }
    assert [line for line in lines if wrong("evidence.json", line)] == []
    verdict = next(line for line in lines if line["kind"] == "verdict")
    for change in ({"outcome": "perhaps"}, {"kind": "rumour"}, {"measures": {"r_out": "NaN"}}):
        assert wrong("evidence.json", verdict | change)


def test_a_wrong_report_does_not() -> None:
    report = json.loads(dumps(build(evidence(6))))
    assert wrong("report.json", report) == []
    assert wrong("report.json", report | {"schema": 4}) == ["$.schema: 4 is not the value"]
    del report["variants"][0]["dtypes"][0]["cases"]
    assert wrong("report.json", report) == ["$.variants[0].dtypes[0].cases: missing"]
