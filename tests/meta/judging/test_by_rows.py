"""Row-wise computations in parts, and what rows see by segments: the same as of whole tensors."""

from __future__ import annotations

import math

import pytest
import torch

from references.masks import Causal, Documents, Lengths, Prefix, Window
from references.positions import Sizes
from verify.judging import by_rows, truth
from verify.judging.by_rows import all_finite, key_rows, norms, sizes
from verify.oracles.gather import selected_rows
from verify.problem import Problem, visibility
from verify.problem.known_answers import gather_targets
from verify.problem.visibility import cuts, intervals, visible_range

torch.set_num_threads(1)

WHOLE = Problem(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=90, seqlen_kv=300, head_dim=32, dtype="float16"
)
MASKS = [
    Causal(),
    Causal("tl"),
    Window(20, 3),
    Window(None, 20),
    Prefix(64),
    Documents((50, 40)),
    Lengths((90, 31), (300, 0)),
    Lengths((90, 90), (300, 123)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parts_are_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 37, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 1, 5] = 0.0
    x[1, 2, 3, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[1, 0, 0] = 2.0**-20
    monkeypatch.setattr(by_rows, "_PART", 500)
    want = Sizes.of(x.double(), -1)
    found = sizes(x)
    assert torch.equal(found.least, want.least)
    assert torch.equal(found.most, want.most)
    assert torch.equal(norms(x).isnan(), x.double().norm(dim=-1).isnan())
    assert torch.equal(norms(x[:1]), x[:1].double().norm(dim=-1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_element_that_is_not_finite_is_seen(dtype: torch.dtype, value: float) -> None:
    x = torch.ones(3, 700, dtype=dtype)
    assert all_finite(x)
    for at in (0, 333, 699):
        bad = x.clone()
        bad[1, at] = value
        assert not all_finite(bad)
    assert all_finite(x[:0])


def test_selected_rows_are_those_of_the_head_and_sequence() -> None:
    p = WHOLE.but(mask=Lengths((90, 31), (300, 70)), distribution="gather")
    targets = gather_targets(p)
    v = torch.arange(2 * 2 * 300 * 3.0).view(2, 2, 300, 3)
    found, rows = selected_rows(p, v, targets), key_rows(p, targets)
    assert rows.shape == targets.shape
    for b, h, i in ((0, 0, 0), (0, 3, 89), (1, 1, 30), (1, 2, 7), (1, 3, 80)):
        key = max(int(targets[b, h, i]), 0)
        assert torch.equal(found[b, h, i], v[b, h // 2, key])


@pytest.mark.parametrize("few", [1, 10**9])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_the_range_by_segments_is_that_of_the_keys(
    mask, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By segments of several keys, and key by key."""
    monkeypatch.setattr(visibility, "_SEGMENT", few)
    p = WHOLE.but(mask=mask)
    found = intervals(p)
    assert found is not None
    assert (len(cuts(p, *found)) == p.seqlen_kv + 1) == (few > 1)
    v = torch.randn(p.shape_v, generator=torch.Generator().manual_seed(2)).half()
    low, high = visible_range(p, v)
    for b in range(p.batch):
        for i in range(p.seqlen_q):
            begin, end = int(found[0][b, i]), int(found[1][b, i])
            if begin < end:
                assert torch.equal(low[b, :, i], v[b, :, begin:end].amin(1).float())
                assert torch.equal(high[b, :, i], v[b, :, begin:end].amax(1).float())


def test_few_rows_of_long_keys_are_worth_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made from K and V counts, not the products of two rows alone; without chosen rows
    the products are all that counts."""
    asked: list[float] = []
    monkeypatch.setattr(truth, "on_device", lambda products, compute: asked.append(products))
    p = Problem(
        heads_q=4, heads_kv=2, seqlen_q=131137, seqlen_kv=131137, head_dim=64, dtype="float16"
    )
    nothing = (torch.empty(0),) * 3
    for case in (p, p.but(seqlen_kv=130)):
        truth.compute_truth(case, nothing, [], rows=torch.tensor([0, 131136]))
        truth.compute_truth(case, nothing, [])
    width = 128.0
    assert asked[0] > truth._WORTH_A_GPU > 2 * 4 * 131137 * width
    assert asked[2] < truth._WORTH_A_GPU
    assert asked[1] == p.pairs * width
    assert asked[3] == p.but(seqlen_kv=130).pairs * width


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_so_is_one_of_8_bits(dtype: torch.dtype) -> None:
    x = torch.ones(3, 70)
    assert all_finite(x.to(dtype))
    x[1, 69] = math.nan
    assert not all_finite(x.to(dtype))
    assert all_finite(x.to(dtype)[:0])
