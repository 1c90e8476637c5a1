"""The bound's kernels for a GPU: compiled for every architecture, and run on the CPU's threads
beside torch's steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from references.row_blocks import RowBlock, row_blocks
from tests.harness.declared import flat_numerics
from tests.harness.host_library import host_library, runs
from verify.cuda.compile import LaunchError, compilable, compile_source
from verify.cuda.edits import Edit
from verify.problem import Problem
from verify.problem.inputs import dequantised, tensors
from verify.tolerance import row_pass, weights
from verify.tolerance.forward import bound, resolve
from verify.tolerance.row_pass import SOURCE, THREADS, Linear, proved, source
from verify.tolerance.scratch import room_on
from verify.tolerance.weights import Weights, weights_of
from verify.variant import Config, compiled_archs

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ENTRIES = "largest_errors", "moved_weights"
PROBLEMS = (
    "sq=3,skv=1,d=16,dtype=float16",
    "hq=2,sq=5,skv=255,d=40,dtype=bfloat16,mask=causal,dist=outliers",
    "b=2,sq=4,skv=257,d=64,dtype=float16,mask=window.100.3",
    "sq=4,skv=700,d=64,dtype=float32,mask=lengths.2.300,dist=sink",
    "sq=4,skv=512,d=64,dtype=bfloat16,scale=0.0",
)


@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.parametrize("arch", compiled_archs())
def test_the_kernels_compile_without_a_spill(arch: str) -> None:
    for entry in ENTRIES:
        assert compile_source(source(entry), arch).resources.spill_stores == 0


class Host:
    """Runs the kernels on the CPU."""

    def __init__(self, folder: Path, edit: Callable[[str], str] = lambda text: text) -> None:
        self.libraries = {}
        for entry in ENTRIES:
            kernel = folder / f"{entry}.cu"
            text = edit(SOURCE.read_text(encoding="utf-8"))
            kernel.write_text(f'#include "block.h"\n{text}', encoding="utf-8")
            self.libraries[entry] = host_library(kernel, entry, source(entry).defines)
        self.launches = 0
        self.backwards = True  # the last warp goes first

    def launch(self, entry: str, linear: Linear, given: dict[str, Tensor]) -> None:
        """In place of `row_pass._launch`."""
        arguments = row_pass._arguments(linear, given)
        shape = given["largest"].numel(), THREADS, 8 * THREADS, self.backwards, False
        error = self.libraries[entry].run(ctypes.byref(arguments), *shape, (ctypes.c_long * 2)())
        assert not error, error.decode()
        self.launches += 1


@pytest.fixture(scope="module", name="host")
def _host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("row_pass"))


def twice(
    problem: Problem, host: Host, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RowBlock, str]]:
    """A problem's only block, by steps and then in one pass, with a name for its memory."""
    monkeypatch.setattr(row_pass, "_launch", host.launch)
    for usable in (False, True):
        monkeypatch.setattr(row_pass, "usable", lambda pairs, usable=usable: usable)
        (block,) = row_blocks(*dequantised(problem, tensors(problem)), problem.attention)
        yield block, f"row pass {usable}"


def both(text: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """The weights of a problem's only block by steps, and in one pass."""
    problem = Problem.parse(text)
    a = resolve(flat_numerics(), Config(), problem, "sm_90a")
    return [
        weights_of(block, a, problem, bool(block.visible.all()), room_on(CPU, memory))
        for block, memory in twice(problem, host, monkeypatch)
    ]


def differences(steps: Weights, one_pass: Weights) -> list[str]:
    """Where they differ by more than fp64 loses on the way."""
    found = []
    for each in fields(Weights):
        want, got = getattr(steps, each.name), getattr(one_pass, each.name)
        if isinstance(want, Tensor) and not torch.allclose(want, got, 1e-12, 0.0, equal_nan=True):
            found.append(each.name)
    least = one_pass.upper.amin(-1, keepdim=True)
    if one_pass.least is not None and not torch.equal(one_pass.least, least):
        found.append("least")
    return found


@runs
@pytest.mark.parametrize("text", PROBLEMS)
def test_one_pass_finds_what_the_steps_find(
    text: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.launches
    steps, one_pass = both(text, host, monkeypatch)
    assert host.launches == before + 2
    assert one_pass.least is not None
    assert steps.least is None
    assert differences(steps, one_pass) == []


@runs
def test_no_kernel_is_used_before_it_is_proved(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pass, "_launch", host.launch)
    assert proved.__wrapped__(CPU)

    def refuses(*of: object) -> None:
        raise LaunchError("no")

    monkeypatch.setattr(row_pass, "_launch", refuses)
    assert not proved.__wrapped__(CPU)


@runs
def test_a_bound_is_the_same(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse("hq=2,sq=6,skv=300,d=64,dtype=bfloat16,mask=causal")
    a = resolve(flat_numerics(), Config(), problem, "sm_90a")
    bounds = [bound(block, a, problem) for block, _ in twice(problem, host, monkeypatch)]
    assert torch.allclose(bounds[0].out, bounds[1].out, 1e-12, 0.0)
    assert torch.allclose(bounds[0].lse, bounds[1].lse, 1e-12, 0.0)


@runs
def test_what_is_not_linear_or_moves_far_goes_by_steps(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, text, launches in (
        ({"scores": "input"}, "sq=3,skv=40,d=16,dtype=float16", 0),
        ({"accumulator": "float16"}, "sq=3,skv=40,d=16,dtype=float16", 0),
        ({}, "sq=3,skv=40,d=16,dtype=float16,softcap=20", 0),
        ({}, "sq=3,skv=40,d=16,dtype=float32,dist=range_edges,seed=5", 2),
    ):
        problem = Problem.parse(text)
        a = resolve(flat_numerics(**changes), Config(), problem, "sm_90a")
        monkeypatch.setattr(row_pass, "usable", lambda pairs: True)
        monkeypatch.setattr(row_pass, "_launch", host.launch)
        (block,) = row_blocks(*dequantised(problem, tensors(problem)), problem.attention)
        before = host.launches
        found = weights_of(block, a, problem, True, room_on(CPU))
        assert host.launches == before + launches, changes
        assert found.least is None, changes
        assert float(found.largest.max()) > weights.DIRECT or not launches


SLIPS = {
    "common counts twice": Edit(r"error \+ common;", "error + 2 * common;"),
    "a masked score has a size": Edit(r"size > largest_number \? 0 : size", "size > 9 ? 9 : size"),
    "half of the threads count": Edit(r"threads / 2; half > 0", "threads / 4; half > 0"),
    "the last halving is left out": Edit(r"half > 0; half /= 2", "half > 1; half /= 2"),
    "no barrier between halvings": Edit(r"(?m)^        __syncthreads\(\);\n", ""),
    "a thread takes its neighbour's key": Edit(r"first \+ threadIdx\.x; at", "first + 1; at", 2),
    "the first row is every row": Edit(r"first = row \* given\.keys", "first = 0", 2),
    "P by exp": Edit(r"grown = growth \* p", "grown = (growth + 1) * p"),
    "the sum grows": Edit(r"p / \(growth \+ 1\)", "p * (growth + 1)"),
}


@runs
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_a_kernel_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(text: str) -> str:
        return SLIPS[name].apply({"": text})[""]

    host, seen, held = Host(tmp_path, edit), [], []
    for host.backwards in (True, False):
        steps, one_pass = both(PROBLEMS[1], host, monkeypatch)
        seen += differences(steps, one_pass)
        held.append(proved.__wrapped__(CPU))
    assert seen
    assert not all(held)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_gpu_finds_what_its_steps_find(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse(f"sq=1024,skv=8192,d=64,dtype=bfloat16,mask={mask}")
    a = resolve(flat_numerics(), Config(), problem, "sm_90a")
    inputs = [x.cuda() for x in dequantised(problem, tensors(problem))]
    found = []
    for worthwhile in (1 << 40, row_pass.WORTHWHILE):
        monkeypatch.setattr(row_pass, "WORTHWHILE", worthwhile)
        (block,) = row_blocks(*inputs, problem.attention)
        full = bool(block.visible.all())
        found.append(weights_of(block, a, problem, full, room_on(block.scores.device)))
    assert found[1].least is not None
    assert differences(*found) == []
