"""Sessions of a run: another one follows a quarantine while there is a GPU and time, and which
processes watch over GPUs."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from verify.campaign import halt, runner
from verify.campaign.gpus import state, watch
from verify.campaign.runner import CLEAN, INFRASTRUCTURE, RunRequest
from verify.machine import device

A, B = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "ab")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "_known", [["0", A, "H", "9.0", "1"], ["1", B, "H", "9.0", "1"]])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.mark.parametrize(
    ("found", "late", "sessions", "said"),
    [
        ([[]], False, 1, []),
        ([[B], []], False, 2, [f"{B} is quarantined: wrong", f"goes on with {A}"]),
        ([[B], [A]], False, 2, [f"{A} is quarantined: wrong"]),
        ([[A, B]], False, 1, [f"{A} is quarantined: wrong", f"{B} is quarantined: wrong"]),
        ([[B]], True, 1, [f"{B} is quarantined: wrong"]),
    ],
)
def test_another_session_follows_a_quarantine(
    found: list[list[str]],
    late: bool,
    sessions: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = RunRequest(run_id="a")
    judged: list[str] = []

    def session(*_: object) -> tuple[int, str]:
        known = state.read(request.directory)
        for gpu in found[len(judged)]:
            known[gpu] = state.Gpu(quarantined="wrong")
        state.write(request.directory, known)
        judged.append("session")
        return (INFRASTRUCTURE if found[len(judged) - 1] else CLEAN), str(len(judged))

    monkeypatch.setattr(runner, "_judged", session)
    ended: list[tuple[int, str]] = []

    def status(code: int, request: RunRequest, output: str, console: Console) -> int:
        ended.append((code, output))
        return code

    monkeypatch.setattr(runner, "_status", status)
    printed = io.StringIO()
    deadline = time.monotonic() - 1 if late else None
    code = runner.execute(request, Console(file=printed, width=300), deadline)
    assert len(judged) == sessions
    assert ended == [(code, str(sessions))]  # of the last one alone
    assert code == (CLEAN if not found[-1] else INFRASTRUCTURE)
    assert all(text in printed.getvalue() for text in said)
    assert ("goes on" in printed.getvalue()) == (sessions > 1)


@pytest.mark.parametrize(
    ("what", "watches"),
    [("first", True), ("worker", False), ("lease", False), ("collect", False)],
)
def test_the_first_process_of_a_session_watches(what: str, watches: bool, tmp_path: Path) -> None:
    registered: list[str] = []
    option = SimpleNamespace(collectonly=what == "collect")
    if what == "lease":
        option.lease_socket = 7
    manager = SimpleNamespace(register=lambda plugin, name: registered.append(name))
    config = SimpleNamespace(option=option, pluginmanager=manager, stash=pytest.Stash())
    if what == "worker":
        config.workerinput = {}
    marker = tmp_path / state.MARKER
    marker.touch()
    try:
        watch.watch_gpus(config, tmp_path)  # type: ignore[arg-type]
        assert registered == ["verify-gpus"] * watches
        assert marker.exists() != watches  # of the session before
        assert watch.wrong_gpus(config) == ""  # type: ignore[arg-type]
        marker.touch()
        assert halt.over()  # every process of the session ends
    finally:
        halt.stop_at_quarantine(None)


def test_a_run_that_goes_on_hides_what_it_quarantined() -> None:
    import os

    run = RunRequest(run_id="a").directory
    run.mkdir(parents=True)
    state.write(run, {A: state.Gpu(quarantined="wrong")})
    config = SimpleNamespace(getoption=lambda name: {"--run-id": "a"}[name])
    watch.choose_gpus(config)  # type: ignore[arg-type]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == B
    state.write(run, {each: state.Gpu(quarantined="wrong") for each in (A, B)})
    with pytest.raises(pytest.UsageError, match="begin another run"):
        watch.choose_gpus(config)  # type: ignore[arg-type]
    config.workerinput = {}
    watch.choose_gpus(config)  # type: ignore[arg-type]
