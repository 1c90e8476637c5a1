"""From builds that were compiled and never run to one row per architecture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from verify.document import text
from verify.evidence import Built
from verify.report.schema import BuildsReport
from verify.variant import compiled_archs

_MESSAGE = 4000  # characters of a compiler's message


def by_arch(builds: Iterable[Built]) -> list[BuildsReport]:
    """The builds of one variant, by architecture in the order of `compiled_archs`."""
    found: dict[str, list[Built]] = defaultdict(list)
    for build in builds:
        found[build.arch].append(build)
    known = {arch: place for place, arch in enumerate(compiled_archs())}
    return [
        _one_arch(arch, found[arch])
        for arch in sorted(found, key=lambda arch: (known.get(arch, len(known)), arch))
    ]


def _one_arch(arch: str, builds: list[Built]) -> BuildsReport:
    builds = sorted(builds, key=lambda b: b.build)
    failing = [b for b in builds if b.error]
    spilling = {b.build: b.resources for b in builds if b.resources and _spilled(b.resources)}
    worst = max(spilling, key=lambda name: _spilled(spilling[name]), default="")
    return {
        "arch": arch,
        "builds": len(builds),
        "compiled": sum(b.resources is not None for b in builds),
        "failing": [b.build for b in failing],
        "error": text.shorter(failing[0].error, _MESSAGE) if failing else "",
        "registers": _largest(builds, "registers"),
        "shared": _largest(builds, "shared"),
        "stack": _largest(builds, "stack"),
        "spilling": len(spilling),
        "spill_build": worst,
        "spill_stores": spilling[worst].get("spill_stores", 0) if worst else 0,
        "spill_loads": spilling[worst].get("spill_loads", 0) if worst else 0,
        "seconds": sum(b.seconds for b in builds),
    }


def _largest(builds: Iterable[Built], name: str) -> int | None:
    return max(
        (b.resources[name] for b in builds if b.resources and name in b.resources), default=None
    )


def _spilled(resources: dict[str, int]) -> int:
    """Bytes per thread that are stored and loaded for want of registers."""
    return resources.get("spill_stores", 0) + resources.get("spill_loads", 0)
