"""Builds: compiles kernels without a GPU for the profile's architectures, and records resources.

Profile dev compiles for one architecture, the others for all (`arches`).  If time is short, only
the first builds are compiled; the others are recorded as listed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from verify.campaign.halt import over
from verify.cell.process import COMPILER, Cell, ForkServer, Reply
from verify.evidence import Built, Recorder
from verify.variant import Declaration, compiled_archs

# A laptop compiles for one architecture: a kernel that includes CUTLASS takes 25 s of one core per
# architecture.  All other profiles compile for all architectures.
_FEW_ARCHES = {"dev": ("sm_90a",)}
# Seconds for the builds of one variant and architecture on a small machine.  The first build is
# always compiled; a variant lists its most important builds first.
_SECONDS = {"dev": 1.5, "ci": 3.0}


def arches(profile: str) -> tuple[str, ...]:
    """The architectures that a profile compiles for."""
    return _FEW_ARCHES.get(profile) or compiled_archs()


def left_out(profile: str) -> str:
    """A text that names the architectures that a profile leaves out; "" if there are none."""
    missing = [arch for arch in compiled_archs() if arch not in arches(profile)]
    return (
        f"not compiled for {', '.join(missing)}: profile {profile} leaves these to larger ones"
        if missing
        else ""
    )


@dataclass
class Builder:
    """Compiles builds in separate cells; close it at the end."""

    recorder: Recorder
    profile: str
    _fork_server: ForkServer = field(default_factory=lambda: ForkServer(COMPILER))

    def close(self) -> None:
        """End the processes that compile."""
        self._fork_server.close()

    def compile(self, declaration: Declaration, arch: str) -> list[str]:
        """Compile the variant's builds for `arch` and record each; returns one text per failure."""
        cell = Cell(self._fork_server)
        try:
            listed = cell.builds(declaration.path, declaration.name, arch)
            if not listed.ok:
                error = _error_text(listed)
                self._record(declaration, arch, "(listing)", error=error)
                return [f"{declaration.ref}: its builds for {arch} cannot be listed: {error}"]
            names = [str(name) for name in listed.data["builds"]]
            begun, budget = time.monotonic(), _SECONDS.get(self.profile, math.inf)
            failures = []
            for number, name in enumerate(names):
                if number and (time.monotonic() - begun > budget or over()):
                    self._record(declaration, arch, name)
                else:
                    failures += self._compile(cell, declaration, arch, name)
            return failures
        finally:
            cell.close()

    def _compile(self, cell: Cell, declaration: Declaration, arch: str, name: str) -> list[str]:
        reply = cell.compile(declaration.path, declaration.name, arch, name)
        error = "" if reply.ok else _error_text(reply)
        seconds = round(reply.data.get("seconds", reply.seconds), 3)
        self._record(
            declaration, arch, name, seconds, reply.data["resources"] if reply.ok else None, error
        )
        return [f"{declaration.ref}: {name} does not compile for {arch}: {error}"] if error else []

    def _record(
        self,
        declaration: Declaration,
        arch: str,
        name: str,
        seconds: float = 0.0,
        resources: dict[str, int] | None = None,
        error: str = "",
    ) -> None:
        built = Built(
            variant=declaration.ref,
            arch=arch,
            build=name,
            seconds=seconds,
            resources=resources,
            error=error,
        )
        self.recorder.write(built)


def _error_text(reply: Reply) -> str:
    return f"{reply.status}: {reply.message}\n{reply.data.get('traceback', '')}".strip()
