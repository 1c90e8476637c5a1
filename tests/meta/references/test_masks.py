"""Masks: names parse back, intervals agree with predicates, and hand-drawn pictures say what each
convention means."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.masks import (
    GALLERY,
    Causal,
    Dense,
    Documents,
    Full,
    Intersection,
    Lengths,
    Mask,
    MaskNameError,
    Prefix,
    Window,
    intersect,
    parse_mask,
    picture,
)

LENGTHS = st.integers(0, 9)
SIDES = st.none() | st.integers(0, 6)
ALIGNMENTS = st.sampled_from(["br", "tl"])
BATCH = 2
ATOMS: st.SearchStrategy[Mask] = st.one_of(
    st.just(Full()),
    st.builds(Causal, ALIGNMENTS),
    st.builds(Window, SIDES, SIDES, ALIGNMENTS),
    st.builds(Lengths, *(st.tuples(*[LENGTHS] * BATCH) for _ in range(2))),
    st.builds(Documents, st.lists(st.integers(0, 5), max_size=4).map(tuple)),
    st.builds(Prefix, LENGTHS),
    st.builds(Dense, st.integers(0, 100), st.integers(0, 2**32 - 1)),
)
MASKS = st.lists(ATOMS, min_size=1, max_size=3).map(lambda parts: intersect(*parts))


@pytest.mark.parametrize("mask", GALLERY, ids=lambda mask: mask.name)
def test_gallery_names_parse_back(mask):
    assert parse_mask(mask.name) == mask


@given(MASKS)
def test_every_name_parses_back_and_is_safe_in_a_shell(mask):
    assert parse_mask(mask.name) == mask
    assert not set(mask.name) - set("abcdefghijklmnopqrstuvwxyz0123456789._+")


@settings(deadline=None)
@given(MASKS, LENGTHS, LENGTHS)
def test_interval_agrees_with_mod(mask, seqlen_q, seqlen_kv):
    dense = mask.dense(BATCH, 2, seqlen_q, seqlen_kv)
    assert dense.shape == (BATCH, 2, seqlen_q, seqlen_kv)
    if any(isinstance(part, Dense) for part in mask.atoms):
        with pytest.raises(ValueError, match="do not see one interval"):
            mask.row_bounds(BATCH, seqlen_q, seqlen_kv)
        return
    low, high = mask.row_bounds(BATCH, seqlen_q, seqlen_kv)
    assert low.dtype == high.dtype == torch.int32
    assert bool(((low >= 0) & (low <= high) & (high <= seqlen_kv)).all())
    k = torch.arange(seqlen_kv)
    spelled_out = (k >= low[..., None]) & (k < high[..., None])
    assert torch.equal(dense, spelled_out[:, None].expand_as(dense))


@settings(deadline=None)
@given(st.lists(ATOMS, min_size=1, max_size=3), LENGTHS, LENGTHS)
def test_intersection_is_the_conjunction_of_its_parts(parts, seqlen_q, seqlen_kv):
    dense = intersect(*parts).dense(BATCH, 2, seqlen_q, seqlen_kv)
    expected = torch.ones_like(dense)
    for part in parts:
        expected = expected & part.dense(BATCH, 2, seqlen_q, seqlen_kv)
    assert torch.equal(dense, expected)


@given(st.lists(ATOMS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_intersections_are_canonical(parts, random):
    shuffled = [*parts, random.choice(parts)]
    random.shuffle(shuffled)
    mask = intersect(*parts)
    assert intersect(*shuffled) == mask
    assert intersect(mask, mask) == mask == (mask & Full())
    assert hash(intersect(*shuffled)) == hash(mask)


def test_intersection_of_one_part_is_that_part():
    assert intersect() == Full()
    assert intersect(Full(), Causal()) == Causal()
    assert Causal() & Causal() == Causal()
    assert Causal() & Window(1, 0) & Prefix(2) == Intersection((Causal(), Window(1, 0), Prefix(2)))


# One line a query, one character a key.  Drawn by hand from the definitions, not printed by the
# code.
DRAWN = {
    ("causal", 2, 4): "███· ████",
    ("causal", 4, 2): "·· ·· █· ██",
    ("causal.tl", 2, 4): "█··· ██··",
    ("causal.tl", 4, 2): "█· ██ ██ ██",
    # Inclusive: left 1 sees the diagonal and the key before it, right 1 the key behind it too.
    ("window.1.0", 4, 4): "█··· ██·· ·██· ··██",
    ("window.1.1", 4, 4): "██·· ███· ·███ ··██",
    ("window.0.0", 3, 3): "█·· ·█· ··█",
    ("window.0.inf", 3, 4): "·███ ··██ ···█",
    ("window.inf.0", 2, 4): "███· ████",
    ("window.inf.inf", 2, 3): "███ ███",
    ("window.1.0", 2, 4): "·██· ··██",
    ("window.1.0.tl", 2, 4): "█··· ██··",
    ("window.1.0", 4, 2): "·· ·· █· ██",
    ("window.1.0.tl", 4, 2): "█· ██ ·█ ··",
    ("lengths.2.3", 3, 4): "███· ███· ····",
    ("lengths.3.0", 3, 2): "·· ·· ··",
    ("causal+lengths.9.1", 3, 3): "█·· █·· █··",
    ("documents.2_1", 4, 4): "██·· ██·· ··██ ··██",
    ("documents.2_3", 2, 5): "··███ ··███",
    ("documents.1_2", 4, 3): "··· █·· ·██ ·██",
    ("causal+documents.2_2", 4, 4): "█··· ██·· ··█· ··██",
    ("prefix.2", 4, 4): "██·· ██·· ███· ████",
    ("prefix.1", 3, 2): "█· █· ██",
    ("prefix.0", 2, 2): "█· ██",
    ("full", 2, 3): "███ ███",
}


@pytest.mark.parametrize(("name", "seqlen_q", "seqlen_kv"), DRAWN, ids=str)
def test_convention(name, seqlen_q, seqlen_kv):
    assert (
        picture(parse_mask(name), seqlen_q, seqlen_kv).split()
        == DRAWN[name, seqlen_q, seqlen_kv].split()
    )


def test_lengths_differ_per_batch():
    dense = Lengths((2, 1), (1, 3)).dense(2, 1, 2, 3)
    assert dense.tolist() == [
        [[[True, False, False], [True, False, False]]],
        [[[True, True, True], [False, False, False]]],
    ]


def test_lengths_must_fit_the_batch():
    Lengths((1, 2), (3, 4)).check(2)
    for mask in (
        Lengths((1, 2), (3, 4)),
        Causal() & Lengths((1, 2), (3, 4)),
        Lengths((1,), (1, 1)),
    ):
        with pytest.raises(ValueError, match="for a batch of 3"):
            mask.check(3)


def test_dense_is_seeded_and_differs_over_batches_and_heads():
    mask = Dense(30, 5)
    seen = mask.dense(3, 4, 64, 96)
    assert torch.equal(seen, mask.dense(3, 4, 64, 96))
    # a pair does not depend on the shape
    assert torch.equal(seen[:2, :3, :40, :50], mask.dense(2, 3, 40, 50))
    heads = seen.flatten(0, 1)
    assert all(not torch.equal(heads[i], heads[j]) for i in range(12) for j in range(i))
    assert not torch.equal(seen, Dense(30, 6).dense(3, 4, 64, 96))
    # 73728 pairs, binomial: six standard deviations are 6 sqrt(0.3 * 0.7 / 73728) = 0.0101.
    assert abs(seen.double().mean().item() - 0.3) < 0.0101
    assert not Dense(0, 5).dense(1, 1, 32, 32).any()
    assert Dense(100, 5).dense(1, 1, 32, 32).all()


BAD_NAMES = (
    "",
    "+",
    "causal+",
    "Causal",
    "causal.br",
    "causal.tl.tl",
    "window",
    "window.1",
    "window.1.x",
    "window.1.2.br",
    "lengths.1",
    "lengths.a.b",
    "documents",
    "documents.1__2",
    "prefix",
    "prefix.1.2",
    "dense.50",
    "dense.1.5.2",
    "full.1",
    "full causal",
)


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_bad_names_are_refused(name):
    with pytest.raises(MaskNameError, match="not a mask"):
        parse_mask(name)
