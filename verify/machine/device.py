"""The device that a measurement comes from, as data that can be published.

The data holds models and versions, but no host names and no serial numbers.  The calling process
neither imports triton nor initialises CUDA: versions come from package metadata, the GPU from
nvidia-smi.  If the visible GPUs are of different models, a child process asks torch for device 0.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from verify.machine import other_triton
from verify.machine.cores import cores

_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,compute_cap,driver_version",
    "--format=csv,noheader",
)
_ASK_MEMORY = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
_WHOLE = r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a name, not the begin of one
_PATIENCE = 60.0  # seconds for a question to another program
_known: list[list[str]] | None = None
_ASK_TORCH = (
    "import torch; p = torch.cuda.get_device_properties(0); print(f'{p.name},{p.major}.{p.minor}')"
)


def fingerprint() -> dict[str, Any]:
    """The device, as slug, kind ("cuda" or "cpu"), name, capability, driver, cuda, torch, triton,
    numpy, python, platform and cores.

    A value is None if the machine does not have it.  The device is the first one that
    CUDA_VISIBLE_DEVICES leaves visible.  triton: that of kernel processes (VERIFY_TRITON).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return dict(_fingerprint(visible, other_triton.version()))


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
    """A CPU as a folder name, such as "cpu-intel-xeon-platinum-8481c".

    cpuinfo: the text of /proc/cpuinfo.  name: the CPU's name.  Trademark signs, clock rates and
    core counts are left out.  A virtual machine can hide the model ("Intel(R) Xeon(R) Processor").
    Then the numbers of family and model are added, since such CPUs are not all one device.
    """
    short = re.sub(_NOT_THE_MODEL, " ", name.lower())
    words = [slug_of(short)]
    if not re.search(r"\d", short):
        numbers = {
            key: re.search(rf"^{key}\s*:\s*(\w+)$", cpuinfo, re.MULTILINE)
            for key in ("cpu family", "model")
        }
        words += [f"{key.split()[-1]}-{match[1]}" for key, match in numbers.items() if match]
    return "-".join(["cpu", *words])


def ask_gpus() -> subprocess.Popen[str] | None:
    """Start nvidia-smi, which takes up to a second, for `know_gpus`; None if there is none."""
    try:
        return subprocess.Popen(
            _QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def know_gpus(asked: subprocess.Popen[str] | None) -> None:
    """Remember what `ask_gpus` finds out, for this process and its forks."""
    global _known
    said = ""
    if asked is not None:
        with asked:
            try:
                said = asked.communicate(timeout=_PATIENCE)[0]
            except subprocess.TimeoutExpired:
                asked.kill()
    _known = _rows(said)


def forget_gpus() -> None:
    """Ask again when they are needed: this process has become a program of its own, with other
    variables."""
    global _known
    _known = None


def gpus() -> list[str]:
    """The UUIDs of all GPUs of this machine, for CUDA_VISIBLE_DEVICES: CUDA and nvidia-smi number
    GPUs differently."""
    return [gpu[1] for gpu in _nvidia_smi()]


def models() -> dict[str, str]:
    """The names of this machine's GPUs, by their UUIDs."""
    return {gpu[1]: gpu[2] for gpu in _nvidia_smi()}


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order, as it may name them: by
    UUIDs, whatever it holds now.

    Without nvidia-smi, or for a number where the models differ, so that CUDA can number them
    otherwise, an entry stays as it is.  An entry that names nothing ends the list, as in CUDA.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return gpus()
    entries = [entry.strip() for entry in mask.split(",")]
    if all(re.fullmatch(_WHOLE, entry) for entry in entries):
        return entries
    rows = _nvidia_smi()
    alike = len({row[2] for row in rows}) < 2
    found = []
    for entry in entries:
        named = _visible(rows, entry)
        if not entry or entry.startswith("-") or (rows and not named):
            break
        plain = not named or entry.startswith("MIG-") or (entry.isdigit() and not alike)
        found.append(entry if plain else named[0][1])
    return found


def workers_for_all() -> str:
    """How many workers a session has that asks all there is, as `-n` takes it.  Without a GPU one
    more than cores: a tenth of its time is waiting, for deadlines and for processes."""
    return "auto" if visible_gpus() else str(cores() + 1)


def gpus_for(worker: str) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to hold in a worker of pytest-xdist ("gw0", "gw1"...), so that
    workers have different GPUs: its own comes first, and it sees the others behind it.

    The GPUs are those that the variable names now, or all.  None: it stays as it is.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not worker.startswith("gw") or (mask is not None and "," not in mask):
        return None
    devices = visible_gpus()
    if len(devices) < 2:
        return None
    own = devices.pop(int(worker[2:]) % len(devices))
    return ",".join([own, *devices])


def own() -> str:
    """The GPU that this process uses, the first visible one, by its UUID; "" if there is none, or
    no nvidia-smi that knows it."""
    found = visible_gpus()
    return found[0] if found and gpus() else ""


def uuid() -> str | None:
    """The UUID of the first GPU that CUDA_VISIBLE_DEVICES leaves visible, or None."""
    visible = _visible(_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return visible[0][1] if visible else None


def free_memory() -> dict[str, int]:
    """Bytes of memory that are free on each GPU of this machine, by its UUID; without those of
    which nvidia-smi does not tell it.  No process gets a CUDA context for the question."""
    rows = [line.split(",") for line in (_output(_ASK_MEMORY) or "").splitlines()]
    return {
        row[0].strip(): int(row[1]) << 20
        for row in rows
        if len(row) == 2 and row[1].strip().isdigit()
    }


@cache
def _fingerprint(visible: str | None, triton: str | None) -> dict[str, Any]:
    cuda = _cuda_version()
    gpu = _gpu(visible) if cuda else None
    device = gpu or {"kind": "cpu", "name": _cpu_name(), "capability": None, "driver": None}
    versions = {"torch": _version("torch"), "triton": triton, "numpy": _version("numpy")}
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
    """The CUDA that torch was built for.

    It stands in a small file of torch's, which is read alone: importing torch takes two seconds.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else Path()
    if file.is_file():
        version = runpy.run_path(str(file)).get("cuda")
    else:
        import torch

        version = torch.version.cuda
    return None if version is None else str(version)


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_name() -> str:
    """The CPU's name from /proc/cpuinfo, from lscpu (for Arm), or else the machine type."""
    for text, key in ((_cpuinfo(), "model name"), (_output(("lscpu",)) or "", "Model name")):
        match = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
        if match and match[1].strip(" -"):
            return match[1].strip()
    return platform.processor() or platform.machine()


def _gpu(visible: str | None) -> dict[str, Any] | None:
    gpus = _visible(_nvidia_smi(), visible)
    if not gpus:
        return None
    name, capability, driver = gpus[0][2:]
    # CUDA lists the fastest GPU first, nvidia-smi sorts by PCI address.
    if len({gpu[2] for gpu in gpus}) > 1:
        name, capability = (
            (_output((sys.executable, "-c", _ASK_TORCH)) or f"{name},{capability}")
            .strip()
            .rsplit(",", 1)
        )
    return {"kind": "cuda", "name": name, "capability": capability, "driver": driver}


def _nvidia_smi() -> list[list[str]]:
    return _rows(_output(_QUERY)) if _known is None else _known


def _rows(said: str | None) -> list[list[str]]:
    rows = [[part.strip() for part in line.split(",")] for line in (said or "").splitlines()]
    return [row for row in rows if len(row) == 5]


def _visible(gpus: list[list[str]], visible: str | None) -> list[list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order, up to the first invalid entry, as in
    CUDA."""
    if visible is None:
        return gpus
    selected = []
    for entry in visible.split(","):
        name = entry.strip()
        matching = [
            gpu
            for gpu in gpus
            if gpu[0] == name or (name.startswith("GPU-") and gpu[1].startswith(name))
        ]
        if name.startswith("MIG-"):
            matching = gpus[:1]
        if len(matching) != 1:
            break
        selected += matching
    return selected


def _output(command: tuple[str, ...]) -> str | None:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout
