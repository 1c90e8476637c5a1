"""Replayed programs of Triton's interpreter: the same bits as interpreted ones, and once each."""

import ast

import pytest

from tests.harness.interpreter_child import in_child

KERNELS = """
import sys
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from verify.cell import triton_interpreter_programs as programs
from verify.cell.triton_interpreter import repair
from verify.cell.triton_interpreter_replay import Tape

repair()
counts = [0, 0]
replay = Tape.replay

def counted(self, given):
    counts[0] += 1
    effects = replay(self, given)
    counts[1] += effects is not None
    return effects

Tape.replay = counted

@triton.jit
def doubled(x):
    return x + x

@triton.jit
def walk(x, lengths, out, scale, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for step in range(tl.load(lengths + row)):
        a = tl.load(x + row * N + (i + step) % N).to(tl.float32)
        total += tl.exp2(tl.where(a > 0, a, -a) * scale) / tl.sum(tl.abs(a), 0)
    if row % 3 == 1:
        total = doubled(total) - tl.max(total, 0)
    tl.store(out + row * N + i, total.to(out.dtype.element_ty), mask=i < N - 1)

@triton.jit
def counting(x, out, N: tl.constexpr):
    value = tl.load(x + tl.program_id(0))
    tl.atomic_add(out + value % 4, 1)
    for _ in range(value):  # another path after the program's effect
        tl.atomic_add(out + 4, value)

@triton.jit
def rereading(x, out, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    tl.store(out + row * N + i, tl.load(x + row * N + i) + 1)
    tl.store(out + row * N + i, tl.load(out + row * N + i) * 2)

@triton.jit
def elsewhere(x, out, total, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    for step in range(3):
        a = tl.load(x + row * N + (i + step) % N, mask=i < N - step, other=0.0)
        tl.atomic_add(total + i, a, mask=i < N - 2)
        tl.store(out + row * N + i, a * 2)

@triton.jit
def neighbours(x, out, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    tl.store(out + row * N + i, tl.load(x + row * N + i) * 3, mask=i < N - 1)
    tl.store(out + row * N + N - 1, tl.load(out + row * N + i - 1, mask=i == 1, other=0.0).sum())

@triton.jit
def blocks(x, out, rows, N: tl.constexpr):
    row = tl.program_id(0)
    source = tl.make_block_ptr(x, (rows, N), (N, 1), (row, 0), (2, 8), (1, 0))
    total = tl.zeros([2, 8], tl.float32)
    for _ in range(N // 8):
        total += tl.load(source, boundary_check=(0, 1)).to(tl.float32)
        source = tl.advance(source, (0, 8))
    target = tl.make_block_ptr(out, (rows, N), (N, 1), (row, 0), (2, 8), (1, 0))
    tl.store(target, tl.dot(total, tl.trans(total)).to(out.dtype.element_ty).reshape(2, 2)
        if N == 0 else total.to(out.dtype.element_ty), boundary_check=(0,))

@triton.jit
def described(source, target, N: tl.constexpr):
    row = tl.program_id(0)
    target.store([row, 0], source.load([row, 0]) * 2)

@triton.jit
def peeking(x, out, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    first = int(tl.load(x + row).handle.data.item())  # no language function reads it
    tl.store(out + row * N + i, i * 0 + first)

@triton.jit
def aligned(x, out, N: tl.constexpr):
    row = tl.program_id(0)
    view = tl.make_tensor_descriptor(x + row * 4 * (row < 6), [4, N], [N, 1], [1, N])
    tl.store(out + row * N + tl.arange(0, N), view.load([0, 0]).reshape(N))

@triton.jit
def late(x, lengths, out, rows, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    limit = rows * 3  # no path reads it but that of positive lengths
    total = tl.load(x + row * N + i) + rows * 2
    if tl.load(lengths + row) > 0:
        total = total + limit
    tl.store(out + row * N + i, total)

@triton.jit
def saying(x, N: tl.constexpr):
    tl.device_print("row", tl.load(x + tl.program_id(0)))
"""

SAME = """
def launched():
    found, generator = [], torch.Generator().manual_seed(20)
    def shown(out):
        return found.append(out.contiguous().view(torch.uint8).tolist())
    lengths = torch.tensor([3, 0, 3, 1, 3, 0, 0, 1, 3, 3, 0, 3], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(12, 16, generator=generator).to(dtype)
        for scale in (0.5, 1.5):
            out = torch.zeros_like(x)
            walk[(12,)](x, lengths, out, scale, 16)
            shown(out)
        for kernel, more in ((rereading, ()), (blocks, (11,))):
            out = torch.zeros_like(x)
            kernel[(12,)](x, out, *more, 16)
            shown(out)
        out = torch.zeros_like(x)
        described[(12,)](*(TensorDescriptor.from_tensor(each, [1, 16]) for each in (x, out)), 16)
        shown(out)
    values = torch.tensor([1, 5, 2, 0, 3, 1, 1, 2, 0, 0, 7, 5], dtype=torch.int32)
    out = torch.zeros(5, dtype=torch.int32)
    counting[(12,)](values, out, 16)
    shown(out)
    out = torch.zeros(12, 16, dtype=torch.int32)
    peeking[(12,)](values, out, 16)
    shown(out)
    return found

replayed = launched()
share = counts[1] / counts[0]
counts[:] = [0, 0]
x, out = torch.randn(12, 16), torch.zeros(12, 16)
described[(12,)](*(TensorDescriptor.from_tensor(each, [1, 16]) for each in (x, out)), 16)
counts == [12, 12] and torch.equal(out, 2 * x) or sys.exit(f"descriptors: {counts}")
launched() == replayed or sys.exit("another launch differs")
programs._WORTH = 1 << 30
Tape.replay = lambda self, given: None
launched() == replayed or sys.exit("interpreted programs differ")
print(share)
"""

ONCE = """
made = [0]
make_once = Tape._make_once

def counted_once(self, *given):
    made[0] += 1
    make_once(self, *given)

Tape._make_once = counted_once
x, lengths = torch.randn(14, 16), torch.tensor([0] * 6 + [1] * 8, dtype=torch.int32)
for rows in (5, 7):
    out = torch.zeros_like(x)
    late[(14,)](x, lengths, out, rows, 16)
    wanted = x + 2 * rows + 3 * rows * (lengths > 0)[:, None]
    torch.equal(out, wanted) or sys.exit(f"wrong for {rows}")
    print(*counts, *made)
"""

LATE = """
x = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
for kernel in (elsewhere, neighbours):
    counts[:] = [0, 0]
    out, total = torch.zeros(16, 16), torch.zeros(16)
    more = (total,) if kernel is elsewhere else ()
    kernel[(16,)](x, out, *more, 16)
    if kernel is elsewhere:
        shifted = torch.stack([torch.where(torch.arange(16) < 16 - n, x.roll(-n, 1), 0)
            for n in range(3)])
        wanted = 2 * shifted[2]
        sums = torch.zeros(16)
        for row in shifted.transpose(0, 1).flatten(0, 1):
            sums[:14] += row[:14]
        torch.equal(total, sums) or sys.exit("the sums differ")
    else:
        wanted = 3 * x
        wanted[:, 15] = wanted[:, 0]
    torch.equal(out, wanted) or sys.exit(f"{kernel} differs")
    print(*counts)
"""

ENDS = """
for kernel, given in ((aligned, ()), (aligned, ())):
    out = torch.zeros(8, 8)
    try:
        kernel[(8,)](torch.zeros(64, 8).flatten()[OFFSET:], out, 8)
        print("no error")
    except Exception as error:
        print(error)
saying[(6,)](torch.arange(6), 8)
"""


PARTS = {
    "once": ONCE,
    "late": LATE,
    "aligned": ENDS.replace("OFFSET", "0"),
    "not aligned": ENDS.replace("OFFSET", "1"),
    "same": "counts[:] = [0, 0]\n" + SAME,  # at the end, since it switches replays off
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each part has printed, of one process: to start it takes longer than all of them."""
    path = tmp_path_factory.mktemp("replay") / "parts.py"
    parts = (f"{text}\nprint('====', flush=True)\n" for text in PARTS.values())
    path.write_text(KERNELS + "".join(parts))
    done = in_child(str(path))
    texts = [text.strip("\n") for text in done.stdout.split("====\n")]
    assert done.returncode == 0, f"after {len(texts) - 1} parts: {done.stderr}"
    return dict(zip(PARTS, texts, strict=False))


def test_replayed_programs_compute_the_same_bits(printed):
    assert float(printed["same"]) > 0.5  # of the programs that were tried


def test_a_load_after_a_store_is_replayed_unless_it_reads_what_was_stored(printed):
    apart, same = (list(map(int, line.split())) for line in printed["late"].splitlines())
    assert apart == [15, 15]  # all but the first
    assert same == [1, 0]  # the second was given up, and the others not tried


def test_what_depends_on_arguments_alone_is_made_once_in_a_launch(printed):
    """And again when a path that is recorded later reads what none has read before: a replay of it
    would raise, and be interpreted."""
    # replays that were tried, those that were made, and how often a branch's steps were made once
    assert printed["once"].split("\n") == ["13 12 3", "27 26 5"]


@pytest.mark.parametrize(("part", "wanted"), [("aligned", "no error"), ("not aligned", "aligned")])
def test_replayed_programs_raise_and_print_as_interpreted_ones_do(part, wanted, printed):
    """A descriptor whose base is not aligned, in every program; and a line of each program."""
    lines = printed[part].splitlines()
    errors, printed_lines = lines[:2], lines[2:]
    assert all(wanted in each for each in errors), errors
    assert [ast.literal_eval(each.rpartition(" row")[0]) for each in printed_lines] == [
        (row, 0, 0) for row in range(6)
    ]
