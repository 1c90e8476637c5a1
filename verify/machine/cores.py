"""Cores that this process may use: in a container or under a job scheduler, fewer than the machine
has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# How many equal processes share the cores, as pytest-xdist tells its workers.
SHARED_BY = "PYTEST_XDIST_WORKER_COUNT"


def cores(root: Path = Path("/")) -> int:
    """The number of cores that this process may use: the size of its affinity mask, or its cgroup's
    CPU quota if that is less.

    root: the directory that holds proc/ and sys/, for tests.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([allowed, *(int(quota) for quota in _quotas(root))]))


def threads(processes: int = 1) -> int:
    """Threads for each of `processes` equal processes: its share of `cores`, or OMP_NUM_THREADS if
    that is less.

    OMP_NUM_THREADS limits the threads of a process, not the number of processes.
    """
    share = max(1, cores() // max(1, processes))
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, int(setting)) if setting.isdecimal() and int(setting) > 0 else share


def own_threads() -> int:
    """Threads of this process, which shares the cores as SHARED_BY says."""
    return threads(int(os.environ.get(SHARED_BY, "1")))


def of_its_pytest(variable: str) -> bool:
    """Whether a variable is for the pytest that a process runs in, and not for a campaign that the
    process starts: that one needs SHARED_BY alone."""
    return variable.startswith("PYTEST_") and variable != SHARED_BY


def _quotas(root: Path) -> Iterator[float]:
    """CPU quotas, in cores, of this process's cgroups and all their parents, versions 1 and 2."""
    for controllers, path in _memberships(root):
        if controllers == "":
            mounts, read = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            mounts, read = ["sys/fs/cgroup/cpu", f"sys/fs/cgroup/{controllers}"], _quota_v1
        else:
            continue
        for mount in mounts:
            # In a container the path can be the host's, which is not mounted here: then the
            # process's group is the mount itself.
            group = Path(path.strip("/"))
            for part in (group, *group.parents):
                quota = read(root / mount / part)
                if quota is not None:
                    yield quota


def _memberships(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each cgroup hierarchy; in version 2 the controllers are ""."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    parts = [line.split(":", 2) for line in lines]
    return [(part[1], part[2]) for part in parts if len(part) == 3]


def _quota_v2(group: Path) -> float | None:
    fields = _fields(group / "cpu.max")
    return _ratio(*fields) if len(fields) == 2 else None


def _quota_v1(group: Path) -> float | None:
    fields = [*_fields(group / "cpu.cfs_quota_us"), *_fields(group / "cpu.cfs_period_us")]
    return _ratio(*fields) if len(fields) == 2 else None


def _fields(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _ratio(quota: str, period: str) -> float | None:
    """A quota in cores; None if there is no limit ("max" in version 2, -1 in version 1)."""
    limited = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if limited else None
