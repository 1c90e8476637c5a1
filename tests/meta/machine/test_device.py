"""The device: what a command reads of it before it runs anything."""

from __future__ import annotations

import subprocess
import sys

import torch

from verify.bundle import ROOT
from verify.machine import device


def test_no_torch_is_imported_to_name_the_device() -> None:
    """A command line does that first, and importing torch takes seconds."""
    program = """
import sys
from verify.machine import device
print(device.slug(), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [device.slug(), "False"]


def test_the_version_of_cuda_is_torchs() -> None:
    assert device.fingerprint()["cuda"] == torch.version.cuda
