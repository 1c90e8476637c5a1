"""Merged evidence: what a campaign's workers recorded, as one run directory per kind of device.

Every device (a GPU, or a worker of a CPU) has one file in it, so that all that a quarantined device
said can be taken out again.  The coordinator is the only writer.  Lines are appended before the
journal says that their lease is done; a lease that is done twice says the same twice, and
`verify.evidence.load` joins verdicts by case and oracle.  Problems drawn, which add up, are written
once, at the end, from the journal.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from verify.campaign.leases.state import Leases
from verify.evidence import Drawn, Recorder, RunInfo, errors, load, strict_json
from verify.evidence.errors import JudgeError
from verify.evidence.records import KINDS

_HEADER, _DRAWN = "campaign", "drawn"
_FILE_OF_ERRORS = "errors.log"


class Merged:
    """The evidence of one campaign.

    directory: of the campaign; runs: of all runs.
    """

    def __init__(self, directory: Path, runs: Path) -> None:
        self.directory = directory
        self.runs = runs
        self._open: dict[Path, int] = {}
        self._said: dict[str, set[bytes]] = {}

    def run_id(self, kind: str) -> str:
        """The name of the run with the evidence of a kind of device."""
        return f"{self.directory.name}.{kind}"

    def run(self, kind: str) -> Path:
        """The directory of that run."""
        return self.runs / self.run_id(kind)

    def begin(self, kind: str, header: bytes, started: str) -> None:
        """Write what a worker's session says of itself, unless a worker of its kind has said it.

        header: lines of evidence: the run, its variants, what is not run.  started: when the
        campaign began, which is when its run did.
        """
        path = self.run(kind) / f"{_HEADER}.jsonl"
        first = not path.exists()
        said = self._said.setdefault(kind, set() if first else set(path.read_bytes().splitlines()))
        lines = []
        for line in header.splitlines():
            data = strict_json.loads(line)
            is_run = data.get("kind") == "run"
            if is_run:
                info = strict_json.decode(KINDS["run"], data, "run")
                assert isinstance(info, RunInfo)
                info = replace(info, run=self.run_id(kind), started=started)
                text = strict_json.dumps({"kind": "run", **strict_json.encode(info)}).encode()
            else:
                text = line
            if (first or is_run) and text not in said:
                said.add(text)
                lines.append(text + b"\n")
        self._append(path, b"".join(lines))

    def append(self, kind: str, device: str, lines: bytes) -> None:
        """Append whole lines of evidence of a device.  Raises OSError if the disk refuses."""
        if lines:
            self._append(self.run(kind) / _file(device), lines)

    def drop(self, kind: str, device: str) -> None:
        """Take a device's evidence out of the run, and keep it in the campaign's directory."""
        path = self.run(kind) / _file(device)
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)
        if path.exists():
            kept = self.directory / "quarantined"
            kept.mkdir(exist_ok=True)
            os.replace(path, kept / f"{kind}.{path.name}")

    def conclude(self, kind: str, state: Leases) -> None:
        """Write what is known of a kind's campaign as a whole: problems drawn, and the leases that
        no worker could do, as errors of the judge."""
        run = self.run(kind)
        drawn: Counter[tuple[str, str, str]] = Counter()
        refused: Counter[tuple[str, str, str]] = Counter()
        for id_, done in state.done.items():
            for each in done.drawn if state.all[id_].kind == kind else ():
                key = (each.variant, each.dtype, each.group)
                drawn[key] += each.drawn
                refused[key] += each.refused
        (run / f"{_DRAWN}.jsonl").unlink(missing_ok=True)
        with Recorder(run, _DRAWN) as recorder:
            for (variant, dtype, group), count in sorted(drawn.items()):
                recorder.write(
                    Drawn(
                        variant=variant,
                        dtype=dtype,
                        group=group,
                        drawn=count,
                        refused=refused[variant, dtype, group],
                    )
                )
        refs = [entry.ref for entry in load(run).variants]
        errors.begin(run)
        for id_, message in state.broken.items():
            lease = state.all[id_]
            if lease.kind == kind:
                variant = errors.variant_in(lease.unit.node, refs)
                errors.record(run, JudgeError(variant, lease.unit.node, errors.shortened(message)))

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _append(self, path: Path, data: bytes) -> None:
        descriptor = self._open.get(path)
        if descriptor is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = self._open[path] = os.open(path, flags, 0o644)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")  # a predecessor died in the middle of a line
        written = os.write(descriptor, data)
        if written != len(data):
            os.write(descriptor, b"\n")
            raise OSError(f"{path}: {written} of {len(data)} bytes written; is the disk full?")


def _file(device: str) -> str:
    """A device's file; its name says nothing of the machine."""
    return f"device-{sha256(device.encode()).hexdigest()[:12]}.jsonl"
