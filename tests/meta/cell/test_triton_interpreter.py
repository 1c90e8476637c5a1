"""Triton's repaired interpreter: its casts, dots and comparisons equal the hardware's; torch and
ml_dtypes give the expected values.

The kernels run in a child process, so that this one never imports triton in interpreter mode.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.harness.interpreter_child import in_child
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.rounding import cast

# numpy warns where a cast meets NaN or overflows, as the inputs here mean to.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning"
)

KERNELS = """
import sys
import numpy as np
import torch
import triton
import triton.language as tl
from verify.cell.triton_interpreter import repair

torch.set_num_threads(1)
names = repair()
assert repair() == names

@triton.jit
def cast(x, y, n, BLOCK: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(y + i, value.to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING), mask=i < n)

@triton.jit
def dot(x, y, z, PRECISION: tl.constexpr):
    i = tl.arange(0, 32)
    tile = i[:, None] * 32 + i[None, :]
    tl.store(z + tile, tl.dot(tl.load(x + tile), tl.load(y + tile), input_precision=PRECISION))

@triton.jit
def arithmetic(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + n + i, a - b)
    tl.store(out + 2 * n + i, a * b)
    tl.store(out + 3 * n + i, -a)
    tl.store(out + 4 * n + i, tl.where(a < b, a, b))
    tl.store(out + 5 * n + i, a * 1.5)
    tl.store(out + 6 * n + i, tl.full([BLOCK], 0.3, x.dtype.element_ty))
    tl.store(out + 7 * n + i, i.to(x.dtype.element_ty))

@triton.jit
def extremes(x, y, out):
    i = tl.arange(0, 4)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, tl.maximum(a, b))
    tl.store(out + 4 + i, tl.minimum(a, b))
    tl.store(out + 8 + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 12 + i, tl.clamp(a, -1.0, 1.0))

@triton.jit
def products(x, y, z):
    i = tl.arange(0, 256)
    k = tl.arange(0, 16)
    left = tl.load(x + i[:, None] + 0 * k[None, :], mask=k[None, :] == 3, other=0.0)
    right = tl.load(y + i[None, :] + 0 * k[:, None], mask=k[:, None] == 3, other=0.0)
    tl.store(z + i[:, None] * 256 + i[None, :], tl.dot(left, right, max_num_imprecise_acc=16))

@triton.jit
def sums(x, total, rows, running):
    i = tl.arange(0, 32)
    tile = tl.load(x + i[:, None] * 32 + i[None, :])
    tl.store(total, tl.sum(tile))
    tl.store(rows + i, tl.sum(tile, 1))
    tl.store(running + i[:, None] * 32 + i[None, :], tl.cumsum(tile, 0))

HALF = tl.float16

@triton.jit
def numbers(x, out, factor, half: HALF, wide: "i64", narrow, pair):
    i = tl.arange(0, 1024)
    tl.store(out + i, tl.load(x + i) * factor)
    tl.store(out + 1024, factor * 1.1)
    tl.store(out + 1025, half)
    tl.store(out + 1026, ((wide * wide) >> 32).to(tl.float32))
    tl.store(out + 1027, ((narrow * narrow) >> 16).to(tl.float32))
    tl.store(out + 1028, tl.load(x) * pair[1] + pair[0])

@triton.jit
def integer(n: tl.int32):
    pass

@triton.jit
def atomic(x):
    tl.atomic_add(x, tl.load(x))

data = np.load(sys.argv[1])
results = {}

def run_cast(key, source, target, rounding=None):
    out = torch.empty(source.numel(), dtype=target)
    block = 1 << 16
    cast[(triton.cdiv(source.numel(), block),)](source, out, source.numel(), block, rounding)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    results[key] = out.view(raw).numpy()

fp32, bits16, bits8 = (torch.from_numpy(data[name]) for name in ("fp32", "bits16", "bits8"))
wide = torch.from_numpy(data["fp64"])
targets = dict(bf16=torch.bfloat16, fp16=torch.float16)
targets |= dict(e4m3=torch.float8_e4m3fn, e5m2=torch.float8_e5m2)
for name, target in targets.items():
    run_cast("fp32-" + name, fp32, target)
    if target.itemsize == 1:
        run_cast("fp16-" + name, bits16.view(torch.float16), target)
        run_cast("bf16-" + name, bits16.view(torch.bfloat16), target)
        for wider in (torch.float32, torch.float16, torch.bfloat16):
            short = {torch.float32: "fp32", torch.float16: "fp16"}.get(wider, "bf16")
            run_cast(name + "-" + short, bits8.view(target), wider)
    else:
        run_cast(name + "-fp32", bits16.view(target), torch.float32)
run_cast("fp64-bf16", wide, torch.bfloat16)
run_cast("fp32-bf16-rtz", fp32, torch.bfloat16, "rtz")

for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
    a, b = (torch.from_numpy(data[x]).to(getattr(torch, name)) for x in ("left", "right"))
    for precision in ("ieee", "tf32"):
        out = torch.empty(32, 32)
        dot[(1,)](a, b, out, precision)
        results["dot-" + name + "-" + precision] = out.numpy()

for name, other in (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")):
    out = torch.empty(256, 256)
    products[(1,)](bits8.view(targets[name]), bits8.view(targets[other]), out)
    results["products-" + name + "-" + other] = out.numpy()

for name in ("bf16", "e4m3"):
    x = torch.from_numpy(data["left"]).to(targets[name])
    found = [torch.empty(shape, dtype=targets[name]) for shape in ((1,), (32,), (32, 32))]
    sums[(1,)](x, *found)
    for part, tensor in zip(("total", "rows", "running"), found):
        results["sums-" + name + "-" + part] = tensor.double().numpy()

a, b = (torch.from_numpy(data[x]).to(torch.bfloat16).flatten() for x in ("left", "right"))
out = torch.empty(8 * 1024, dtype=torch.bfloat16)
arithmetic[(1,)](a, b, out, 1024, 1024)
results["arithmetic"] = out.view(8, 1024).float().numpy()

for name in ("bf16", "fp16"):
    x, out = torch.from_numpy(data["left"]).to(targets[name]).flatten(), torch.empty(1029)
    numbers[(1,)](x, out, data["factor"].item(), 0.3, 3 << 20, 3 << 14, (2, 0.7))
    results["numbers-" + name] = out.numpy()
for given in (1.5, 1 << 31):
    try:
        integer[(1,)](given)
    except Exception as error:
        results["integer-" + type(given).__name__] = np.array(type(error).__name__)

nan, out = float("nan"), torch.empty(16)
extremes[(1,)](torch.tensor([1.0, nan, 2.0, nan]), torch.tensor([0.0, 3.0, nan, nan]), out)
results["extremes"] = out.numpy()

try:
    atomic[(1,)](a)
except Exception as error:
    results["atomic"] = np.array(str(error))
np.savez(sys.argv[2], names=np.array(names), **results)
"""


@pytest.fixture(scope="module")
def inputs():
    random = np.random.default_rng(7)
    # Every bf16 value, each midpoint between two of them, the fp32 neighbours of both, and random
    # bit patterns.  The midpoints of 8-bit formats are bf16 values.
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    near_ties = np.concatenate(
        [high, high | 0x7FFF, high | 0x8000, high | 0x8001, high | 1, high | 0xFFFF]
    )
    patterns = np.concatenate([near_ties, random.integers(0, 1 << 32, 1 << 19, dtype=np.uint32)])
    moderate = (random.standard_normal(1 << 18) * 2.0 ** random.integers(-30, 18, 1 << 18)).astype(
        np.float32
    )
    # Just above a tie in fp64, at the tie after rounding to fp32: only one rounding gets these
    # right.
    ties = (high | 0x8000).view(np.float32).astype(np.float64)
    return {
        "fp32": np.concatenate([patterns.view(np.float32), moderate]),
        "bits16": np.arange(1 << 16, dtype=np.uint16).view(np.int16),
        "bits8": np.arange(1 << 8, dtype=np.uint8),
        "fp64": np.concatenate([ties * (1 + 2.0**-40), ties]),
        "factor": np.array([0.1]),
        "left": random.standard_normal((32, 32)).astype(np.float32),
        "right": random.standard_normal((32, 32)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def child(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreter")
    script, given, found = folder / "kernels.py", folder / "given.npz", folder / "found.npz"
    script.write_text(KERNELS)
    np.savez(given, **inputs)
    done = in_child(str(script), str(given), str(found))
    assert done.returncode == 0, done.stderr
    with np.load(found) as results:
        return dict(results)


def values(bits, dtype):
    return torch.from_numpy(bits.copy()).view(dtype).double().numpy()


def assert_same(found, expected):
    """Equal values, sign of zero included; NaN equals NaN."""
    wrong = ~(
        (found == expected) & (np.signbit(found) == np.signbit(expected))
        | np.isnan(found) & np.isnan(expected)
    )
    assert not wrong.any(), (
        f"{wrong.sum()} differ, first: got {found[wrong][:4]}, but should be {expected[wrong][:4]}"
    )


ML = {
    "e4m3": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, torch.float8_e5m2, 57344.0),
}
SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_names(child):
    assert list(child["names"]) == [
        "float-casts",
        "dot-operands",
        "packed-arithmetic",
        "packed-sums",
        "min-max-nan",
        "scalar-index",
        "waste",
        "replay",
    ]


@pytest.mark.parametrize("name", SIXTEEN)
def test_fp32_to_16_bits_rounds_as_torch(child, inputs, name):
    expected = torch.from_numpy(inputs["fp32"]).to(SIXTEEN[name]).double().numpy()
    assert_same(values(child[f"fp32-{name}"], SIXTEEN[name]), expected)


def test_fp32_to_bf16_rounds_as_ml_dtypes(child, inputs):
    expected = inputs["fp32"].astype(ml_dtypes.bfloat16).astype(np.float64)
    assert_same(values(child["fp32-bf16"], torch.bfloat16), expected)


def test_fp32_to_bf16_toward_zero_drops_bits(child, inputs):
    truncated = (inputs["fp32"].view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    expected = np.where(np.isnan(inputs["fp32"]), np.nan, truncated)
    assert_same(values(child["fp32-bf16-rtz"], torch.bfloat16), expected)


def test_fp64_to_bf16_rounds_once(child, inputs):
    """A value just above a tie rounds up; an intermediate rounding to fp32 would make it a tie, and
    half of the ties round down."""
    above = inputs["fp64"][: 1 << 16]
    normal = np.isfinite(above) & (np.abs(above) > 2.0**-126) & (np.abs(above) < 3.3e38)
    results = values(child["fp64-bf16"], torch.bfloat16)[: 1 << 16]
    assert (np.abs(results[normal]) > np.abs(above[normal])).all()


@pytest.mark.parametrize("name", ML)
@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16"])
def test_cast_to_8_bits_rounds_as_ml_dtypes_and_saturates(child, inputs, source, name):
    """ml_dtypes overflows to infinity or NaN; `cvt.rn.satfinite` gives the largest finite number,
    for infinity too."""
    given = inputs["fp32"]
    if source != "fp32":
        given = torch.from_numpy(inputs["bits16"]).view(SIXTEEN[source]).float().numpy()
    rounded = given.astype(ML[name][0]).astype(np.float64)
    saturated = np.copysign(ML[name][2], given)
    expected = np.where(np.isfinite(rounded), rounded, np.where(np.isnan(given), np.nan, saturated))
    assert_same(values(child[f"{source}-{name}"], ML[name][1]), expected)


@pytest.mark.parametrize("name", ML)
def test_cast_to_8_bits_rounds_as_inputs_do(child, inputs, name):
    """The suite's cast does not saturate: it is compared only where that makes no difference."""
    given = inputs["fp32"].astype(np.float64)
    inside = np.isnan(given) | (np.abs(given) <= ML[name][2])
    bits = (
        cast(given[inside], dtype_named(f"float8_{name}" + "fn" * (name == "e4m3")))
        .view(torch.uint8)
        .numpy()
    )
    assert_same(values(child[f"fp32-{name}"][inside], ML[name][1]), values(bits, ML[name][1]))


@pytest.mark.parametrize("wider", SIXTEEN)
@pytest.mark.parametrize("name", ML)
def test_8_bits_widen_exactly_to_16(child, inputs, name, wider):
    expected = inputs["bits8"].view(ML[name][0]).astype(np.float64)
    assert_same(values(child[f"{name}-{wider}"], SIXTEEN[wider]), expected)


@pytest.mark.parametrize(
    "pair", [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")], ids="-".join
)
def test_dot_has_every_product_of_8_bit_operands(child, inputs, pair):
    """All 65536 pairs, NaN and infinity included; the other terms of each sum are 0 * 0."""
    left, right = (inputs["bits8"].view(ML[name][0]).astype(np.float64) for name in pair)
    results = child[f"products-{pair[0]}-{pair[1]}"].astype(np.float64)
    np.testing.assert_array_equal(results, left[:, None] * right[None, :])


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_sums_add_values(child, inputs, name):
    """Rounded once from fp32: within half an ulp of the format plus the error of 1024 additions in
    fp32."""
    format = dtype_named({"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}[name])
    x = torch.from_numpy(inputs["left"]).to(format.torch).double()
    exact = {"total": x.sum().reshape(1), "rows": x.sum(1), "running": x.cumsum(0)}
    size = {"total": x.abs().sum().reshape(1), "rows": x.abs().sum(1), "running": x.abs().cumsum(0)}
    for part, want in exact.items():
        error = (torch.from_numpy(child[f"sums-{name}-{part}"]) - want).abs()
        rounding = format.unit_roundoff * want.abs() + format.smallest_subnormal / 2
        assert (error <= rounding + 1024 * 2.0**-24 * size[part]).all(), part


@pytest.mark.parametrize("name", [*ML, *SIXTEEN])
def test_every_pattern_widens_exactly(child, inputs, name):
    bits, dtype = (
        (inputs["bits8"], ML[name][1]) if name in ML else (inputs["bits16"], SIXTEEN[name])
    )
    results = child[f"{name}-fp32"].view(np.float32).astype(np.float64)
    assert_same(results, values(bits, dtype))
    if name in ML:
        assert_same(results, bits.view(ML[name][0]).astype(np.float64))


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_dot_multiplies_values_and_adds_in_fp32(child, inputs, dtype):
    left, right = (
        torch.from_numpy(inputs[side]).to(getattr(torch, dtype)).double()
        for side in ("left", "right")
    )
    magnitude = left.abs() @ right.abs()
    error = (torch.from_numpy(child[f"dot-{dtype}-ieee"]).double() - left @ right).abs()
    # 32 products (rounded only if fp32) and 32 sums, each to fp32: Higham's gamma_33, first order,
    # with u = 2**-24.
    assert (error <= 33 * 2.0**-24 / (1 - 33 * 2.0**-24) * magnitude).all()


def test_tf32_dot_drops_thirteen_bits(child, inputs):
    cut = [
        torch.from_numpy((inputs[side].view(np.uint32) & 0xFFFFE000).view(np.float32)).double()
        for side in ("left", "right")
    ]
    error = (torch.from_numpy(child["dot-float32-tf32"]).double() - cut[0] @ cut[1]).abs()
    assert (error <= 33 * 2.0**-24 / (1 - 33 * 2.0**-24) * (cut[0].abs() @ cut[1].abs())).all()
    assert (child["dot-float32-tf32"] != child["dot-float32-ieee"]).any()
    assert (child["dot-float16-tf32"] == child["dot-float16-ieee"]).all()


def test_bf16_arithmetic_works_on_values(child, inputs):
    a, b = (torch.from_numpy(inputs[side]).bfloat16().flatten() for side in ("left", "right"))
    full, index = torch.full_like(a, 0.3), torch.arange(1024).bfloat16()
    expected = (
        torch.stack([a + b, a - b, a * b, -a, torch.minimum(a, b), a * 1.5, full, index])
        .double()
        .numpy()
    )
    assert_same(child["arithmetic"].astype(np.float64), expected)


@pytest.mark.parametrize("name", SIXTEEN)
def test_numbers_have_the_types_of_a_compiled_kernel(child, inputs, name):
    """Of a 16-bit block times a float argument, the block is extended to fp32."""
    found = child[f"numbers-{name}"]
    x = torch.from_numpy(inputs["left"]).to(SIXTEEN[name]).flatten().float().numpy()
    factor = np.float32(0.1)
    np.testing.assert_array_equal(found[:1024], x * factor)
    assert (found[:1024] != (x * factor).astype(np.float16)).mean() > 0.5
    assert found[1024] == factor * np.float32(1.1) != np.float32(0.1 * 1.1)
    assert found[1025] == np.float16(0.3)
    assert found[1026] == 9 << 8  # (3 << 20) ** 2 does not fit into 32 bits
    assert found[1027] == np.int32((9 << 28) - (1 << 32)) >> 16  # and wraps where nothing says so
    assert found[1028] == x[0] * np.float32(0.7) + np.float32(2)


def test_a_number_that_its_annotation_cannot_hold_is_refused(child):
    assert str(child["integer-float"]) == "TypeError"
    assert str(child["integer-int"]) == "OverflowError"


def test_min_and_max_drop_nan_unless_asked(child):
    nan = np.nan
    expected = [1, 3, 2, nan, 0, 3, 2, nan, 1, nan, nan, nan, 1, -1, 1, -1]
    np.testing.assert_array_equal(child["extremes"], expected)


def test_atomics_on_bf16_are_refused(child):
    assert "bf16" in str(child["atomic"])
