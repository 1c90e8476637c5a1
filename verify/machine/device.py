"""Which device a measurement is from, as data fit to be published: models and versions; no names of
hosts, no serial numbers.

The calling process neither imports triton nor initialises CUDA: versions come from package
metadata, the GPU from nvidia-smi.  Only where the visible GPUs differ in model does a child process
ask torch which one is device 0.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from verify.machine.cores import cores

_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,compute_cap,driver_version",
    "--format=csv,noheader",
)
_ASK_TORCH = (
    "import torch; p = torch.cuda.get_device_properties(0); print(f'{p.name},{p.major}.{p.minor}')"
)


def fingerprint() -> dict[str, Any]:
    """slug, kind ("cuda" or "cpu"), name, capability, driver, cuda, torch, triton, numpy, python,
    platform, cores.

    What does not exist on this machine is None.  The device is the first one that
    CUDA_VISIBLE_DEVICES leaves visible.
    """
    return dict(_fingerprint(os.environ.get("CUDA_VISIBLE_DEVICES")))


def slug() -> str:
    """The folder name of this machine's device: "nvidia-h100-80gb-hbm3", "cpu-amd-epyc-7b13"."""
    return str(fingerprint()["slug"])


def slug_of(name: str) -> str:
    """A device name as a folder name: "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-") or "unknown"


_NOT_THE_MODEL = (
    r"\((?:r|tm|c)\)|[®™]|\b(?:cpu|processor)\b|@.*|\b[\w-]+-core\b|\b(?:with|w/) .*|\b\d+th gen\b"
)


def cpu_slug(cpuinfo: str, name: str) -> str:
    """A CPU as a folder name, from /proc/cpuinfo and the name that it gives:
    "cpu-intel-xeon-platinum-8481c".

    Marks, clock rates and core counts are left out.  A virtual machine may hide the model
    ("Intel(R) Xeon(R) Processor"): then the numbers of family and model stand for it, because not
    all of those are one device.
    """
    short = re.sub(_NOT_THE_MODEL, " ", name.lower())
    words = [slug_of(short)]
    if not re.search(r"\d", short):
        numbers = {
            key: re.search(rf"^{key}\s*:\s*(\w+)$", cpuinfo, re.MULTILINE)
            for key in ("cpu family", "model")
        }
        words += [f"{key.split()[-1]}-{found[1]}" for key, found in numbers.items() if found]
    return "-".join(["cpu", *words])


def gpus() -> list[str]:
    """All GPUs of this machine as CUDA_VISIBLE_DEVICES takes them, by UUID: CUDA and nvidia-smi
    number them differently."""
    return [gpu[1] for gpu in _nvidia_smi()]


@cache
def _fingerprint(visible: str | None) -> dict[str, Any]:
    cuda = _cuda_version()
    gpu = _gpu(visible) if cuda else None
    device = gpu or {"kind": "cpu", "name": _cpu_name(), "capability": None, "driver": None}
    versions = {package: _version(package) for package in ("torch", "triton", "numpy")}
    return {
        "slug": slug_of(device["name"]) if gpu else cpu_slug(_cpuinfo(), device["name"]),
        **device,
        "cuda": cuda,
        **versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    """The CUDA that torch was built for; reading it does not initialise CUDA."""
    import torch

    version = torch.version.cuda
    return None if version is None else str(version)


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_name() -> str:
    """The model's name: from /proc/cpuinfo, from lscpu where that has none (Arm), or the kind of
    machine."""
    for told, key in ((_cpuinfo(), "model name"), (_output(("lscpu",)) or "", "Model name")):
        found = re.search(rf"^{key}\s*:\s*(.+)$", told, re.MULTILINE)
        if found and found[1].strip(" -"):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _gpu(visible: str | None) -> dict[str, Any] | None:
    gpus = _visible(_nvidia_smi(), visible)
    if not gpus:
        return None
    name, capability, driver = gpus[0][2:]
    # CUDA numbers the fastest first, nvidia-smi by PCI address
    if len({gpu[2] for gpu in gpus}) > 1:
        name, capability = (
            (_output((sys.executable, "-c", _ASK_TORCH)) or f"{name},{capability}")
            .strip()
            .rsplit(",", 1)
        )
    return {"kind": "cuda", "name": name, "capability": capability, "driver": driver}


def _nvidia_smi() -> list[list[str]]:
    rows = [
        [part.strip() for part in line.split(",")] for line in (_output(_QUERY) or "").splitlines()
    ]
    return [row for row in rows if len(row) == 5]


def _visible(gpus: list[list[str]], visible: str | None) -> list[list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, stop at the first entry
    that names none."""
    if visible is None:
        return gpus
    chosen = []
    for entry in visible.split(","):
        wanted = entry.strip()
        found = [
            gpu
            for gpu in gpus
            if gpu[0] == wanted or (wanted.startswith("GPU-") and gpu[1].startswith(wanted))
        ]
        if wanted.startswith("MIG-"):
            found = gpus[:1]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _output(command: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
