"""JSON Schema of every file format that is published, generated from the types that read it."""

from __future__ import annotations

import json
from inspect import cleandoc
from typing import Any

from msgspec.json import schema_components

from verify.evidence.known_failures import Xfail
from verify.evidence.records import KINDS
from verify.evidence.strict_json import Free, NumberOrText
from verify.profiling.record import Profiles
from verify.report.schema import Report
from verify.sanitizers.account import Account
from verify.timing.mutants import MutantRates
from verify.timing.record import Benchmark


def schemas() -> dict[str, str]:
    """The text of each JSON Schema, by its file name.

    evidence.json is of one line of a run's evidence; xfails.json is of xfails.toml.
    """
    lines, records = _of(*KINDS.values())
    kinds = [
        {"properties": {"kind": {"const": kind}}, "required": ["kind"], **line}
        for kind, line in zip(KINDS, lines, strict=True)
    ]
    (report,), of_report = _of(Report)
    (account,), of_account = _of(Account)
    (bench,), of_bench = _of(Benchmark)
    (mutants,), of_mutants = _of(MutantRates)
    (profiles,), of_profiles = _of(Profiles)
    (xfail,), of_xfail = _of(Xfail)
    xfails = {
        "type": "object",
        "properties": {"xfail": {"type": "array", "items": xfail}},
        "additionalProperties": False,
    }
    return {
        "bench.json": _text("bench.json", bench, of_bench),
        "evidence.json": _text("A line of evidence", {"oneOf": kinds}, records),
        "mutants.json": _text("mutants.json", mutants, of_mutants),
        "profiles.json": _text("profiles.json", profiles, of_profiles),
        "report.json": _text("report.json", report, of_report),
        "sanitizer.json": _text("sanitizer.json", account, of_account),
        "xfails.json": _text("xfails.toml", xfails, of_xfail),
    }


def _of(*types: Any) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """A schema for each type, and what they refer to."""
    found, definitions = schema_components(types, schema_hook=_own, ref_template="#/$defs/{name}")
    for definition in definitions.values():  # Python 3.13 strips the indentation of docstrings
        definition["description"] = cleandoc(definition["description"])
    return found, definitions


def _own(kind: Any) -> dict[str, Any]:
    """The schemas of the types that msgspec does not know."""
    number_or_text = ["number", "string"]
    anything = [*number_or_text, "object", "array", "boolean", "null"]
    return {"type": {Free: anything, NumberOrText: number_or_text}[kind]}


def _text(title: str, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    whole = {**head, **schema, "$defs": dict(sorted(definitions.items()))}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
