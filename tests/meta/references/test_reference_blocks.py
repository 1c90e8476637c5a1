"""The fp64 reference is the same however it is cut into blocks, rows and columns, whatever lies
where nothing is read."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from references.attention import backward, forward, query_gradient
from references.definition import Attention
from references.masks import Causal, Dense, Documents, Full, Lengths, Window, parse_mask
from references.row_blocks import row_blocks
from references.score_mods import Softcap
from tests.meta.references.test_references import (
    INF,
    NAN,
    Shape,
    U,
    operands,
    tensors,
)

SHAPE = Shape(seqlen_q=37, seqlen_kv=53, head_dim=8, head_dim_v=5)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of fp64 sums of order 1 over at most a hundred terms."""
    torch.testing.assert_close(found, expected, rtol=2**10 * U, atol=2**10 * U)


@pytest.mark.parametrize("blocks", [(None, None), (1, 53), (37, 1), (5, 7), (16, 64)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Window(5, 2), Documents((20, 13)), Causal() & Dense(30, 1)],
    ids=lambda m: m.name,
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
    attention = Attention(Causal(), 0.4, Softcap(3.0))
    given = operands(replace(SHAPE, batch=3), attention)
    whole = next(row_blocks(given.q, given.k, given.v, attention))
    times = torch.zeros(3 * 4, 37)
    for block in row_blocks(given.q, given.k, given.v, attention, budget=budget):
        heads, rows = block.index
        times[block.index] += 1
        assert block.scores.numel() <= max(budget, 2 * 53)
        assert block.rows.tolist() == list(range(37))[rows]
        for name in (
            "scores",
            "scaled",
            "magnitude",
            "probabilities",
            "row_max",
            "row_sum",
            "out",
            "lse",
        ):
            close(getattr(block, name), getattr(whole, name)[heads, rows])
        assert torch.equal(block.visible, whole.visible[heads, rows])
    assert bool((times == 1).all())


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Window(5, 2), Lengths((30, 37), (53, 0)), Causal() & Dense(30, 1)],
    ids=lambda m: m.name,
)
def test_passing_blocks_hold_what_is_seen(mask):
    """Left out are keys that no row sees, and no other quantity changes; the last block's memory is
    the first one's."""
    attention = Attention(mask, 0.4, Softcap(3.0))
    given = operands(SHAPE, attention)
    whole = next(row_blocks(given.q, given.k, given.v, attention))
    memory, shorter = set(), 0
    for block in row_blocks(given.q, given.k, given.v, attention, budget=53 * 2 * 5, passing=True):
        memory |= {block.scores.data_ptr()} if block.scores.numel() else set()
        (heads, rows), keys = block.index, block.keys
        outside = torch.ones(53, dtype=torch.bool)
        outside[keys] = False
        shorter += int(outside.sum())
        assert not bool(whole.visible[heads, rows][..., outside].any())
        assert torch.equal(block.visible, whole.visible[heads, rows, keys])
        for name in ("scores", "scaled", "magnitude", "probabilities"):
            close(getattr(block, name), getattr(whole, name)[heads, rows, keys])
        for name in ("row_max", "row_sum", "out", "lse"):
            close(getattr(block, name), getattr(whole, name)[heads, rows])
    assert len(memory) == 1
    assert (shorter == 0) == (mask == Full())


def test_gauges():
    """Each field of a row block, from its definition, with empty rows and a softcap."""
    attention = Attention(Lengths((30, 37), (53, 20)), -0.4, Softcap(3.0))
    given = operands(SHAPE, attention)
    (block,) = row_blocks(given.q, given.k, given.v, attention)
    q, k, v = (
        x.flatten(0, 1)
        for x in (given.q, given.k.repeat_interleave(2, 1), given.v.repeat_interleave(2, 1))
    )
    visible = attention.mask.dense(2, 4, 37, 53).flatten(0, 1)
    scaled = -0.4 * q @ k.mT
    empty = ~visible.any(-1)
    assert torch.equal(block.visible, visible)
    close(block.scaled, scaled.masked_fill(~visible, -INF))
    close(block.scores, (3 * torch.tanh(scaled / 3)).masked_fill(~visible, -INF))
    close(block.magnitude, (0.4 * q.abs() @ k.abs().mT).masked_fill(~visible, 0.0))
    assert torch.equal(block.row_max, block.scores.amax(-1))
    assert torch.equal(block.row_sum == 0, empty)
    assert torch.equal(block.lse == -INF, empty)
    close(block.probabilities.sum(-1), 1.0 - empty.double())
    close(block.probabilities, (block.scores - block.lse[..., None]).exp().nan_to_num(0.0))
    close(block.out, block.probabilities @ v)
    close(block.values, torch.where(visible.any(1)[..., None], v, 0.0))
    for sizes, of, dim in (
        (block.query_sizes, q, -1),
        (block.key_sizes, k, 1),
        (block.value_sizes, v, 1),
    ):
        assert torch.equal(sizes.most, of.abs().amax(dim, keepdim=True))
        assert torch.equal(sizes.least, of.abs().amin(dim, keepdim=True))
    scaled = next(row_blocks(given.q, given.k, given.v, Attention(Full(), 0.4)))
    assert scaled.scaled is scaled.scores


CHOICES = (
    slice(3, 20),
    slice(None, None, 4),
    torch.tensor([36, 0, 5, 5, 17]),
    torch.tensor([], dtype=torch.int64),
)


@pytest.mark.parametrize("chosen", CHOICES, ids=["slice", "every fourth", "positions", "none"])
@pytest.mark.parametrize("mask", [Causal(), Window(4, 0), Dense(20, 1)], ids=lambda m: m.name)
def test_chosen_rows_and_columns_equal_the_whole(mask, chosen):
    attention = Attention(mask, 0.4, Softcap(5.0))
    given = operands(SHAPE, attention)
    whole, gradients = (
        forward(given.q, given.k, given.v, attention),
        backward(*tensors(given), attention),
    )
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
@pytest.mark.parametrize("score_mod", [None, Softcap(2.0)], ids=str)
def test_what_masked_pairs_hold_has_no_effect(poison, score_mod):
    """Keys past a length, queries past theirs, and a key that only later queries see."""
    attention = Attention(Causal() & Lengths((30, 37), (53, 40)), 0.4, score_mod)
    given = operands(SHAPE, attention)
    whole, gradients = (
        forward(given.q, given.k, given.v, attention),
        backward(*tensors(given), attention),
    )
    q, k, v, dout = (x.clone() for x in tensors(given))
    q[0, :, 30:], dout[0, :, 30:] = poison, poison
    k[1, :, 40:], v[1, :, 40:] = poison, poison
    found, poisoned = (
        forward(q, k, v, attention),
        backward(q, k, v, dout, attention, block_q=16, block_kv=16),
    )
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
    textbook_out = torch.cat(
        [block.out for block in row_blocks(given.q, given.k, v, attention)]
    ).view(found.shape)
    for out in (found, textbook_out):
        # Bottom right: query i sees keys up to i + 16.
        assert torch.equal(out[:, :, 4:10, 0], torch.full_like(out[:, :, 4:10, 0], INF))
        assert bool(out[:, :, 10:, 0].isnan().all())
        assert torch.equal(out[:, :, 6:, 1], torch.full_like(out[:, :, 6:, 1], -INF))
        assert bool(out[:, :, 8:, 2].isnan().all())
        close(out[:, :, :4], whole[:, :, :4])
        close(out[..., 3:], whole[..., 3:])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_inputs_of_every_dtype_are_taken_exactly(dtype):
    attention = Attention(Causal(), 0.4)
    given = operands(SHAPE, attention)
    narrow = tuple(x.to(dtype) for x in tensors(given))
    wide = tuple(x.double() for x in narrow)
    chosen = torch.tensor([36, 2, 7])
    assert torch.equal(forward(*narrow[:3], attention).out, forward(*wide[:3], attention).out)
    assert torch.equal(
        forward(*narrow[:3], attention, rows=chosen).out,
        forward(*wide[:3], attention, rows=chosen).out,
    )
    assert torch.equal(
        next(row_blocks(*narrow[:3], attention)).out, next(row_blocks(*wide[:3], attention)).out
    )
    for x, y in zip(
        *(vars(backward(*inputs, attention)).values() for inputs in (narrow, wide)), strict=True
    ):
        assert torch.equal(x, y)


def test_strides_do_not_matter():
    """Stride 0 over batch and heads, sequence-major storage, and a pitch between rows; the inputs
    are left as they were."""
    attention = Attention(Causal(), 0.4)
    given = operands(SHAPE, attention)
    q = given.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = given.k[:, :1].expand_as(given.k)
    v = torch.cat([given.v, given.v], -1)[:1, ..., :5].expand_as(given.v)
    dout = given.dout[:1, :1].expand_as(given.dout)
    strided, plain = (
        (q, k, v, dout),
        tuple(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, dout)),
    )
    for run in (forward, lambda *x: next(row_blocks(*x)), backward):
        count = 4 if run is backward else 3
        found, expected = (
            vars(run(*strided[:count], attention)),
            vars(run(*plain[:count], attention)),
        )
        assert all(
            torch.equal(found[name], x)
            for name, x in expected.items()
            if isinstance(x, torch.Tensor)
        )
    assert all(torch.equal(x, y) for x, y in zip(strided, plain, strict=True))


@pytest.mark.parametrize(
    "shape", [Shape(seqlen_kv=0), Shape(seqlen_q=0), Shape(seqlen_q=0, seqlen_kv=0)], ids=str
)
@pytest.mark.parametrize("mask", [Full(), Causal(), Dense(50, 1)], ids=lambda m: m.name)
def test_zero_lengths(mask, shape):
    attention = Attention(mask, 0.4, Softcap(2.0))
    given = operands(shape, attention)
    found, gradients = (
        forward(given.q, given.k, given.v, attention),
        backward(*tensors(given), attention),
    )
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


@pytest.mark.for_ci
@pytest.mark.parametrize(
    "mask", [parse_mask("window.100.0"), parse_mask("causal+dense.50.1")], ids=lambda m: m.name
)
def test_memory_does_not_grow_with_the_square(mask):
    """At 8192 keys a head's scores are 512 MiB; no single tensor may exceed a tile of scores, or
    the default budget."""
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
    "for a batch of 1": lambda: forward(Q, K, K, Attention(Lengths((1, 2), (3, 4)), 1.0)),
    "rows: give a slice": lambda: forward(Q, K, K, FULL, rows=torch.tensor([4])),
    "positions in 0..3": lambda: forward(Q, K, K, FULL, rows=torch.tensor([-1])),
    "one-dimensional tensor": lambda: forward(
        Q, K, K, FULL, rows=torch.tensor([True, False, True, False])
    ),
    "columns: give a slice": lambda: backward(Q, K, K, Q, FULL, columns=torch.tensor([5])),
}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_named(message):
    with pytest.raises(ValueError, match=message):
        MISFITS[message]()
