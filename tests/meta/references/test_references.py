"""The fp64 reference on trial: against fifty digits, against autograd, against itself cut into
other blocks.

Tolerances against mpmath are worst-case rounding analysis, not fitted.  With u = 2^-53, A =
|softmax_scale| |Q| |K|^T and a_i = max_j A_ij over the visible pairs of a row (all sums below run
over visible pairs):

* a score: d products and sums, the scale, and the four roundings of a softcap, whose slope is at
  most 1:
  |dS_ij| <= (d + 6) u A_ij;
* an exponent S - m: twice that, and the subtraction of two numbers of at most a_i:  r_i = (2 (d +
  6) + 2) a_i u + 4 u (4 u: the exponential itself);
* a weight P: its own exponential and those in the row sum, n additions, a division, and a rescale
  per block of keys: w_i = 2 r_i + (2 n + 8) u, relative;
* O: |dO| <= (w_i + (n + 2) u) sum_j P_ij |V_jd|;        LSE: r_i + (n + 4) u + 2 u (|LSE_i| + a_i).

The backward recomputes P from the LSE, so its weights are off by p_i = r_i + dLSE_i + 4 u relative.
With B = |dO| |V|^T and D_i = sum_j P_ij B_ij, which bounds |rowsum(dO O)| too, each dS_ij is off by
at most

    E_ij = P_ij (B_ij + D_i) (p_i + w_i + (n + 2 d_v + 12) u + 2 [softcap] (d + 8) u A_ij /
    softcap),

where the last term is the error of the slope 1 - tanh^2 <= 1.  The gradients add E against |K|, |Q|
and their own sums:
|softmax_scale| E |K|, |softmax_scale| E^T |Q| and (p_i + ...) P^T |dO|, plus m u relative for a sum
over m pairs.
Second-order terms are covered by a factor of 2 over the whole; the worst case at 1e4 has r_i near
1e-10.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from mpmath import mpf

from references import multiprecision
from references.attention import backward, forward
from references.definition import Attention
from references.masks import Causal, Dense, Documents, Full, Lengths, Prefix, Window
from references.multiprecision import Operands
from references.row_blocks import row_blocks
from references.score_mods import Softcap, cap_of

U = 2.0**-53
NAN, INF = math.nan, math.inf
MASKS = (
    Full(),
    Causal(),
    Causal("tl"),
    Window(3, 1),
    Lengths((6, 0), (9, 4)),
    Documents((3, 0, 4)),
    Prefix(3),
    Dense(40, 3),
)


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    seqlen_q: int = 7
    seqlen_kv: int = 9
    head_dim: int = 4
    head_dim_v: int = 3


def operands(
    shape: Shape, attention: Attention, *, size: float = 1.0, dtype: torch.dtype = torch.float64
) -> Operands:
    """Normal inputs; `size` multiplies Q."""
    random = torch.Generator().manual_seed(11)
    s = shape

    def draw(heads: int, seqlen: int, dim: int) -> torch.Tensor:
        return torch.randn(s.batch, heads, seqlen, dim, generator=random, dtype=torch.float64).to(
            dtype
        )

    q, k = draw(s.heads_q, s.seqlen_q, s.head_dim) * size, draw(s.heads_kv, s.seqlen_kv, s.head_dim)
    v, dout = draw(s.heads_kv, s.seqlen_kv, s.head_dim_v), draw(s.heads_q, s.seqlen_q, s.head_dim_v)
    return Operands(q, k, v, dout, attention.mask, attention.softmax_scale, attention.score_mod)


def tensors(given: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return given.q, given.k, given.v, given.dout


def as_double(values: list) -> torch.Tensor:
    """Nested lists of mpf, rounded to nearest."""

    def convert(x):
        return [convert(y) for y in x] if isinstance(x, list) else float(x)

    return torch.tensor(convert(values), dtype=torch.float64)


@dataclass(frozen=True)
class Truth:
    """Fifty digits rounded to fp64, and the tolerances of the module's docstring, in the same
    shapes."""

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
        values, tolerances = (
            {k: x[k].flatten(0, 1)[index] for k in ("out", "lse")}
            for x in (self.values, self.tolerances)
        )
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
    cap = cap_of(given.score_mod)
    slope = 2 * (d + 8) * U * a / cap if cap else 0.0
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
    "softcap": (Shape(), Attention(Causal(), 0.5, Softcap(2.0)), 1.0),
    "softcap, saturated": (Shape(), Attention(Full(), 0.5, Softcap(0.25)), 10.0),
    "softcap, huge": (Shape(), Attention(Causal(), 0.5, Softcap(900.0)), 1e3),
    "negative scale": (Shape(), Attention(Window(4, 0), -0.75), 1.0),
    "zero scale": (Shape(), Attention(Causal(), 0.0), 1.0),
    "intersection": (Shape(), Attention(Causal() & Dense(50, 1), 0.5), 1.0),
    "more queries than keys": (Shape(seqlen_q=9, seqlen_kv=5), Attention(Causal(), 0.5), 1.0),
    "one key head": (Shape(batch=1, heads_q=3, heads_kv=1), Attention(Causal(), 0.5), 1.0),
    "one key": (Shape(seqlen_kv=1), Attention(Full(), 0.5), 1.0),
    "wide values": (Shape(heads_q=2, head_dim=2, head_dim_v=8), Attention(Causal(), 0.5), 1.0),
    "logits of 1e2, just over the limit of unshifted sums": (
        Shape(),
        Attention(Causal(), 0.5),
        40.0,
    ),
    "logits of 1e4": (Shape(), Attention(Causal(), 0.5), 1e4),
    "logits of 1e-9": (Shape(), Attention(Causal(), 0.5), 1e-9),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.first_look(6)
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
    # dP = (8, 16), D = 14: dS = (-1.5, 1.5)
    expected |= {"dq": [1.5 * log3], "dk": [-1.5 * log3, 1.5 * log3]}
    for name, values in expected.items():
        assert as_double(getattr(found, name)).flatten().tolist() == pytest.approx(
            values, rel=4 * U, abs=0
        )
    assert isinstance(found.lse[0][0][0], mpf)


@pytest.mark.parametrize(
    "attention", [Attention(Causal(), 0.6, Softcap(2.0)), Attention(Dense(50, 2), -0.6)], ids=str
)
def test_backward_is_the_finite_difference_of_forward(attention):
    given = operands(
        Shape(batch=1, heads_q=2, heads_kv=1, seqlen_q=3, seqlen_kv=4, head_dim=2, head_dim_v=2),
        attention,
    )

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return forward(q, k, v, attention).out

        @staticmethod
        def backward(ctx, dout):
            gradients = backward(*ctx.saved_tensors, dout, attention)
            return gradients.dq, gradients.dk, gradients.dv

    assert torch.autograd.gradcheck(
        Function.apply, tuple(x.requires_grad_() for x in (given.q, given.k, given.v))
    )
