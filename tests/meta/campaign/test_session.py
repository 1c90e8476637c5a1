"""The session: its workers are forks, and its imports leave nothing that a fork could break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import execnet
import pytest
from execnet import gateway_io

from verify.bundle import ROOT
from verify.campaign import session
from verify.campaign.runner import FAILED
from verify.machine import starter

IMPORTS = """
import os
from importlib import import_module
from pathlib import Path

import torch

os.environ["OPENBLAS_NUM_THREADS"] = "1"
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties"):
    setattr(torch.cuda, name, None)  # a fork cannot use CUDA if its parent has
from verify.campaign import session

for module in session._MODULES:
    import_module(module)
session._prepare()
print(len(list(Path("/proc/self/task").iterdir())))
"""


def test_its_imports_start_no_thread_and_no_cuda() -> None:
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


@pytest.mark.usefixtures("own_starters")
def test_its_workers_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(gateway_io), "Popen2IOMaster", gateway_io.Popen2IOMaster)
    session._fork_workers()
    parents = []
    for _ in range(2):
        group = execnet.Group()
        gateway = group.makegateway("popen")
        parents.append(gateway.remote_exec("import os; channel.send(os.getppid())").receive(60))
        group.terminate(timeout=10)
        # The first one had no starter to ask.
        starter.start(starter.JUDGES, "verify.campaign.worker", os.environ)
    assert parents[0] == os.getpid() != parents[1]


UNWANTED = """
import os, pathlib, traceback
here = pathlib.Path(__file__)
here.with_name(f"{os.getpid()}.txt").write_text("".join(traceback.format_stack()))
raise ImportError("sympy: importing it takes seconds, and no process of a campaign needs it")
"""


@pytest.mark.for_ci
def test_no_process_of_a_campaign_imports_sympy(tmp_path: Path) -> None:
    """Functions of torch import it at their first call, such as unravel_index: a finding that was
    made with one took 10 s longer.  A kernel process cannot write: there, it would raise."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "sympy.py").write_text(UNWANTED)
    home = tmp_path / "home"
    home.mkdir()
    kernel = ROOT / "tests" / "sample_kernels" / "wrong_tail.py"
    command = [sys.executable, "-m", "verify", "run", str(kernel), "-x", "-n", "0"]
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": os.pathsep.join((str(fake), str(ROOT))),
        "VERIFY_SHRINK_SECONDS": "0",
    }
    done = subprocess.run(
        [*command, "--dtype", "float32", "--oracle", "bound"],
        cwd=home,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == FAILED, done.stdout + done.stderr
    assert "is off by" in done.stdout
    assert [path.read_text() for path in fake.glob("*.txt")] == []
