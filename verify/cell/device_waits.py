"""How a kernel process and the judge wait for their GPU.

CUDA's own choice is to spin as long as there are at least as many cores as contexts.  Where sixteen
kernel processes share sixteen cores with sixteen judges, each spinning wait takes a core from a
judge.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

from verify.machine.settings import BLOCKING_WAITS

_CU_CTX_SCHED_BLOCKING_SYNC = 4  # cuda.h


@cache
def choose() -> None:
    """Let this process sleep while it waits for its device, if VERIFY_BLOCKING_WAITS says so.
    Raises RuntimeError if the driver refuses."""
    if os.environ.get(BLOCKING_WAITS) != "1" or not torch.cuda.is_available():
        return
    cuda = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    status = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxSetFlags_v2(device, _CU_CTX_SCHED_BLOCKING_SYNC)
    )
    if status:
        raise RuntimeError(f"the driver does not let a process sleep while it waits: {status}")
