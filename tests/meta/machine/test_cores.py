"""Cores and threads that a container or a job scheduler allows, read from a directory that looks
like /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verify.machine import cores, device


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        (
            "0::/job/step\n",
            {
                "sys/fs/cgroup/job/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 1\n",
            },
            3,
        ),
        ("0::/of/the/host\n", {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        (
            V1,
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        (
            V1,
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            V1,
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "50000\n",
            },
            2,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense\n"}, 16),
        ("nonsense", {}, 16),
    ],
)
def test_a_quota_counts(groups: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert cores.cores(machine(tmp_path, groups, files)) == expected


def test_the_affinity_mask_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert cores.cores(tmp_path) == 2
    assert (
        cores.cores(machine(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "800000 100000\n"})) == 2
    )


@pytest.mark.parametrize(
    ("variable", "processes", "expected"),
    [
        (None, 1, 8),
        (None, 3, 2),
        (None, 100, 1),
        ("3", 1, 3),
        ("3", 4, 2),
        ("1,2", 1, 1),
        ("many", 1, 8),
        ("0", 1, 8),
    ],
)
def test_threads_are_a_share_of_the_cores(
    variable: str | None, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cores", lambda: 8)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores.threads(processes) == expected


def test_nothing_else_counts_cores() -> None:
    """Only one module counts cores: the machine's count is too high in a container."""
    root = Path(__file__).parents[3]
    files = [
        path
        for folder in ("verify", "references", "tests")
        for path in (root / folder).rglob("*.py")
    ]
    counting = [
        path
        for path in [*files, root / "conftest.py"]
        if "cpu_" + "count(" in path.read_text(encoding="utf-8")
    ]
    assert [path.name for path in counting] == ["cores.py"]


def test_a_campaign_takes_the_cores_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.campaign.gpus import placement
    from verify.campaign.runner import RunRequest

    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(placement, "cores", lambda: 5)
    assert placement.place_workers() == 5
    words = RunRequest(kernels=(Path("one.py"),)).arguments()
    assert words[words.index("-n") + 1] == "auto"
    for gpus, workers in (([], "6"), (["GPU-a"], "auto")):
        monkeypatch.setattr(device, "visible_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(device, "cores", lambda: 5)
        words = RunRequest().arguments()
        assert words[words.index("-n") + 1] == workers
        words = RunRequest(workers="2").arguments()
        assert words[words.index("-n") + 1] == "2"
