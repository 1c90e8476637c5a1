"""Which GPUs a session uses, and how many workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from verify.campaign.gpus import state
from verify.machine import device
from verify.machine.cores import cores
from verify.machine.places import mps_pipes

_MASK = "CUDA_VISIBLE_DEVICES"
_WORKER_MEMORY = 3 << 30  # bytes of GPU memory that a worker and its cells can need
_MPS_CLIENTS = 48  # contexts that a GPU has under NVIDIA's MPS, since Volta
# Of a worker: its judge, its kernel process, and those that it has ready.  14 workers took all 48.
_CONTEXTS = 4


class NoGpuError(Exception):
    """Every visible GPU is quarantined in this run; the message is one line."""


def leave_out(run: Path) -> None:
    """Hide the GPUs that this run has quarantined, and those of another model than the first one's,
    whose evidence would bear its name.  Evidence of the former is taken out of the run.

    Call it before this process uses CUDA.  Raises NoGpuError.
    """
    state.take_out(run)
    bad = state.quarantined(run)
    visible = device.visible_gpus()
    models = device.models()
    kept = [gpu for gpu in visible if gpu not in bad]
    if len({models.get(gpu) for gpu in kept}) > 1:
        kept = [gpu for gpu in kept if models.get(gpu) == device.fingerprint()["name"]]
    if visible and not kept:
        raise NoGpuError(
            f"run {run.name} has quarantined every visible GPU: begin another run, with another id"
        )
    if kept != visible:
        os.environ[_MASK] = ",".join(kept)


def place_workers() -> int:
    """Workers for `-n auto`: the number of cores, or fewer if the GPUs' free memory is not enough,
    or the contexts that MPS gives out.

    GPUs whose memory others use are hidden from the session, if it can have more workers without
    them: workers are dealt out to GPUs in turn.
    """
    if not torch.cuda.is_available():
        return cores()
    visible = device.visible_gpus()
    free = device.free_memory()
    if not visible or not all(gpu in free for gpu in visible):
        count = torch.cuda.device_count()
        rooms = [_room(torch.cuda.mem_get_info(index)[0]) for index in range(count)]
        return max(1, dealt(rooms, cores()))
    chosen, workers = roomy({gpu: _room(free[gpu]) for gpu in visible}, cores())
    if chosen != visible:
        os.environ[_MASK] = ",".join(chosen)
    return workers


def _room(free: int) -> int:
    """How many workers a GPU with so many free bytes has room for."""
    room, under_mps = free // _WORKER_MEMORY, (mps_pipes() / "control").exists()
    return min(room, _MPS_CLIENTS // _CONTEXTS) if under_mps else room


def roomy(rooms: Mapping[str, int], most: int) -> tuple[list[str], int]:
    """The GPUs that have room for most workers, at most `most`, dealt out in turn; and how many, at
    least one.

    rooms: how many workers each has room for.
    """
    choices = []
    for least in sorted(set(rooms.values())):
        gpus = [gpu for gpu, room in rooms.items() if room >= least]
        choices.append((dealt([rooms[gpu] for gpu in gpus], most), len(gpus), gpus))
    workers, _, gpus = max(choices, key=lambda choice: choice[:2])
    return gpus, max(1, workers)


def dealt(rooms: Sequence[int], most: int) -> int:
    """How many workers can be dealt out in turn, at most `most`, until one GPU has no room."""
    count = len(rooms)
    return min([most, *(room * count + number for number, room in enumerate(rooms))])
