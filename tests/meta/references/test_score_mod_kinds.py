"""What each kind of score mod says of itself is true, and an incomplete kind is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from references.score_mods import (
    Extent,
    ScoreMod,
    ScoreModNameError,
    Softcap,
    mod_words,
    parse_score_mod,
)
from references.score_mods.base import KINDS
from verify.problem import Problem, ProblemError

torch.set_num_threads(1)

EXTENT = Extent(heads=4, seqlen_q=7, seqlen_kv=9)


def quickly(count: int = 40) -> settings:
    return settings(deadline=None, max_examples=count, database=None, derandomize=True)


def holds(mod: ScoreMod) -> None:
    """Name, function, slope, reach and moves of one score mod, against fifty digits."""
    assert parse_score_mod(mod.name) == mod
    assert mod.sibling() != mod
    assert type(mod.sibling()) is type(mod)
    function = mod.function(EXTENT)

    def f(score: float | torch.Tensor, at: tuple[int, int, int, int]) -> torch.Tensor:
        where = (torch.tensor(n) for n in at)
        return function(torch.as_tensor(score, dtype=torch.float64).clone(), *where)

    position = st.tuples(*(st.integers(0, n - 1) for n in (2, 4, 7, 9)))

    @quickly(100)
    @given(st.floats(-60, 60), st.floats(0, 3), position)
    def held(score: float, error: float, at: tuple[int, int, int, int]) -> None:
        got = f(score, at)
        with mp.workdps(50):
            exact = mod.precise(mp, EXTENT, mpf(score), at)
            assert abs(float(got - float(exact))) <= 2.0**-50 * (1 + abs(score)) + mod.noise
            steep = float(mp.diff(lambda s: mod.precise(mp, EXTENT, s, at), mpf(score)))
        slope = mod.slope(got)
        assert float(1.0 if slope is None else slope) == pytest.approx(steep, abs=1e-12)
        assert abs(steep) <= mod.steepest
        size = torch.tensor(abs(score), dtype=torch.float64)
        room = 1e-12 * (1 + abs(score))
        assert float(got.abs()) <= float(mod.reach(EXTENT, size)) + room
        given = torch.tensor(error, dtype=torch.float64)
        moved = float(mod.moved(size.clone(), given.clone(), got.abs()))
        assert moved <= mod.steepest * error + room
        for share in (-1.0, -0.3, 0.5, 1.0):
            other = f(score + share * error, at)
            assert float((other - got).abs()) <= moved + room
            if slope is not None:
                off = abs(float(mod.slope(other) - slope))
                assert off <= float(mod.slope_error(slope, given, 1.0, 0.0)) + room
                assert off <= float(mod.slope_error(None, given, 1.0, 0.0)) + room

    held()


@pytest.mark.parametrize("mod", [mod for word in mod_words() for mod in KINDS[word].gallery()])
def test_a_score_mod_is_what_it_says(mod: ScoreMod) -> None:
    holds(mod)


def test_a_softcap_has_no_other_name() -> None:
    assert Softcap(20.0).name == "softcap=20.0"
    assert parse_score_mod("softcap=1e-3") == Softcap(0.001)
    assert mod_words() == ("softcap",)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zebra=3", r"not a kind of score mod: 'zebra' \(kinds: softcap\)"),
        ("softcap=x", r"not a score mod: 'softcap=x' \(could not convert"),
        ("softcap=0.0", r"not a score mod: 'softcap=0\.0' \(softcap: 0\.0 is not positive\)"),
        ("softcap=inf", "softcap: inf is not finite"),
    ],
)
def test_a_bad_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(ScoreModNameError, match=said):
        parse_score_mod(name)


REQUIRED = ("text", "parse", "gallery", "function", "precise", "slope", "reach", "moved")


@pytest.mark.parametrize("lacks", [*REQUIRED, "roundings", "word", "steepest"])
def test_a_kind_without_it_is_refused_when_its_class_is_made(lacks: str) -> None:
    members = {name: getattr(Softcap, name) for name in (*REQUIRED, "roundings")}
    members |= {"word": "zebra", "steepest": 1.0}
    del members[lacks]
    said = f"^score mod: Zebra lacks {lacks}; see ScoreMod in references/score_mods/base.py$"
    with pytest.raises(TypeError, match=said):
        type("Zebra", (ScoreMod,), members)
    assert "zebra" not in KINDS


@pytest.mark.parametrize(
    ("word", "said"),
    [("softcap", "is the word of another kind"), ("ze.bra", "is not of lower-case letters")],
)
def test_a_kind_of_a_bad_word_is_refused(word: str, said: str) -> None:
    members = {name: getattr(Softcap, name) for name in (*REQUIRED, "roundings")}
    with pytest.raises(TypeError, match=f"^score mod: Zebra.word '{word}' {said}"):
        type("Zebra", (ScoreMod,), members | {"word": word, "steepest": 1.0})


def test_a_word_that_is_a_field_of_problems_is_refused() -> None:
    members = {name: getattr(Softcap, name) for name in (*REQUIRED, "roundings")}
    members |= {"word": "mask", "steepest": 1.0}
    try:
        kind = type("Zebra", (ScoreMod,), members)
        with pytest.raises(ProblemError, match="score_mod: 'mask' is a field of problems"):
            Problem.parse("sq=1,skv=1,d=16,dtype=float32").but(score_mod=kind())
    finally:
        KINDS.pop("mask", None)
