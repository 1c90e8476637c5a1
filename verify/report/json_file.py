"""A report as text, and back: the file report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verify.evidence import strict_json
from verify.evidence.flat_numerics import BACKWARD, FORWARD, in_parts
from verify.report import earlier
from verify.report.schema import SCHEMA_VERSION, DTypeReport, Group, Oracle, Report, ReportError

_DTYPES = 5  # the depth at which what a variant's dtype has is one line each
# Counts of which most are 0, thousands of them: they are not in the file then.
_COUNTS = {"oracles": (Oracle, {"inapplicable": 0}), "groups": (Group, {"refused": 0})}


def dumps(report: Report) -> str:
    """The text of report.json: strict JSON, equal for equal reports."""
    variants = [
        {**variant, "dtypes": [_without_zeros(dtype) for dtype in variant["dtypes"]]}
        for variant in report["variants"]
    ]
    return strict_json.dumps({**report, "variants": variants}, depth=_DTYPES) + "\n"


def _without_zeros(dtype: DTypeReport) -> dict[str, Any]:
    found: dict[str, Any] = {**dtype}
    for part, (_, zero) in _COUNTS.items():
        found[part] = [strict_json.shortened(one, zero) for one in found[part]]
    return found


def _fill(dtype: Any) -> None:
    """Put in the zeros that a file leaves out, where they were."""
    for part, (shape, zero) in _COUNTS.items():
        dtype[part] = [strict_json.completed(shape, one, zero) for one in dtype[part]]


def read(path: Path | str) -> Report:
    """The report in a file, or in `report.json` of a folder.

    Raises ReportError for a file that is missing, is no strict JSON, or has another version or
    shape.
    """
    file = Path(path)
    file = file / "report.json" if file.is_dir() else file
    try:
        data = strict_json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file}: is no report: {error}") from None
    try:
        return parse(data)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from None


def reports_in(folder: Path) -> list[tuple[Path, Report]]:
    """The report.json of a folder, or else of every folder in it: (path, report), sorted by path.

    Raises ReportError if there is none, and for one that cannot be read.
    """
    here = folder / "report.json"
    paths = [here] if here.is_file() else sorted(folder.glob("*/report.json"))
    if not paths:
        raise ReportError(f"{folder}: holds no report")
    return [(path, read(path)) for path in paths]


def parse(data: Any) -> Report:
    """JSON data as a report; raises ReportError naming the version or the first place whose shape
    is wrong."""
    version = data.get("schema") if isinstance(data, dict) else None
    if version is None:
        raise ReportError("is no report: it has no schema version")
    if version == earlier.VERSION and not isinstance(version, bool):
        data, version = earlier.upgraded(data), SCHEMA_VERSION
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise ReportError(
            f"has schema version {version!r}; this version of verify reads {earlier.VERSION} and"
            f" {SCHEMA_VERSION}"
        )
    try:
        report = strict_json.decode(Report, data, "report")
    except strict_json.ShapeError as error:
        raise ReportError(str(error)) from None
    except RecursionError:
        raise ReportError("is nested too deeply") from None
    for variant in report["variants"]:
        for dtype in variant["dtypes"]:
            _fill(dtype)
        variant["numerics"] = in_parts(variant["numerics"], FORWARD)
        variant["gradients"] = variant["gradients"] and in_parts(variant["gradients"], BACKWARD)
    return report
