"""Files for other programs that a run writes: --junit, --sarif and --summary."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verify.cli.options import UsageError, console

if TYPE_CHECKING:
    from verify.report import Report


@dataclass(frozen=True)
class Files:
    """Where to write them; None: not wanted.  What is in `summary` stays."""

    junit: Path | None = None
    sarif: Path | None = None
    summary: Path | None = None

    def of(self, kind: str) -> Files:
        """Those of one kind of device: verdicts.xml becomes verdicts.KIND.xml.  A summary is
        appended, so all kinds have one file of it."""
        junit, sarif = (
            path and path.with_name(f"{path.stem}.{kind}{path.suffix}")
            for path in (self.junit, self.sarif)
        )
        return replace(self, junit=junit, sarif=sarif)

    def write(self, report: Report | None) -> None:
        """Write them and, in a workflow of GitHub, print annotations; without a report, say that
        there are none.

        Raises UsageError for a file that cannot be written.
        """
        from verify.report import exports

        wanted = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if report is None:
            if wanted:
                names = ", ".join(f"--{name}" for name in wanted)
                console.print(f"{names}: nothing written, since this run made no report")
            return
        for line in exports.github(report):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        try:
            if self.junit is not None:
                self.junit.write_text(exports.junit(report), encoding="utf-8")
            if self.sarif is not None:
                text = json.dumps(exports.sarif(report), indent=1)
                self.sarif.write_text(f"{text}\n", encoding="utf-8")
            if self.summary is not None:
                with self.summary.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(exports.summary(report))
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror or error}") from None
