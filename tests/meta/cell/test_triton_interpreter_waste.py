"""Triton's repaired interpreter: it computes the same bits without its waste, and says what
it cannot repair."""

import pytest

from tests.harness.interpreter_child import in_child

# numpy warns where a cast meets NaN or overflows, as the inputs here mean to.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning"
)

# A device function of its own and one of Triton's, integers that wrap around, other dtypes.
WASTE = """
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from verify.cell.triton_interpreter import repair

@triton.jit
def half(x):
    return x // 2 + tl.sum(x.to(tl.int64)).to(x.dtype)

@triton.jit
def wrap(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0)
    for _ in range(3):
        a = half((a.to(tl.int32) * 65537) + i) - n
    tl.store(out + i, a.to(x.dtype.element_ty))

@triton.jit
def outer(x, out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    a = tl.load(x + i[:, None] * 2 + j[None, :])  # two axes of size 1, then a scalar, then a row
    seen = (i[:, None] < n) & (j[None, :] >= 1)
    a = tl.where(seen, a * 3, a + i[:, None].to(a.dtype)) - j.to(a.dtype)
    tl.store(out + i[:, None] * COLUMNS + j[None, :], a.to(x.dtype.element_ty))

@triton.jit
def mixed(x, y, out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    row = x + i * 2
    a = tl.load(row + j) * tl.load(j + row) + tl.load(row + j.to(tl.uint32))  # pointers, and i - -1
    a += tl.load(row + 3 - (3 - j))
    a += (i - -1) * ((i < j) | (j >= 3) & (i != 2) ^ (j == 1)) + (j <= i) * (i > 3)
    for r in tl.static_range(2):  # worked out once for each pair of types, and then remembered
        wide = (i.to(tl.int64) * 3 + j) * 2.5 - n
        a = tl.where(i + r < j, a * 1.5, a + y) + tl.where(j == r, -0.0, 1 / (i + 1.0))
        a = tl.minimum(tl.maximum(a, y), wide * 1e-42) + (n - i) // 3 % 5 + (5 - y) / 2
        a = tl.fma(a, y, i.to(a.dtype)) + tl.clamp(a, -1.0, 1.0)
        a += tl.where(n > 3, float("inf"), j) * (i == 7)
        a += tl.where(j < 2, (i << 1) ^ (-1 - j) & 7, a)
    tl.store(out + (i * COLUMNS + j), a.to(x.dtype.element_ty), mask=(j - n < r) & (i < 8))

@triton.jit
def mismatched(out):
    tl.store(out + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))

def refused():
    try:
        mismatched[(1,)](torch.zeros(8))
    except Exception as error:
        return str(error)

def launched():
    found = [refused()]
    assert "incompatible dimensions" in found[0], found
    whole = (torch.int8, torch.int32, torch.int64)
    for dtype in (*whole, torch.float16, torch.float32, torch.float64):
        x = torch.arange(-32, 32).mul(2**24 + 1 if dtype.itemsize > 2 else 1).to(dtype)
        out = torch.empty_like(x)
        wrap[(2,)](x, out, 60, 64)
        found.append(out.view(torch.uint8).tolist())
        outer[(1,)](x, out, 5, 8, 8)
        found.append(out.view(torch.uint8).tolist())
        for y in (2, 2**31, 2**40, 0.5, -0.0, 1e-300, float("nan")):
            mixed[(1,)](x, y, out, 5, 8, 8)
            found.append(out.view(torch.uint8).tolist())
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
    return found

count, patch = [0], interpreter._patch_builtin
interpreter._patch_builtin = lambda *arguments: (count.append(1), patch(*arguments))[1]
stock, before = launched(), len(count)
repair()
assert launched() == launched() == stock
print((len(count) - before) / before / 2)
"""


@pytest.mark.for_ci
def test_without_its_waste_it_computes_the_same_bits(tmp_path):
    (tmp_path / "waste.py").write_text(WASTE)
    done = in_child(str(tmp_path / "waste.py"))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5  # of the patches of its language


def test_refuses_without_interpreter_mode():
    done = in_child(
        "-c", "from verify.cell.triton_interpreter import repair; repair()", interpret="0"
    )
    assert "TRITON_INTERPRET=1" in done.stderr


def test_names_the_internals_that_differ():
    break_it = (
        "import triton.runtime.interpreter as t; del t.InterpreterBuilder.cast_impl;"
        " t._get_np_dtype = lambda x: x; "
    )
    done = in_child("-c", break_it + "from verify.cell.triton_interpreter import repair; repair()")
    assert "RuntimeError" in done.stderr
    assert "no InterpreterBuilder.cast_impl" in done.stderr
    assert "_get_np_dtype(x), expected (tt_dtype)" in done.stderr
