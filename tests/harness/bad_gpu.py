"""A pytest plugin of a machine whose second GPU computes wrongly: the control problem there is
wrong, and so are verdicts.

Put `fake_smi` first on the path, and `-p tests.harness.bad_gpu` into PYTEST_ADDOPTS.  BAD_GPU_LATER
in the environment, a folder for notes: its control problem is right at the beginning.  BAD_GPU: the
UUID of a real GPU that is to be bad.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

GOOD = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
BAD = os.environ.get("BAD_GPU", "GPU-bbbbbbbb-0000-0000-0000-000000000000")
LATER = "BAD_GPU_LATER"
_SMI = """#!/bin/sh
case "$*" in
*query-gpu=index*) {rows} ;;
*memory.free*) {memory} ;;
esac
"""


def fake_smi(folder: Path, gpus: Sequence[str] = (GOOD, BAD), free: int = 80_000) -> Path:
    """Put an nvidia-smi with these GPUs into a folder, and return the folder.

    free: MiB of each one's memory.
    """
    rows = [f'echo "{n}, {gpu}, NVIDIA H100, 9.0, 580"' for n, gpu in enumerate(gpus)]
    memory = [f'echo "{gpu}, {free}"' for gpu in gpus]
    program = folder / "nvidia-smi"
    program.write_text(_SMI.format(rows="; ".join(rows), memory="; ".join(memory)))
    program.chmod(0o755)
    return folder


def main() -> int:
    """In place of the process that judges the control problem."""
    from verify.campaign.gpus import control_process
    from verify.campaign.leases import control

    right = control.product

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = right(a, b)
        c[17, 200] ^= 1
        return c

    late = False
    if LATER in os.environ:
        begun = Path(os.environ[LATER], f"{os.environ['CUDA_VISIBLE_DEVICES']}.begun")
        late = not begun.exists()
        begun.touch()
    if os.environ["CUDA_VISIBLE_DEVICES"] == BAD and not late:
        vars(control)["product"] = product
    sys.argv = ["control", *sys.argv[1:]]
    return control_process.main()


def pytest_configure(config: pytest.Config) -> None:
    """Make the GPU bad, in the first process and in the worker that has it."""
    from verify.campaign.gpus import watch
    from verify.campaign.judge import Judge
    from verify.evidence import Finding
    from verify.oracles import leading_oracle

    vars(watch)["_MODULE"] = __name__
    right = Judge._verdict

    def verdict(self: Judge, *given: Any, **named: Any) -> Any:
        said = right(self, *given, **named)
        if said.oracle == leading_oracle(said.group) and said.outcome == "pass":
            finding = Finding(oracle=said.oracle, message="the GPU is bad")
            said = replace(said, outcome="fail", finding=finding)
        return said

    has_it = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith(BAD)
    if has_it and hasattr(config, "workerinput"):
        setattr(Judge, "_verdict", verdict)  # noqa: B010
