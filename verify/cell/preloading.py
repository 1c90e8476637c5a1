"""What a fork server imports before it forks kernel processes, so that none of these does."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Sequence
from importlib import import_module

import torch

from verify.cell.sources import know_modules

TRITON_COMPILER = "triton-compiler"  # as `fork_server.Environment.preloads` names it


def preload(further: Sequence[str] = ()) -> None:
    """Prepare this process for its kernels: one torch thread and, if Triton interprets, the
    repaired interpreter and Gluon.  Where its modules lie is found out once.

    further: TRITON_COMPILER, for kernel processes that compile Triton kernels.
    """
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=_renew_thread_pool)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from verify.cell.triton_interpreter import repair

        with contextlib.suppress(ImportError):
            repair()
            import_module("triton.experimental.gluon")  # as files of both languages do
    if TRITON_COMPILER in further:
        _triton_compiler()
    know_modules()
    # Imported objects stay: garbage collection in a kernel process need not visit them.
    gc.collect()
    gc.freeze()


def _renew_thread_pool() -> None:
    """Make torch's pool of threads anew, which a fork has left without threads.

    Otherwise the first thread that asks for the pool makes it, without a lock, and a second one
    that asks meanwhile ends the process ("Invalid thread pool!").  A backward of autograd starts a
    thread for each GPU at once (https://github.com/pytorch/pytorch/issues/178535).
    """
    torch.set_num_threads(torch.get_num_threads())


def _triton_compiler() -> None:
    """Do once what the first build of each kernel process would do: torch imports its own compiler
    when a "meta" tensor of numbers is made (1.6 s of CPU time), and Triton hashes its own files
    (0.3 s)."""
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
        torch.arange(1, device="meta")
