"""Edge cases: they are inside every support, few, and small enough for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from references.masks import Causal, Documents
from tests.harness import reference_kernel
from tests.harness.fake_trials import DECLARED
from tests.harness.reference_kernel import Hand, tried_by
from verify.campaign import edge_cases as edge_cases_module
from verify.campaign.edge_cases import drawn, edge_cases, edges
from verify.campaign.targets import Target
from verify.oracles import bound, groups
from verify.problem import Problem
from verify.problem.refusal import inside
from verify.problem.sampling import draws
from verify.problem.strategies import Limits
from verify.variant import MASK_KINDS, Config, Support

WHOLE = replace(DECLARED.support, masks=MASK_KINDS, min_seqlen=0)
SMALL = Limits(seqlen=70, long_seqlen=70, heads=4, batch=2, pairs=5000, elements=40_000)
SUPPORTS = {
    "whole": WHOLE,
    "full only": replace(WHOLE, masks=("full",)),
    "square": replace(WHOLE, cross_lengths=False),
    "short": replace(WHOLE, max_seqlen=512),
    "with keys": replace(WHOLE, min_seqlen=1),
    "default scale, packed, wide": replace(
        WHOLE, scales="default", layouts="contiguous", head_dims=(64, 128)
    ),
    "one head dim": replace(WHOLE, head_dims=(64,), separate_head_dim_v=True),
}


def asked(support: Support, group: str, dtype: str = "float16") -> list[Problem]:
    declaration = replace(DECLARED, support=support, entries=("forward", "backward"))
    return edges(Target(declaration, Config(block_m=32, block_n=128), dtype, group))


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_edges_are_inside_the_support(support: Support, group: str) -> None:
    cases = asked(support, group)
    assert all(inside(support, problem) for problem in cases)
    assert len(cases) == len(set(cases)) <= 50
    assert sum(problem.pairs for problem in cases) < 850_000
    assert len(asked(support, group, "float32")) <= 7  # one dtype is enough for the others


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
def test_dtypes_share_their_draws(group: str) -> None:
    support = replace(WHOLE, dtypes=("float32", "bfloat16", "float8_e4m3fn"))
    other = replace(support, dtypes=("float16",))
    for each in (support, other, replace(other, dtypes_out=("float32",))):
        declaration = replace(DECLARED, support=each, entries=("forward", "backward"))
        for dtype in each.dtypes:
            target = Target(declaration, Config(block_m=32, block_n=128), dtype, group)
            assert drawn(target, 40, 0) == draws(target.problems, 40, 0)


@pytest.mark.for_ci
def test_groups_share_small_draws_only_where_they_draw_the_same() -> None:
    declaration = replace(DECLARED, support=WHOLE, entries=("forward", "backward"))
    names = [name for name, group in groups().items() if not group.outside and not group.asks]
    for dtype in WHOLE.dtypes[:2]:
        for name in names:
            target = Target(declaration, Config(block_m=32, block_n=128), dtype, name)
            assert drawn(target, 5, 0, SMALL) == draws(target.within(SMALL), 5, 0), name


@pytest.mark.parametrize("group", ["accuracy", "gather", "slice"])
def test_variants_of_one_support_share_their_draws(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(strategy: SearchStrategy[Problem], count: int, number: int = 0) -> list[Problem]:
        asked.append(count)
        return draws(strategy, count, number)

    monkeypatch.setattr(edge_cases_module, "draws", counted)
    monkeypatch.setattr(edge_cases_module, "_drawn", {})
    found = []
    for name, block in (("one", 64), ("other", 128)):
        declaration = replace(DECLARED, ref=name, name=name, support=WHOLE)
        target = Target(declaration, Config(block_m=32, block_n=block), WHOLE.dtypes[0], group)
        found.append(drawn(target, 5, 0, SMALL))
    assert asked == [5]
    assert found[0] == found[1]


def test_edges_are_where_random_lengths_hardly_get() -> None:
    forward, backward = asked(WHOLE, "accuracy"), asked(WHOLE, "gradients")
    assert [(p.seqlen_q, p.seqlen_kv, p.mask.name) for p in forward] == [
        (0, 33, "full"),
        (33, 0, "full"),
        (24, 40, "full"),
        (16, 48, "full"),
        (96, 160, "full"),
        (64, 320, "full"),
        (128, 384, "full"),
        (256, 257, "causal"),
        (256, 255, "causal"),
        (128, 254, "causal"),
        (17, 517, "window.275.0"),
        (517, 17, "window.275.0.tl"),
        (64, 192, "causal"),
        (192, 64, "causal"),
        (192, 384, "window.64.64"),
        (192, 384, "window.63.63"),
        (136, 264, "window.126.200"),
        (40, 100, "window.20.inf"),
        (40, 100, "window.inf.20"),
        (33, 65, "window.20.3+window.5.9"),
        (192, 320, "documents.128_128_64"),
        (75, 75, "documents.0_1_2_0_3_1_1_5_0_0_7_8_4_1_0_9_16_17_0"),
        (128, 320, "prefix.256"),
        (128, 384, "full"),
        (192, 64, "causal.tl"),
        (64, 192, "window.100.70"),
        (64, 192, "lengths.64_32.64_160"),
        (1, 300, "window.2.1"),
        (1, 300, "window.5.inf"),
        (32, 64, "full"),
        (64, 32, "full"),
        (33, 33, "full"),
        (8, 8, "full"),
        (9, 9, "full"),
        (9, 41, "full"),
        (1, 33, "full"),
        (5, 33, "full"),
        (5, 133, "causal"),
        (40, 17, "causal"),
        (1, 133, "window.63.0"),
        (5, 133, "window.63.0"),
        (5, 133, "causal+lengths.5_3.128_70"),
        (5, 133, "window.63.0+lengths.5_3.128_70"),
        *[(33, 33, "full")] * 2,
        (1, 1152, "full"),
        (1, 1152, "lengths.1_1.1088_192"),
        (1, 32790, "window.70.0"),
        (1041, 17, "documents.17"),
    ]
    assert set(forward) - set(backward) == {
        problem for problem in forward if problem.seqlen_kv > 1024
    }
    assert set(backward) <= set(forward)


def test_documents_past_the_eighth_and_groups_past_the_second_are_asked() -> None:
    """No draw has as many documents, and in an interpreter none has as many groups of heads."""
    declaration = replace(DECLARED, support=WHOLE, interpreted=True)
    target = Target(declaration, Config(block_m=32, block_n=128), "float16", "accuracy")
    for problems, some in ((edges(target), True), (drawn(target, 300, 0), False)):
        crowds = [
            p
            for p in problems
            if p.mask.kind == "documents" and _first_documents(p, 8) != p.mask.name
        ]
        assert bool(crowds) is some
        grouped = [p for p in problems if p.heads_kv > 2 and p.group > 1 and p.batch > 2]
        assert bool(grouped) is some


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_pair_of_tiles_is_whole_but_for_its_first_row_and_last_key(size: int) -> None:
    """A kernel that takes such a tile of keys for whole is wrong in that one pair."""

    def hidden(p: Problem) -> list[Tensor]:
        seen = p.mask.dense(1, 1, p.seqlen_q, p.seqlen_kv)[0, 0]
        rows, keys = (n // size * size for n in seen.shape)
        tiles = seen[:rows, :keys].unfold(0, size, size).unfold(1, size, size)
        return [~tile for tile in tiles.flatten(0, 1)]

    alone = torch.zeros(size, size, dtype=torch.bool)
    alone[0, -1] = True
    causal = [p for p in asked(WHOLE, "accuracy") if p.mask == Causal()]
    assert any(torch.equal(alone, tile) for p in causal for tile in hidden(p))


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
def test_keys_of_one_head_and_values_of_one_sequence_are_asked(group: str) -> None:
    """Any expanded tensor fills the bin, as a Q of one sequence does."""
    support = replace(WHOLE, grouped_heads=False, layouts="aligned")
    found = [p for p in asked(support, group) if p.layouts["k"].expand == "h"]
    assert [(p.batch, p.heads_kv, p.layouts["v"].expand) for p in found] == [(2, 2, "b")]
    contiguous = asked(replace(support, layouts="contiguous"), group)
    assert not any(layout.expand for p in contiguous for layout in p.layouts.values())


def _first_documents(problem: Problem, count: int) -> str:
    """The name of the mask as a table of so many documents holds it."""
    (mask,) = problem.mask.atoms
    assert isinstance(mask, Documents)
    kept = mask.lengths[:count]
    rest = sum(mask.lengths[count:])
    return Documents((*kept, rest) if rest else kept).name


def test_what_lies_before_the_edge_is_hidden_where_a_mask_can() -> None:
    *_, wide, tall = asked(WHOLE, "accuracy")
    seen = tall.mask.dense(1, 1, tall.seqlen_q, tall.seqlen_kv)[0, 0].any(-1)
    assert seen.nonzero().flatten().tolist() == list(range(1024, 1041))
    low, high = wide.mask.row_bounds(1, 1, wide.seqlen_kv)
    assert int(low) < 1 << 15 < int(high) == wide.seqlen_kv
    *_, wide = asked(SUPPORTS["full only"], "accuracy")
    assert wide.mask.name == "full"


def test_edges_reach_past_what_is_drawn() -> None:
    """There are more heads, rows of a group, sequences and pairs of both than a table of 32, 128 or
    256 entries; scales far from 1; a window that contains a whole tile; three layouts at once."""
    cases = asked(WHOLE, "accuracy")
    assert max(p.batch for p in cases) > 32
    assert max(p.batch * p.heads_q for p in cases) > 256
    assert {p.seqlen_q for p in cases if p.group > 32} == {1, 5}
    assert {abs(p.scale) for p in cases} >= {32.0, 2.0**-12}
    assert any(len({p.layout_q.order, p.layout_k.order, p.layout_v.order}) == 3 for p in cases)
    window = next(p for p in cases if p.mask.name == "window.275.0")
    seen = window.mask.dense(1, 1, window.seqlen_q, window.seqlen_kv)[0, 0]
    assert [bool(tile.all()) for tile in seen[:, :512].unflatten(1, (4, 128)).unbind(1)] == [
        False,
        False,
        True,
        False,
    ]


def low_lse(group: str, dtype: str, support: Support, kind: str = "full") -> list[Problem]:
    """The edges with that kind of mask in which a key of zeros outweighs all others."""
    return [
        p
        for p in asked(support, group, dtype)
        if p.distribution == "negative_lse" and p.mask.kind == kind
    ]


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["whole", "square"])
def test_every_dtype_meets_tiles_that_are_filled_in_part(group: str, dtype: str, name: str) -> None:
    """For any tile, there is an edge case that fails a kernel which does not mask the end at
    multiples of a part of its tile."""
    cases = low_lse(group, dtype, SUPPORTS[name])
    for tile in (16, 32, 64, 80, 96, 112, 128, 160, 192, 256):
        for part in (n for n in (8, 16, 32, 64, 128) if n < tile and tile % n == 0):
            assert any(p.seqlen_kv % part == 0 < p.seqlen_kv % tile for p in cases), (tile, part)
            assert any(p.seqlen_q % part == 0 < p.seqlen_q % tile for p in cases), (tile, part)


def test_so_do_other_head_dims_and_masks_that_do_not_hide_the_end() -> None:
    support = replace(WHOLE, head_dims=range(8, 257))
    cases = low_lse("gradients", "float16", support)
    assert {p.head_dim: p.scale for p in cases} == {dim: dim**-0.5 for dim in (16, 64, 128, 256)}
    for dim in (64, 128, 256):
        lengths = [(p.seqlen_q, p.seqlen_kv) for p in cases if p.head_dim == dim]
        assert {(rows & -rows, keys & -keys) for rows, keys in lengths} == {(32, 64), (64, 32)}
    for kind in ("causal", "window"):
        problem = low_lse("gradients", "float16", WHOLE, kind)[0]
        wider = problem.mask.mod(problem.seqlen_q, problem.seqlen_kv)
        assert bool(
            wider(
                torch.tensor(0),
                torch.tensor(0),
                torch.arange(problem.seqlen_q),
                torch.tensor(problem.seqlen_kv),
            ).any()
        )
        assert (problem.seqlen_q & -problem.seqlen_q, problem.seqlen_kv & -problem.seqlen_kv) == (
            64,
            64,
        )
    (problem,) = low_lse("gradients", "float16", WHOLE, "lengths")
    assert {n & -n for n in problem.kv_lengths()} == {32, 64}
    assert max(problem.kv_lengths()) < problem.seqlen_kv


def test_masks_have_their_corners_where_tiles_have_theirs() -> None:
    """The corner of the first row of a tile decides where the loop over keys begins; that of the
    last row decides where it needs no mask."""
    whole = [
        p
        for p in asked(WHOLE, "gradients")
        if p.seqlen_q % 64 == p.seqlen_kv % 64 == 0 < p.seqlen_q * p.seqlen_kv
    ]
    for kind, tile in (
        ("window", 64),
        ("documents", 64),
        ("documents", 128),
        ("prefix", 64),
        ("prefix", 128),
    ):
        corners = set()
        for problem in (p for p in whole if p.mask.kind == kind):
            low, high = (
                bound[0]
                for bound in problem.mask.row_bounds(1, problem.seqlen_q, problem.seqlen_kv)
            )
            for row in (0, tile - 1):
                inside = low[row] < high[row] < problem.seqlen_kv
                corners |= {("low", row)} if inside and low[row] > 0 == low[row] % tile else set()
                corners |= {("high", row)} if inside and high[row] % tile == 0 else set()
        both = {(side, row) for side in ("low", "high") for row in (0, tile - 1)}
        assert corners >= ({("high", 0)} if kind == "prefix" else both), (kind, tile)
    offsets = {p.seqlen_kv - p.seqlen_q for p in whole if p.mask.name == "causal"}
    assert {n > 0 for n in offsets if n % 128 == 0} == {True, False}
    assert any(
        p.mask.kind == "full"
        and p.distribution == "normal"
        and p.seqlen_q % 128 == p.seqlen_kv % 128 == 0
        for p in whole
    )


def test_few_flags_meet_that_random_ones_hardly_combine() -> None:
    cases = asked(replace(WHOLE, separate_head_dim_v=True, score_mods=("softcap",)), "gradients")
    assert [p.mask.name for p in cases if p.score_mod and p.scale < 0] == ["causal"]
    other = [
        p for p in cases if p.head_dim != p.head_dim_v and p.group > 1 and p.mask.kind == "causal"
    ]
    assert {p.head_dim > p.head_dim_v: p.scale == p.head_dim**-0.5 for p in other} == {
        False: True,
        True: True,
    }
    assert not [p for p in asked(WHOLE, "gradients") if p.head_dim != p.head_dim_v or p.score_mod]


def test_a_few_rows_of_grouped_heads_meet_masks_and_many_keys() -> None:
    grouped = [p for p in asked(WHOLE, "accuracy") if 1 < p.group < 8]
    # a row of one head is in another place of the tile than that of the next
    assert all(p.group == 3 for p in grouped)
    assert {atom.kind for p in grouped if p.seqlen_q == 5 for atom in p.mask.atoms} == {
        "causal",
        "window",
        "lengths",
    }
    assert any(p.mask.kind == "causal" and p.seqlen_q > p.seqlen_kv + 16 for p in grouped)
    decode = [p for p in grouped if p.seqlen_q == 1]
    assert any(p.heads_kv > 1 for p in decode if p.seqlen_kv > 1024)
    assert {(p.mask.kind, p.seqlen_kv > 1024) for p in decode} == {
        ("window", False),
        ("full", True),
        ("lengths", True),
    }
    assert all(p.seqlen_kv % 128 == 0 for p in decode if p.seqlen_kv > 1024)
    without = asked(replace(WHOLE, intersections=False), "accuracy")
    assert "lengths.5_3.128_70" in {p.mask.name for p in without}


@pytest.mark.parametrize("group", ["accuracy", "gradients"])
def test_configs_with_larger_tiles_are_asked_for_tiles_that_are_filled_in_part(group: str) -> None:
    configs = Config(block_m=128, block_n=128), Config(block_m=64, block_n=32)
    declaration = replace(DECLARED, configs=configs, entries=("forward", "backward"))
    large, fine = (edge_cases(Target(declaration, config, "float16", group)) for config in configs)
    assert len(large) == 5
    assert set(large) < set(fine)


def test_hidden_tiles_before_low_scores_are_asked_of_large_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel whose maximum becomes 0 in a tile that is hidden loses rows with low scores."""
    monkeypatch.setattr(reference_kernel, "BLOCK", 128)
    low = [p for p in asked(WHOLE, "accuracy") if p.distribution == "negative_lse"]
    hidden = [p for p in low if (p.seqlen_q, p.seqlen_kv) == (1, 300)]
    assert [p.mask.name for p in hidden] == ["window.2.1", "window.5.inf"]
    for problem in hidden:
        assert bound.judge(tried_by(Hand(), problem)).finding is None
        assert bound.judge(tried_by(HiddenIsZero(), problem)).finding is not None
    others = [p for p in low if p.seqlen_q * p.seqlen_kv < 20_000 and p not in hidden]
    assert len(others) > 6
    assert all(bound.judge(tried_by(HiddenIsZero(), p)).finding is None for p in others[:6])


class HiddenIsZero(Hand):
    """The maximum of a row is 0, not -inf, behind a tile of which it sees nothing."""

    def forward(self, p: Problem, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = super().forward(p, given)
        seen = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
        first = seen.int().argmax(-1) // reference_kernel.BLOCK
        lost = seen.any(-1) & (first > 0) & (found["lse"] < -88)  # exp(lse) is flushed
        found["out"] = found["out"].masked_fill(lost[..., None], 0.0)
        return found


def test_factors_of_a_third_block_of_rows_and_keys_are_asked() -> None:
    support = replace(DECLARED.support, descalings=("head", "block64", "block128"))
    target = Target(replace(DECLARED, support=support), Config(block_n=32), "float16", "accuracy")
    asked = [p for p in edges(target) if p.quantisation.keys]
    assert {p.descaling for p in asked} == {"block64", "block128"}
    for problem in asked:
        shapes = problem.quantisation.stored(problem.shapes)
        assert shapes["descale_q"][2] == 3
        assert shapes["descale_k"][2] == shapes["descale_v"][2] == 5
