"""`verify campaign`: its options, and a campaign through each way to workers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness.commands import verify
from tests.harness.finished_runs import command
from verify.bundle import ROOT

SAMPLES = ROOT / "tests" / "sample_kernels"
needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="the extra [campaign] is not installed"
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give exactly one of --local, --ssh, --scheduler, --scheduler-file and --join"),
        (["--local", "2", "--ssh", "a"], "give exactly one of"),
        (["--local", "2", "--workers-here", "1"], "--workers-here: needs --join"),
        (["--ssh", "-oProxyCommand=x"], "is no host"),
        (["--ssh", ","], "--ssh: names nothing"),
        (["--local", "0"], "--local"),
        (["--local", "1", "--seeds", "0"], "--seeds"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "campaign", *words) == 2
    assert said in " ".join(capsys.readouterr().out.split())


def test_without_dask_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "distributed" else real(name, *more),
    )
    assert command(monkeypatch, "campaign", "--local", "2") == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "verify: distributed is not installed: pip install 'attention-verify[campaign]'"
    )
    assert not (tmp_path / ".verify").exists()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.1:8786", True),
        ("tls://head-1.cluster:8786", True),
        ("tcp://[fe80::1]:8786", True),
        ("head:8786", True),
        ("scheduler.json", False),
        ("/shared/run-1/scheduler.json", False),
    ],
)
def test_an_address_is_told_from_a_file_that_is_to_come(text: str, address: bool) -> None:
    from verify.campaign.leases.hosts import is_address

    assert is_address(text) == address


def test_one_worker_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.campaign.leases import hosts

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("verify.machine.device.gpus", lambda: ["GPU-a", "GPU-b"])
    assert hosts.placed(None) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("GPU-a", "GPU-b")]
    assert hosts.placed(1) == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}]
    with pytest.raises(hosts.HostError, match="3 workers: one a GPU, and this machine has 2"):
        hosts.placed(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hosts.placed(None) == [{"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setattr("verify.machine.device.gpus", list)
    assert hosts.placed(3) == [{"PYTEST_XDIST_WORKER_COUNT": "3"}] * 3


def test_no_other_command_imports_dask() -> None:
    """The base installation does not have it."""
    import ast

    alone = {
        "verify/campaign/leases/dask_engine.py",
        "verify/campaign/leases/dask_worker.py",
        "verify/campaign/leases/on_worker.py",
        "verify/campaign/leases/command.py",
    }
    found = set()
    for path in (ROOT / "verify").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named = "dask" in text or "distributed" in text  # an import says so
        for node in ast.walk(ast.parse(text)) if named else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] in ("dask", "distributed") for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == alone


@needs_dask
@pytest.mark.thorough
def test_local_workers_convict_a_wrong_kernel_and_stop(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "wrong_scale.py", tmp_path / "wrong.py")
    words = ["campaign", "wrong.py", "--local", "2", "--seeds", "3", "--examples", "5", "-x"]
    words += ["--junit", "verdicts.xml", "--sarif", "verdicts.sarif"]
    done = verify(*words, "--run-id", "w", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "<failure" in (tmp_path / "verdicts.xml").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "verdicts.sarif").read_text(encoding="utf-8"))["runs"]
    assert "stopped at the first failure" in done.stdout
    assert "wrong.py@wrong" in done.stdout
    again = verify("report", "--run", _run_name(tmp_path), cwd=tmp_path)
    assert again.returncode == 1


@needs_dask
@pytest.mark.thorough
def test_hosts_start_their_workers_by_ssh(tmp_path: Path) -> None:
    """A program in place of ssh runs the command here."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    ssh = bin_ / "ssh"
    ssh.write_text('#!/bin/sh\necho "$3" >> hosts.txt\nexec sh -c "$4"\n')
    ssh.chmod(0o755)
    shutil.copy(SAMPLES / "correct_plain.py", tmp_path / "plain.py")
    import os

    words = ["campaign", "plain.py", "--ssh", "one,two", "--listen", "127.0.0.1"]
    words += ["--python", sys.executable, "--dtype", "float32", "--examples", "3"]
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    done = verify(*words, "--run-id", "s", cwd=tmp_path, variables={"PATH": path})
    assert done.returncode == 0, done.stdout
    assert sorted((tmp_path / "hosts.txt").read_text().split()) == ["one", "two"]
    accounts = json.loads((tmp_path / ".verify/campaigns/s/accounting.json").read_text())
    assert len(accounts) >= 2
    assert sum(each["leases"] for each in accounts) > 4
    again = verify(*words, "--run-id", "s", cwd=tmp_path, variables={"PATH": path})
    assert again.returncode == 0, again.stdout
    other = verify(*words, "--seeds", "2", "--run-id", "s", cwd=tmp_path, variables={"PATH": path})
    assert other.returncode == 2
    assert "was begun with other options" in other.stdout


@needs_dask
@pytest.mark.thorough
def test_what_matches_nothing_and_what_does_not_load_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    done = verify("campaign", "broken.py", "--local", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "does not load" in done.stdout
    plain = SAMPLES / "correct_plain.py"
    done = verify("campaign", plain, "--local", "1", "-k", "never", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing matches" in done.stdout


def _run_name(folder: Path) -> str:
    (run,) = (folder / ".verify" / "runs").iterdir()
    return run.name
