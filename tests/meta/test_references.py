"""The fp64 reference on trial: against fifty digits, against autograd, against itself cut into other blocks.

Tolerances against mpmath are worst-case rounding analysis, not fitted.  With u = 2^-53, A = |softmax_scale| |Q| |K|^T and
a_i = max_j A_ij over the visible pairs of a row (all sums below run over visible pairs):

* a score: d products and sums, the scale, and the four roundings of a softcap, whose slope is at most 1:
  |dS_ij| <= (d + 6) u A_ij;
* an exponent S - m: twice that, and the subtraction of two numbers of at most a_i:  r_i = (2 (d + 6) + 2) a_i u + 4 u
  (4 u: the exponential itself);
* a weight P: its own exponential and those in the row sum, n additions, a division, and a rescale per block of keys:
  w_i = 2 r_i + (2 n + 8) u, relative;
* O: |dO| <= (w_i + (n + 2) u) sum_j P_ij |V_jd|;        LSE: r_i + (n + 4) u + 2 u (|LSE_i| + a_i).

The backward recomputes P from the LSE, so its weights are off by p_i = r_i + dLSE_i + 4 u relative.  With B = |dO| |V|^T and
D_i = sum_j P_ij B_ij, which bounds |rowsum(dO O)| too, each dS_ij is off by at most

    E_ij = P_ij (B_ij + D_i) (p_i + w_i + (n + 2 d_v + 12) u + 2 [softcap] (d + 8) u A_ij / softcap),

where the last term is the error of the slope 1 - tanh^2 <= 1.  The gradients add E against |K|, |Q| and their own sums:
|softmax_scale| E |K|, |softmax_scale| E^T |Q| and (p_i + ...) P^T |dO|, plus m u relative for a sum over m pairs.
Second-order terms are covered by a factor of 2 over the whole; the worst case at 1e4 has r_i near 1e-10.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from mpmath import mpf
from torch.utils._python_dispatch import TorchDispatchMode

from references import multiprecision
from references.attention import Attention, backward, forward, query_gradient, row_blocks
from references.masks import Causal, Dense, Documents, Full, Lengths, Prefix, Window, parse_mask
from references.multiprecision import Operands

U = 2.0**-53
NAN, INF = math.nan, math.inf
MASKS = (Full(), Causal(), Causal("tl"), Window(3, 1), Lengths((6, 0), (9, 4)), Documents((3, 0, 4)), Prefix(3), Dense(40, 3))


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    seqlen_q: int = 7
    seqlen_kv: int = 9
    head_dim: int = 4
    head_dim_v: int = 3


def operands(shape: Shape, attention: Attention, *, size: float = 1.0, dtype: torch.dtype = torch.float64) -> Operands:
    """Normal inputs; `size` multiplies Q."""
    random = torch.Generator().manual_seed(11)
    s = shape

    def draw(heads: int, seqlen: int, dim: int) -> torch.Tensor:
        return torch.randn(s.batch, heads, seqlen, dim, generator=random, dtype=torch.float64).to(dtype)

    q, k = draw(s.heads_q, s.seqlen_q, s.head_dim) * size, draw(s.heads_kv, s.seqlen_kv, s.head_dim)
    v, dout = draw(s.heads_kv, s.seqlen_kv, s.head_dim_v), draw(s.heads_q, s.seqlen_q, s.head_dim_v)
    return Operands(q, k, v, dout, attention.mask, attention.softmax_scale, attention.softcap)


def tensors(given: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return given.q, given.k, given.v, given.dout


def as_double(values: list) -> torch.Tensor:
    """Nested lists of mpf, rounded to nearest."""

    def convert(x):
        return [convert(y) for y in x] if isinstance(x, list) else float(x)

    return torch.tensor(convert(values), dtype=torch.float64)


@dataclass(frozen=True)
class Truth:
    """Fifty digits rounded to fp64, and the tolerances of the module's docstring, in the same shapes."""

    values: dict[str, torch.Tensor]
    tolerances: dict[str, torch.Tensor]

    def check(self, name: str, found: torch.Tensor) -> None:
        expected = self.values[name]
        assert found.dtype == torch.float64
        assert found.shape == expected.shape
        assert torch.equal(found.isfinite(), expected.isfinite())
        error = torch.where(expected.isfinite(), (found - expected).abs(), 0.0)
        assert torch.equal(found[~expected.isfinite()], expected[~expected.isfinite()])
        worst = float((error / self.tolerances[name]).nan_to_num().max())
        assert bool((error <= self.tolerances[name]).all()), f"{name}: {worst:.3g} of the tolerance"

    def block(self, index: tuple[slice, slice]) -> "Truth":
        values, tolerances = ({k: x[k].flatten(0, 1)[index] for k in ("out", "lse")} for x in (self.values, self.tolerances))
        return Truth(values, tolerances)


def truth(given: Operands) -> Truth:
    exact = multiprecision.attention(given)
    values = {name: as_double(getattr(exact, name)) for name in ("out", "lse", "dq", "dk", "dv")}
    p = as_double(exact.probabilities).view(*given.q.shape[:3], given.k.shape[2])
    group = given.q.shape[1] // given.k.shape[1]
    q, k, v, dout = (x.double().abs() for x in tensors(given))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    (n_q, n), (d, d_v) = p.shape[2:], (q.shape[3], v.shape[3])
    scale = abs(given.softmax_scale)

    visible = given.mask.dense(*p.shape)
    a = (scale * q @ k.mT).masked_fill(~visible, 0.0)
    top = a.amax(-1, keepdim=True) if n else a.new_zeros(*a.shape[:3], 1)
    r = (2 * (d + 6) + 2) * top * U + 4 * U
    w = 2 * r + (2 * n + 8) * U
    lse = r + (n + 4) * U + 2 * U * (values["lse"].unsqueeze(-1).abs().nan_to_num(posinf=0.0) + top)
    weight = r + lse + 4 * U
    b = dout @ v.mT
    slope = 2 * (d + 8) * U * a / given.softcap if given.softcap else 0.0
    e = p * (b + (p * b).sum(-1, keepdim=True)) * (weight + w + (n + 2 * d_v + 12) * U + slope)

    def keys(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, group)).sum(2)

    sums = (n + 2) * U, (group * n_q + 2) * U
    ds = p * (b + (p * b).sum(-1, keepdim=True))
    tolerances = {
        "out": (w + sums[0]) * (p @ v),
        "lse": lse.squeeze(-1),
        "dq": scale * ((e + sums[0] * ds) @ k),
        "dk": scale * keys((e + sums[1] * ds).mT @ q),
        "dv": keys((p * (weight + sums[1])).mT @ dout),
    }
    return Truth(values, {name: 2 * x for name, x in tolerances.items()})


PROBLEMS = {
    **{mask.name: (Shape(), Attention(mask, 0.5), 1.0) for mask in MASKS},
    "softcap": (Shape(), Attention(Causal(), 0.5, 2.0), 1.0),
    "softcap, saturated": (Shape(), Attention(Full(), 0.5, 0.25), 10.0),
    "softcap, huge": (Shape(), Attention(Causal(), 0.5, 900.0), 1e3),
    "negative scale": (Shape(), Attention(Window(4, 0), -0.75), 1.0),
    "zero scale": (Shape(), Attention(Causal(), 0.0), 1.0),
    "intersection": (Shape(), Attention(Causal() & Dense(50, 1), 0.5), 1.0),
    "more queries than keys": (Shape(seqlen_q=9, seqlen_kv=5), Attention(Causal(), 0.5), 1.0),
    "one key head": (Shape(batch=1, heads_q=3, heads_kv=1), Attention(Causal(), 0.5), 1.0),
    "one key": (Shape(seqlen_kv=1), Attention(Full(), 0.5), 1.0),
    "wide values": (Shape(heads_q=2, head_dim=2, head_dim_v=8), Attention(Causal(), 0.5), 1.0),
    "logits of 1e2, just over the limit of unshifted sums": (Shape(), Attention(Causal(), 0.5), 40.0),
    "logits of 1e4": (Shape(), Attention(Causal(), 0.5), 1e4),
    "logits of 1e-9": (Shape(), Attention(Causal(), 0.5), 1e-9),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_fifty_digits(name):
    shape, attention, size = PROBLEMS[name]
    given = operands(shape, attention, size=size)
    expected = truth(given)
    found = forward(given.q, given.k, given.v, attention, block_q=3, block_kv=4)
    expected.check("out", found.out)
    expected.check("lse", found.lse)
    gradients = backward(*tensors(given), attention, block_q=3, block_kv=4)
    for gradient in ("dq", "dk", "dv"):
        expected.check(gradient, getattr(gradients, gradient))
    for block in row_blocks(given.q, given.k, given.v, attention, budget=70):
        part = expected.block(block.index)
        part.check("out", block.out)
        part.check("lse", block.lse)


def test_tolerance_is_tight_enough_to_notice_single_precision():
    given = operands(Shape(), Attention(Causal(), 0.5))
    out = forward(given.q.float(), given.k.float(), given.v.float(), Attention(Causal(), 0.5)).out
    with pytest.raises(AssertionError, match="out: "):
        truth(given).check("out", out)


def test_multiprecision_by_hand():
    """One query, two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    v, dout = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1), torch.tensor([2.0]).view(1, 1, 1, 1)
    found = multiprecision.attention(Operands(q, k, v, dout, Full(), math.log(3)))
    log3 = math.log(3)
    expected = {"probabilities": [0.25, 0.75], "out": [7.0], "lse": [math.log(4)], "dv": [0.5, 1.5]}
    expected |= {"dq": [1.5 * log3], "dk": [-1.5 * log3, 1.5 * log3]}  # dP = (8, 16), D = 14: dS = (-1.5, 1.5)
    for name, values in expected.items():
        assert as_double(getattr(found, name)).flatten().tolist() == pytest.approx(values, rel=4 * U, abs=0)
    assert isinstance(found.lse[0][0][0], mpf)


@pytest.mark.parametrize("attention", [Attention(Causal(), 0.6, 2.0), Attention(Dense(50, 2), -0.6)], ids=str)
def test_backward_is_the_finite_difference_of_forward(attention):
    given = operands(Shape(batch=1, heads_q=2, heads_kv=1, seqlen_q=3, seqlen_kv=4, head_dim=2, head_dim_v=2), attention)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return forward(q, k, v, attention).out

        @staticmethod
        def backward(ctx, dout):
            gradients = backward(*ctx.saved_tensors, dout, attention)
            return gradients.dq, gradients.dk, gradients.dv

    assert torch.autograd.gradcheck(Function.apply, tuple(x.requires_grad_() for x in (given.q, given.k, given.v)))


SHAPE = Shape(seqlen_q=37, seqlen_kv=53, head_dim=8, head_dim_v=5)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of fp64 sums of order 1 over at most a hundred terms."""
    torch.testing.assert_close(found, expected, rtol=2**10 * U, atol=2**10 * U)


@pytest.mark.parametrize("blocks", [(None, None), (1, 53), (37, 1), (5, 7), (16, 64)], ids=str)
@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Window(5, 2), Documents((20, 13)), Causal() & Dense(30, 1)], ids=lambda m: m.name
)
def test_blocks_do_not_matter(mask, blocks):
    """However the rows, keys and heads are cut, forward, backward and the textbook's form agree."""
    attention = Attention(mask, 0.4)
    given = operands(SHAPE, attention)
    (whole,) = row_blocks(given.q, given.k, given.v, attention)
    found = forward(given.q, given.k, given.v, attention, block_q=blocks[0], block_kv=blocks[1])
    close(found.out.flatten(0, 1), whole.out)
    close(found.lse.flatten(0, 1), whole.lse)
    expected = backward(*tensors(given), attention, block_q=64, block_kv=64)
    gradients = backward(*tensors(given), attention, block_q=blocks[0], block_kv=blocks[1])
    for name in ("dq", "dk", "dv"):
        close(getattr(gradients, name), getattr(expected, name))


@pytest.mark.parametrize("budget", [1, 53 * 2 * 5, 53 * 37 * 2, 53 * 37 * 2 * 3, 10**9])
def test_row_blocks_tile_the_problem(budget):
    attention = Attention(Causal(), 0.4, 3.0)
    given = operands(replace(SHAPE, batch=3), attention)
    whole = next(row_blocks(given.q, given.k, given.v, attention))
    times = torch.zeros(3 * 4, 37)
    for block in row_blocks(given.q, given.k, given.v, attention, budget=budget):
        heads, rows = block.index
        times[block.index] += 1
        assert block.scores.numel() <= max(budget, 2 * 53)
        assert block.rows.tolist() == list(range(37))[rows]
        for name in ("scores", "uncapped", "magnitude", "probabilities", "row_max", "row_sum", "out", "lse"):
            close(getattr(block, name), getattr(whole, name)[heads, rows])
        assert torch.equal(block.visible, whole.visible[heads, rows])
    assert bool((times == 1).all())


def test_gauges():
    """Each field of a row block, from its definition, with empty rows and a softcap."""
    attention = Attention(Lengths((30, 37), (53, 20)), -0.4, 3.0)
    given = operands(SHAPE, attention)
    (block,) = row_blocks(given.q, given.k, given.v, attention)
    q, k, v = (x.flatten(0, 1) for x in (given.q, given.k.repeat_interleave(2, 1), given.v.repeat_interleave(2, 1)))
    visible = attention.mask.dense(2, 4, 37, 53).flatten(0, 1)
    scaled = -0.4 * q @ k.mT
    empty = ~visible.any(-1)
    assert torch.equal(block.visible, visible)
    close(block.uncapped, scaled.masked_fill(~visible, -INF))
    close(block.scores, (3 * torch.tanh(scaled / 3)).masked_fill(~visible, -INF))
    close(block.magnitude, (0.4 * q.abs() @ k.abs().mT).masked_fill(~visible, 0.0))
    assert torch.equal(block.row_max, block.scores.amax(-1))
    assert torch.equal(block.row_sum == 0, empty)
    assert torch.equal(block.lse == -INF, empty)
    close(block.probabilities.sum(-1), 1.0 - empty.double())
    close(block.probabilities, (block.scores - block.lse[..., None]).exp().nan_to_num(0.0))
    close(block.out, block.probabilities @ v)
    close(block.values, torch.where(visible.any(1)[..., None], v, 0.0))
    uncapped = next(row_blocks(given.q, given.k, given.v, Attention(Full(), 0.4)))
    assert uncapped.uncapped is uncapped.scores


CHOICES = (slice(3, 20), slice(None, None, 4), torch.tensor([36, 0, 5, 5, 17]), torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("chosen", CHOICES, ids=["slice", "every fourth", "positions", "none"])
@pytest.mark.parametrize("mask", [Causal(), Window(4, 0), Dense(20, 1)], ids=lambda m: m.name)
def test_chosen_rows_and_columns_equal_the_whole(mask, chosen):
    attention = Attention(mask, 0.4, 5.0)
    given = operands(SHAPE, attention)
    whole, gradients = forward(given.q, given.k, given.v, attention), backward(*tensors(given), attention)
    part = forward(given.q, given.k, given.v, attention, rows=chosen, block_q=3, block_kv=8)
    close(part.out, whole.out[:, :, chosen])
    close(part.lse, whole.lse[:, :, chosen])
    for block in row_blocks(given.q, given.k, given.v, attention, rows=chosen, budget=53 * 4):
        close(block.out, whole.out[:, :, chosen].flatten(0, 1)[block.index])
    close(query_gradient(*tensors(given), attention, rows=chosen), gradients.dq[:, :, chosen])
    columns = backward(*tensors(given), attention, columns=chosen, block_q=8, block_kv=3)
    close(columns.dk, gradients.dk[:, :, chosen])
    close(columns.dv, gradients.dv[:, :, chosen])
    assert columns.dq.shape == (2, 4, 0, 8)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_masked_pairs_hold_has_no_effect(poison, softcap):
    """Keys past a length, queries past theirs, and a key that only later queries see."""
    attention = Attention(Causal() & Lengths((30, 37), (53, 40)), 0.4, softcap)
    given = operands(SHAPE, attention)
    whole, gradients = forward(given.q, given.k, given.v, attention), backward(*tensors(given), attention)
    q, k, v, dout = (x.clone() for x in tensors(given))
    q[0, :, 30:], dout[0, :, 30:] = poison, poison
    k[1, :, 40:], v[1, :, 40:] = poison, poison
    found, poisoned = forward(q, k, v, attention), backward(q, k, v, dout, attention, block_q=16, block_kv=16)
    close(found.out, whole.out)
    close(found.lse, whole.lse)
    for name in ("dq", "dk", "dv"):
        close(getattr(poisoned, name), getattr(gradients, name))
    for block in row_blocks(q, k, v, attention, budget=4000):
        close(block.out, whole.out.flatten(0, 1)[block.index])
        assert bool(block.probabilities.isfinite().all())
        assert bool(block.magnitude.isfinite().all())
        assert bool(block.values.isfinite().all())
    k[0, :, 40] = poison  # seen from query 24 on
    v[0, :, 40] = poison
    found, poisoned = forward(q, k, v, attention), backward(q, k, v, dout, attention)
    close(found.out[0, :, :24], whole.out[0, :, :24])
    close(found.lse[0, :, :24], whole.lse[0, :, :24])
    close(poisoned.dq[0, :, :24], gradients.dq[0, :, :24])
    for block in row_blocks(q, k, v, attention):
        close(block.out[:4, :24], whole.out[0, :, :24])
        assert not bool(block.probabilities[:4, :, 41:][~block.visible[:4, :, 41:]].any())


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_visible_infinities_in_v_reach_the_output(size):
    """Whatever the weight: at logits of 1e4 it is below the smallest double."""
    attention = Attention(Causal(), 0.4)
    given = operands(SHAPE, attention, size=size)
    whole = forward(given.q, given.k, given.v, attention).out
    v = given.v.clone()
    v[:, :, 20, 0], v[:, :, 22, 1], v[:, :, 24, 2] = INF, -INF, NAN
    v[:, :, 26, 0] = -INF
    found = forward(given.q, given.k, v, attention, block_q=8, block_kv=8).out
    textbook_out = torch.cat([block.out for block in row_blocks(given.q, given.k, v, attention)]).view(found.shape)
    for out in (found, textbook_out):
        # Bottom right: query i sees keys up to i + 16.
        assert torch.equal(out[:, :, 4:10, 0], torch.full_like(out[:, :, 4:10, 0], INF))
        assert bool(out[:, :, 10:, 0].isnan().all())
        assert torch.equal(out[:, :, 6:, 1], torch.full_like(out[:, :, 6:, 1], -INF))
        assert bool(out[:, :, 8:, 2].isnan().all())
        close(out[:, :, :4], whole[:, :, :4])
        close(out[..., 3:], whole[..., 3:])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_inputs_of_every_dtype_are_taken_exactly(dtype):
    attention = Attention(Causal(), 0.4)
    given = operands(SHAPE, attention)
    narrow = tuple(x.to(dtype) for x in tensors(given))
    wide = tuple(x.double() for x in narrow)
    chosen = torch.tensor([36, 2, 7])
    assert torch.equal(forward(*narrow[:3], attention).out, forward(*wide[:3], attention).out)
    assert torch.equal(forward(*narrow[:3], attention, rows=chosen).out, forward(*wide[:3], attention, rows=chosen).out)
    assert torch.equal(next(row_blocks(*narrow[:3], attention)).out, next(row_blocks(*wide[:3], attention)).out)
    for x, y in zip(*(vars(backward(*inputs, attention)).values() for inputs in (narrow, wide)), strict=True):
        assert torch.equal(x, y)


def test_strides_do_not_matter():
    """Stride 0 over batch and heads, sequence-major storage, and a pitch between rows; the inputs are left as they were."""
    attention = Attention(Causal(), 0.4)
    given = operands(SHAPE, attention)
    q = given.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = given.k[:, :1].expand_as(given.k)
    v = torch.cat([given.v, given.v], -1)[:1, ..., :5].expand_as(given.v)
    dout = given.dout[:1, :1].expand_as(given.dout)
    strided, plain = (q, k, v, dout), tuple(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, dout))
    for run in (forward, lambda *x: next(row_blocks(*x)), backward):
        count = 4 if run is backward else 3
        found, expected = vars(run(*strided[:count], attention)), vars(run(*plain[:count], attention))
        assert all(torch.equal(found[name], x) for name, x in expected.items() if isinstance(x, torch.Tensor))
    assert all(torch.equal(x, y) for x, y in zip(strided, plain, strict=True))


@pytest.mark.parametrize("shape", [Shape(seqlen_kv=0), Shape(seqlen_q=0), Shape(seqlen_q=0, seqlen_kv=0)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), Dense(50, 1)], ids=lambda m: m.name)
def test_zero_lengths(mask, shape):
    attention = Attention(mask, 0.4, 2.0)
    given = operands(shape, attention)
    found, gradients = forward(given.q, given.k, given.v, attention), backward(*tensors(given), attention)
    assert torch.equal(found.out, torch.zeros_like(given.dout))
    assert torch.equal(found.lse, torch.full(given.q.shape[:3], -INF, dtype=torch.float64))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(gradients, name), torch.zeros_like(getattr(given, name[1:])))
    for block in row_blocks(given.q, given.k, given.v, attention):
        assert {*block.lse.flatten().tolist(), *block.row_max.flatten().tolist()} <= {-INF}
        assert not block.row_sum.any()
        assert not block.out.any()


class LargestTensor(TorchDispatchMode):
    """Records the largest storage, in bytes, that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("mask", [parse_mask("window.100.0"), parse_mask("causal+dense.50.1")], ids=lambda m: m.name)
def test_memory_does_not_grow_with_the_square(mask):
    """At 8192 keys a head's scores are 512 MiB; no single tensor may exceed a tile of scores, or the default budget."""
    attention = Attention(mask, 0.1)
    shape = Shape(1, 2, 1, 8192, 8192, 8, 8)
    given = operands(shape, attention, dtype=torch.bfloat16)
    rows = torch.arange(5, 8192, 80)
    tile = 1024 * 512 * 8
    with LargestTensor() as largest:
        part = forward(given.q, given.k, given.v, attention, rows=rows)
        dq = query_gradient(*tensors(given), attention, rows=rows)
    assert largest.bytes <= tile
    with LargestTensor() as largest:
        for block in row_blocks(given.q, given.k, given.v, attention, rows=rows, budget=2**19):
            close(block.out, part.out.flatten(0, 1)[block.index])
    assert largest.bytes <= tile
    if "window" in mask.name:
        with LargestTensor() as largest:
            whole = backward(*tensors(given), attention)
        assert largest.bytes <= tile
        close(dq, whole.dq[:, :, rows])


def test_masked_tiles_are_skipped(monkeypatch):
    """A window of 16 keys over 1024 costs the few tiles it touches, not all of them."""
    attention = Attention(Window(15, 0), 0.4)
    given = operands(Shape(1, 1, 1, 1024, 1024, 4, 4), attention)
    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y: products.append(1) or bmm(x, y))
    forward(given.q, given.k, given.v, attention, block_q=64, block_kv=64)
    assert len(products) == 16 + 15


Q, K, FULL = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 5, 8), Attention(Full(), 1.0)
MISFITS = {
    "q: 3 heads": lambda: forward(torch.zeros(1, 3, 4, 8), K, K, FULL),
    "k: shape": lambda: forward(Q, torch.zeros(1, 2, 5, 7), K, FULL),
    "v: shape": lambda: forward(Q, K, torch.zeros(1, 2, 6, 8), FULL),
    "dout: shape": lambda: backward(Q, K, K, Q[:, :1], FULL),
    "softcap: -1": lambda: forward(Q, K, K, Attention(Full(), 1.0, -1.0)),
    "for a batch of 1": lambda: forward(Q, K, K, Attention(Lengths((1, 2), (3, 4)), 1.0)),
    "rows: give a slice": lambda: forward(Q, K, K, FULL, rows=torch.tensor([4])),
    "positions in 0..3": lambda: forward(Q, K, K, FULL, rows=torch.tensor([-1])),
    "one-dimensional tensor": lambda: forward(Q, K, K, FULL, rows=torch.tensor([True, False, True, False])),
    "columns: give a slice": lambda: backward(Q, K, K, Q, FULL, columns=torch.tensor([5])),
}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_named(message):
    with pytest.raises(ValueError, match=message):
        MISFITS[message]()
