"""Delays at the barriers of Triton's kernels: where they stand in the PTX, who sleeps, and that
ptxas takes them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kernels.triton.compile import compilable, compiled
from tests.planted import tiny_gluon
from verify.cuda.sass import listing
from verify.cuda.toolkit import executables
from verify.sanitizers import delays, triton_delays
from verify.sanitizers.delays import Delays, extra_bytes
from verify.sanitizers.skew import SEEDS
from verify.sanitizers.triton_delays import TritonDelays, delayed, most

torch.set_num_threads(1)

ARRIVAL = """\
	// begin inline asm
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 1;
	// end inline asm
	add.s32 %r2, %r3, 1; // before the bar.sync of the next block
	barrier.cluster.arrive.aligned;
"""
WAITS = (
    "\tbar.sync \t0;\n",
    "\tbarrier.sync.aligned 1, 128;\n",
    "\tbar.warp.sync -1;\n",
    "\tcp.async.wait_group 0;\n",
    "\tbarrier.cluster.wait.aligned;\n",
    """\
	// begin inline asm
	{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;
	@!complete bra.uni waitLoop;
	}
	// end inline asm
""",
    """\
	// begin inline asm
	wgmma.wait_group.sync.aligned 0;
	// end inline asm
""",
)


def without_sleeps(ptx: str) -> str:
    return "".join(line for line in ptx.splitlines(True) if "%dynamic_smem_size" not in line)


def test_each_wait_has_a_sleep_before_and_behind_it() -> None:
    for wait in WAITS:
        text, count = delayed(ARRIVAL + wait + ARRIVAL)
        assert count == 1
        before, inside, behind = re.split(r"\t\{ \.reg [^\n]*\n", text)
        assert (before, inside, behind) == (ARRIVAL, wait, ARRIVAL)
    whole, count = delayed("".join(WAITS))
    assert count == len(WAITS)
    assert without_sleeps(whole) == "".join(WAITS)
    sleeps = [line for line in whole.splitlines() if "nanosleep" in line]
    assert len(set(sleeps)) == 2 * len(WAITS)  # each place has a hash of its own


def test_what_only_arrives_does_not_sleep() -> None:
    assert delayed(ARRIVAL) == (ARRIVAL, 0)


# Who sleeps, and how long.


def slept(line: str, seed: int, block: int, thread: int) -> int:
    """The nanoseconds that a thread sleeps at a place: the line, instruction by instruction."""
    registers = {"%dynamic_smem_size": seed, "%ctaid.x": block, "%tid.x": thread}
    acts = {
        "mov.u32": lambda a: a,
        "shl.b32": lambda a, b: a << b,
        "shr.u32": lambda a, b: a >> b,
        "add.u32": lambda a, b: a + b,
        "xor.b32": lambda a, b: a ^ b,
        "and.b32": lambda a, b: a & b,
        "mul.lo.u32": lambda a, b: a * b,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "setp.eq.u32": lambda a, b: int(a == b),
    }
    for part in line.strip(" \t{}").split(";"):
        name, _, words = part.strip().partition(" ")
        if name == "@%vp":
            operand = words.split()[1]
            return registers[operand] if registers["%vp"] else 0
        if name in acts:
            into, *operands = (word.strip() for word in words.split(","))
            values = [registers[o] if o in registers else int(o) for o in operands]
            registers[into] = acts[name](*values) % (1 << 32)
    raise AssertionError("no sleep")


def as_in_cuda(seed: int, place: int, block: int, thread: int) -> int:
    """The sleep that `delays.BEFORE` gives a CUDA kernel."""
    x = 0x9E3779B9 * seed + 0x85EBCA6B * place + 0xC2B2AE35 * (64 * block + thread // 32)
    x %= 1 << 32
    x = (x ^ x >> 16) * 0x7FEB352D % (1 << 32)
    x = (x ^ x >> 15) * 0x846CA68B % (1 << 32)
    x ^= x >> 16
    return 0 if x % 4 else x >> 20


def test_warps_sleep_as_those_of_cuda_kernels() -> None:
    for words in ("0x9e3779b9u", "0x85ebca6bu", "0xc2b2ae35u", "0x7feb352du", "0x846ca68bu"):
        assert words in delays.BEFORE
    sleeps = [line for line in delayed("".join(WAITS))[0].splitlines() if "nanosleep" in line]
    asleep = 0
    for place, line in enumerate(sleeps):
        for seed in (57344, 57344 + extra_bytes(3)):
            for block in (0, 5):
                for thread in (0, 31, 96):
                    nanoseconds = slept(line, seed, block, thread)
                    assert nanoseconds == as_in_cuda(seed, place, block, thread) < 4096
                    asleep += nanoseconds > 0
    assert 0 < asleep < 2 * 2 * 3 * len(sleeps)


# A build and a launch.


@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.skipif(not executables("nvdisasm"), reason="no nvdisasm")
@pytest.mark.long(4)
def test_triton_builds_a_kernel_with_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "ordinary"))
    tensors = [torch.empty(300, tiny_gluon.COLUMNS, device="meta") for _ in range(2)]
    launch = tiny_gluon.launch_of("planted-gluon-early-copy-read", *tensors)
    ordinary = compiled(launch, "sm_90a")
    made = TritonDelays(lambda shared: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "delayed"))
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope():
        triton.knobs.runtime.add_stages_inspection_hook = made.stages
        triton.knobs.compilation.listener = made.built
        slow = compiled(launch, "sm_90a")
    assert without_sleeps(slow.asm["ptx"]) == ordinary.asm["ptx"]
    waits = delayed(ordinary.asm["ptx"])[1]
    assert waits > 0
    assert listing(slow.asm["cubin"]).count("NANOSLEEP") == 2 * waits
    assert "NANOSLEEP" not in listing(ordinary.asm["cubin"])
    assert made._delayed == {slow.metadata.hash}


def test_a_launch_with_a_seed_has_more_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "_room", lambda: 200_000)
    small, large, full = 20_000, 150_000, 199_900
    assert (most(small, 200_000), most(large, 200_000)) == (49_152, 200_000)
    source: Any = SimpleNamespace(seed=0, more=lambda shared, room: 0)
    assert Delays.more_for_triton(source, small) == 0
    for seed in SEEDS:
        source = SimpleNamespace(
            more=lambda shared, room, seed=seed: min(extra_bytes(seed), max(room - shared, 0))
        )
        added = [Delays.more_for_triton(source, shared) for shared in (small, large, full)]
        assert added == [min(extra_bytes(seed), room) for room in (29_152, 50_000, 100)]
    made = TritonDelays(lambda shared: 7)
    given = (1, 1, 1, "stream", "function", (4, 1, small), "metadata", None, None, "argument")
    assert made.given(given)[5] == (4, 1, small + 7)
    assert made.given(given)[:5] + made.given(given)[6:] == given[:5] + given[6:]
    assert triton_delays._KEY in made.stages()[0]  # type: ignore[index]


def test_launches_of_kernels_with_delays_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(CudaLauncher, "__init__", lambda self, source, metadata: None)
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *given: seen.append(given[5]))
    made = TritonDelays(lambda shared: 1024)
    made._delayed.add("with")
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope():
        made.install()
        for build in ("with", "without", "with"):
            launcher = CudaLauncher(None, SimpleNamespace(hash=build))
            launcher(1, 1, 1, 0, 0, (4, 1, 100), None, None, None)
    assert made.launches == 2
    assert seen == [(4, 1, 1124)] * 3
