"""Clocks: read from a fake nvidia-smi, locked by it, and released whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.machine import clocks, device

SMI = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
*lock-gpu-clocks*) {lock} ;;
*query-gpu=clocks*) echo "{said}" ;;
*query-gpu=index*) echo "0, GPU-1, NVIDIA H100, 9.0, 580" ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that puts an nvidia-smi first on the path; returns its log."""
    log = tmp_path / "log"

    def put(said: str = "1980, 2619, [N/A], 35", lock: str = "true") -> Path:
        program = tmp_path / "nvidia-smi"
        program.write_text(SMI.format(log=log, said=said, lock=lock))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return log

    return put


def test_a_reading(smi) -> None:
    smi()
    assert clocks.reading() == {
        "sm_mhz": 1980.0,
        "memory_mhz": 2619.0,
        "watts": None,
        "celsius": 35.0,
    }
    assert device.uuid() == "GPU-1"


def test_without_a_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(clocks.reading().values()) == {None}
    with pytest.raises(clocks.ClockError, match="no GPU"), clocks.locked(1500):
        raise AssertionError
    with clocks.locked(None):
        pass


def test_clocks_are_released_after_an_error_too(smi) -> None:
    log = smi()
    before = ""
    with pytest.raises(KeyboardInterrupt), clocks.locked(1500):  # noqa: PT012
        before = log.read_text()
        raise KeyboardInterrupt
    assert "--id=GPU-1 --lock-gpu-clocks=1500,1500" in before
    assert "reset" not in before
    assert "--id=GPU-1 --reset-gpu-clocks" in log.read_text()


def test_a_refusal_is_said_and_nothing_is_reset(smi) -> None:
    log = smi(lock="echo 'The current user does not have permission'; exit 4")
    with pytest.raises(clocks.ClockError, match="permission"), clocks.locked(1500):
        raise AssertionError
    assert "reset" not in log.read_text()
