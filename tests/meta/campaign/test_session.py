"""The session: its workers are forks, and its imports leave nothing that a fork could break."""

from __future__ import annotations

import os
import subprocess
import sys

import execnet
import pytest
from execnet import gateway_io

from verify.bundle import ROOT
from verify.campaign import session
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
