"""What each kind of mask says of itself is true; an incomplete one is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references.masks import (
    Atom,
    Causal,
    Documents,
    Full,
    Lengths,
    MaskNameError,
    View,
    Window,
    drawn_words,
    kind_of,
    mask_words,
    parse_mask,
)
from references.masks.base import KINDS

torch.set_num_threads(1)

WORDS = drawn_words()
LENGTH = st.integers(1, 9)


@dataclass(frozen=True)
class Small:
    """Choices for short problems."""

    draw: st.DrawFn

    def one_of(self, values):
        return self.draw(st.sampled_from(values))

    def several(self, values, most):
        return self.draw(st.lists(st.sampled_from(values), max_size=most))

    def length(self, whole):
        return self.draw(st.integers(0, whole))

    def seed(self):
        return self.draw(st.integers(0, 9))


@dataclass(frozen=True)
class Drawn:
    """A mask, drawn for 2 sequences of 4 heads of these lengths."""

    mask: Atom
    seqlen_q: int
    seqlen_kv: int

    def dense(self) -> Tensor:
        return self.mask.dense(2, 4, self.seqlen_q, self.seqlen_kv)


@st.composite
def drawn(draw: st.DrawFn, word: str) -> Drawn:
    lengths = draw(LENGTH), draw(LENGTH)
    return Drawn(kind_of(word).draw(Small(draw), word, 2, *lengths), *lengths)


every_word = pytest.mark.parametrize("word", WORDS)
quickly = settings(deadline=None, max_examples=40, database=None)


@every_word
def test_a_drawn_mask_is_what_its_kind_says(word: str) -> None:
    @quickly
    @given(drawn(word))
    def held(it: Drawn) -> None:
        mask, dense = it.mask, it.dense()
        mask.check(2)
        assert mask.word == word
        assert parse_mask(mask.name) == mask
        assert mask.name.split(".")[0] == mask.kind
        if "batch" not in mask.varies:
            assert torch.equal(dense[0], dense[1])
        if "head" not in mask.varies:
            assert torch.equal(dense, dense[:, :1].expand_as(dense))
        live = dense.any(-1, keepdim=True)
        if not mask.can_empty_rows(word, square=it.seqlen_q == it.seqlen_kv):
            assert bool(live.all())
        if not mask.by_row:
            assert torch.equal(dense, dense.any(2, keepdim=True) & live)
        bounds = None if word == "dense" else mask.row_bounds(2, it.seqlen_q, it.seqlen_kv)
        if bounds is not None:
            k = torch.arange(it.seqlen_kv)
            seen = (k >= bounds[0][..., None]) & (k < bounds[1][..., None])
            assert torch.equal(dense, seen[:, None].expand_as(dense))

    held()


@every_word
def test_masks_that_oracles_make_of_it_are_what_they_should_be(word: str) -> None:
    @quickly
    @given(drawn(word))
    def held(it: Drawn) -> None:
        mask, lengths = it.mask, (it.seqlen_q, it.seqlen_kv)
        mask.sibling(*lengths).check(2)
        mask.halved().check(2)
        mask.extended(*lengths).check(3)
        assert torch.equal(mask.extended(*lengths).dense(3, 4, *lengths)[:2], it.dense())
        rows, keys = (range(1, n) for n in lengths)
        for part in mask.restrict(View(*lengths, range(1, 2), rows, keys)):
            part.check(1)
        twice = mask.doubled(rows=True)
        if twice is not None:
            odd = twice.dense(2, 4, 2 * it.seqlen_q, 2 * it.seqlen_kv)[:, :, 1::2]
            assert torch.equal(odd, it.dense().repeat_interleave(2, -1))

    held()


@every_word
def test_an_example_has_a_sibling_that_sees_other_keys(word: str) -> None:
    kind = kind_of(word)
    examples = [atom for mask in kind.gallery() for atom in mask.atoms if isinstance(atom, kind)]
    assert examples
    for mask in examples:
        # Squares tell prefixes apart, and rectangles the alignments of a diagonal.
        shapes = (1, 1, 12, 12), (1, 1, 12, 24)
        other = mask.sibling(12, 24)
        assert not all(torch.equal(mask.dense(*shape), other.dense(*shape)) for shape in shapes)


def test_words_come_in_the_order_of_kinds() -> None:
    assert mask_words() == (
        *("full", "causal", "causal.tl", "causal.square", "window", "window.square"),
        *("lengths", "documents", "prefix", "dense"),
    )


@pytest.mark.parametrize("word", ["", "zebra", "causal.br", "full.square", "intersection"])
def test_another_word_names_no_kind(word: str) -> None:
    with pytest.raises(MaskNameError, match=r"not a kind of mask: .* \(kinds: full, causal, "):
        kind_of(word)


# Incomplete kinds.

REQUIRED = (
    *("name", "parse", "mod", "interval", "draw", "can_empty_rows"),
    *("gallery", "sibling", "restrict", "doubled"),
)


def test_every_method_that_a_kind_needs_is_asked_for() -> None:
    assert set(Atom.__abstractmethods__) == set(REQUIRED)


@pytest.mark.parametrize("lacks", [*REQUIRED, "kind", "words", "varies"])
def test_a_kind_without_it_is_refused_when_its_class_is_made(lacks: str) -> None:
    members = {name: getattr(Causal, name) for name in (*REQUIRED, "varies")}
    members |= {"kind": "zebra", "words": ("zebra",)}
    del members[lacks]
    said = f"^mask kind: Zebra lacks {lacks}; see Atom in references/masks/base.py$"
    with pytest.raises(TypeError, match=said):
        type("Zebra", (Atom,), members)
    assert "zebra" not in KINDS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "causal"}, "Zebra.kind 'causal' is the name of another kind"),
        ({"kind": "intersection"}, "Zebra.kind 'intersection' is the name of another kind"),
        ({"kind": "ze.bra"}, "Zebra.kind 'ze.bra' is not of lower-case letters alone"),
        ({"words": ("zebra", "horse")}, r"words \('zebra', 'horse'\) must be 'zebra' or begin"),
        ({"words": ("zebra.square",)}, "one at least must not be 'zebra.square'"),
        ({"words": ()}, "one at least must not be 'zebra.square'"),
    ],
)
def test_a_kind_of_a_bad_name_is_refused(changes: dict[str, object], said: str) -> None:
    members = {name: getattr(Causal, name) for name in (*REQUIRED, "varies")}
    members |= {"kind": "zebra", "words": ("zebra",)}
    with pytest.raises(TypeError, match=f"^mask kind: .*{said}"):
        type("Zebra", (Atom,), members | changes)
    assert set(KINDS) == {"full", "causal", "window", "lengths", "documents", "prefix", "dense"}


def test_parts_of_known_masks() -> None:
    """Candidates come in the order of their use."""
    view = View(20, 24, range(1), range(16, 20), range(24))
    assert list(Causal().restrict(view)) == [Causal(), Window(None, 0), Window(None, 20, "tl")]
    assert list(Window(20, 0, "tl").restrict(view)) == [Window(4, 16, "tl")]
    ends = View(20, 24, range(1), range(20), range(6, 24))
    assert list(Documents((5, 8, 9)).restrict(ends)) == [Documents((0, 7, 9))]
    assert list(Lengths((9,), (14,)).restrict(ends)) == [Lengths((9,), (8,))]
    assert list(Full().restrict(view)) == [Full()]
