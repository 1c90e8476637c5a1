"""Kernel files for tests of the cell: their entry point runs a given body in the kernel process."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.harness.laid import contents, damage, laid
from tests.hostile.kernels import hostile_base
from verify.cell.arena import Arena, plan
from verify.cell.arena_runs import Runs
from verify.cell.process import PLAIN_CPU, Cell, ForkServer, Reply
from verify.problem import Problem
from verify.problem.inputs import tensors

# As in production, but for Triton's interpreter, which takes a second to import.
ENVIRONMENT = replace(PLAIN_CPU, variables=(("CUDA_VISIBLE_DEVICES", ""),), patience=20.0)
PROBLEM = Problem(seqlen_q=4, seqlen_kv=4, head_dim=8, dtype="float32")
FILL = "out.fill_(1.0); lse.fill_(2.0)"
HEADER = f"""
import ctypes, os, signal, socket, struct, subprocess, sys, threading, time
import torch
from verify.variant import Contract, Numerics, Support, Unsupported, Variant

{inspect.getsource(hostile_base.sockets)}
def say(data):
    for fd in sockets():
        os.write(fd, data)

def framed(text):
    return struct.pack("<I", len(text)) + text.encode()

def forward(args, out, lse, workspace):
"""
FOOTER = """
VARIANT = Variant(
    name="kernel",
    family="torch",
    forward=forward,
    support=Support(dtypes=("float32",), head_dims=(8,)),
)
"""
Writer = Callable[..., Path]
WHERE = plan(PROBLEM, lse=True, workspace={})
REQUEST = {
    "variant": "kernel",
    "entry": "forward",
    "config": "default",
    "slots": WHERE.as_data(),
    "size": WHERE.size,
    "mask": "full",
    "softmax_scale": 1.0,
    "score_mod": "",
}


def kernel(body: str = FILL, before: str = "") -> str:
    """The text of a kernel file whose entry point has that body; `before` is put at its top."""
    indented = textwrap.indent(textwrap.dedent(body), "    ")
    return f"{textwrap.dedent(before)}{HEADER}{indented}\n{FOOTER}"


def run(cell: Cell, path: Path, arena: Arena | None = None) -> Reply:
    """The reply to one launch of the file, in that arena or a temporary one."""
    if arena is None:
        arena = Arena()
        try:
            return run(cell, path, arena)
        finally:
            arena.close()
    laid(arena, WHERE, tensors(PROBLEM).named)
    return cell.run(str(path), REQUEST, arena)


def process_of(fork_server: ForkServer) -> int:
    """The process id of the fork server."""
    assert fork_server._process is not None
    return fork_server._process.pid


def works(cell: Cell, path: Path, arena: Arena) -> bool:
    """Whether a kernel of `FILL` runs, and writes its outputs and nothing else."""
    runs = laid(arena, WHERE, tensors(PROBLEM).named)
    return cell.run(str(path), REQUEST, arena).ok and filled(runs)


def filled(runs: Runs) -> bool:
    """Whether that run's outputs are those of `FILL`, and nothing else was written."""
    right = bool((contents(runs, "out") == 1).all() and (contents(runs, "lse") == 2).all())
    return right and damage(runs) is None
