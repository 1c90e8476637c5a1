"""A kind of mask from outside the tree: parsed, drawn, judged, refused by a kernel without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import masks
from references.masks import (
    Atom,
    Causal,
    Choose,
    Lengths,
    Mask,
    MaskMod,
    MaskNameError,
    View,
    mask_words,
    parse_mask,
)
from references.masks.base import KINDS
from tests.harness import in_process as direct
from tests.harness.fake_trials import OK, PLAIN, acquitted, convicted, right_run, trial_of
from tests.harness.laid import fill
from tests.meta.references import test_mask_kinds as kinds
from verify.cell.process import Reply
from verify.judging.launch import Launch
from verify.judging.parts import Part
from verify.oracles import bound, duplicated_keys, refusal, relaunch
from verify.problem import Problem
from verify.problem.coverage import bins_reachable, bins_required, coverage_bins
from verify.problem.outside import outside
from verify.problem.refusal import inside
from verify.problem.strategies import LIMITS, problems
from verify.variant import AttentionArgs, Config, DeclarationError, Support, Unsupported

torch.set_num_threads(1)


def define() -> type[Atom]:
    """Chunked attention: causal, and key and query are in the same chunk (bottom right)."""

    @dataclass(frozen=True)
    class Chunked(Atom):
        """k <= q + offset and k // size == (q + offset) // size."""

        size: int
        kind: ClassVar[str] = "chunked"
        words: ClassVar[tuple[str, ...]] = ("chunked", "chunked.square")
        varies: ClassVar[tuple[str, ...]] = ()

        @property
        def name(self) -> str:
            return f"chunked.{self.size}"

        @classmethod
        def parse(cls, fields: Sequence[str]) -> Chunked:
            (size,) = fields
            return Chunked(int(size))

        def mod(self, seqlen_q: int, seqlen_kv: int, device: torch.device | str = "cpu") -> MaskMod:
            def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                at = q + (seqlen_kv - seqlen_q)
                return (k <= at) & (k // self.size == at // self.size)

            return mod

        def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> tuple:
            at = q + (seqlen_kv - seqlen_q)
            return at // self.size * self.size, at + 1

        @classmethod
        def draw(cls, choose: Choose, word: str, batch: int, seqlen_q: int, seqlen_kv: int) -> Mask:
            return Chunked(choose.one_of((1, 2, 16, 17, 64, 200)))

        @classmethod
        def can_empty_rows(cls, word: str, *, square: bool) -> bool:
            return not square

        @classmethod
        def gallery(cls) -> tuple[Mask, ...]:
            return Chunked(5), Lengths((10,), (20,)) & Chunked(4)

        def sibling(self, seqlen_q: int, seqlen_kv: int) -> Mask:
            return Chunked(self.size // 2 or 2)

        def restrict(self, view: View) -> Iterator[Mask]:
            yield self

        def doubled(self, *, rows: bool) -> Mask:
            return Chunked(2 * self.size)

    return Chunked


@pytest.fixture
def chunked() -> Iterator[type[Atom]]:
    try:
        yield define()
    finally:
        KINDS.pop("chunked", None)


def having(*words: str, **changes: object) -> Support:
    return replace(direct.SUPPORT, masks=words, **changes)


def collected(strategy: st.SearchStrategy, count: int = 60) -> list:
    found = []

    @settings(deadline=None, max_examples=count, database=None, derandomize=True)
    @given(strategy)
    def collect(one: object) -> None:
        found.append(one)

    collect()
    return found


def test_a_kind_from_outside_is_parsed_and_intersected(chunked: type[Atom]) -> None:
    assert parse_mask("chunked.4") == chunked(4)
    mask = chunked(4) & Causal() & Lengths((5,), (9,))
    assert mask.name == "causal+lengths.5.9+chunked.4"
    assert parse_mask(mask.name) == mask
    assert masks.gallery()[-2:] == chunked.gallery()
    with pytest.raises(MaskNameError, match=r"kinds: full, .*, chunked; examples: .*chunked\.5"):
        parse_mask("chunked.x")
    problem = PLAIN.but(mask=chunked(4))
    assert Problem.parse(problem.name) == problem
    assert coverage_bins(problem, Config()) >= {"mask:chunked"}
    kinds.test_a_drawn_mask_is_what_its_kind_says("chunked")
    kinds.test_masks_that_oracles_make_of_it_are_what_they_should_be("chunked")


def test_a_kind_from_outside_is_a_word_of_declarations(chunked: type[Atom]) -> None:
    support = having("full", "chunked.square")
    square = PLAIN.but(seqlen_q=9, mask=chunked(4))
    assert support.refusal(square) is None
    assert support.refusal(PLAIN.but(mask=chunked(4))) == ("mask", "chunked.4 is not supported")
    assert having("chunked").refusal(PLAIN.but(mask=chunked(4))) is None
    KINDS.pop("chunked")
    with pytest.raises(DeclarationError, match="masks: 'chunked' is none of full, causal, "):
        having("chunked")


def test_a_kind_from_outside_is_drawn(chunked: type[Atom]) -> None:
    for words in (("full", "chunked"), ("full", "chunked.square"), ("chunked", "lengths")):
        declaration = direct.declared(masks=words)
        found = collected(problems(declaration, dtype="float16", limits=LIMITS["interpreter"]))
        assert sum(any(isinstance(atom, chunked) for atom in p.mask.atoms) for p in found) >= 5
        assert "mask:chunked" in bins_reachable(declaration.support)
        assert "empty_row" in bins_reachable(declaration.support)
    assert "mask:chunked" in bins_required()


def test_a_kind_from_outside_is_judged_by_the_reference(chunked: type[Atom]) -> None:
    declaration = direct.declared(masks=("full", "chunked"))
    problem = PLAIN.but(mask=chunked(4))
    assert acquitted(bound.judge(direct.trial(direct.Kernel(), problem, declaration)))
    blind = direct.Kernel(seen=lambda p: Causal().dense(2, 4, p.seqlen_q, p.seqlen_kv))
    convicted(bound.judge(direct.trial(blind, problem, declaration)), "out")


def test_a_kind_from_outside_has_a_sibling_in_the_next_launch(chunked: type[Atom]) -> None:
    declaration = direct.declared(masks=("full", "chunked"))
    problem = PLAIN.but(mask=chunked(4))
    assert relaunch.relaunched(problem, declaration.support).mask == chunked(2)
    assert acquitted(relaunch.judge(direct.trial(direct.Kernel(), problem, declaration)))
    kept = direct.Kernel(seen=lambda p: problem.mask.dense(2, 4, p.seqlen_q, p.seqlen_kv))
    said = "launched after another problem of its shapes"
    convicted(relaunch.judge(direct.trial(kept, problem, declaration)), said, "mask=chunked.2")


def test_a_kind_from_outside_is_restricted_to_parts(chunked: type[Atom]) -> None:
    whole = PLAIN.but(mask=chunked(4))
    support = having("full", "chunked")
    last = Part.of(whole, rows=range(3, 6)).problem(whole, support)
    assert last is not None
    assert last.mask == chunked(4)
    # Keys from 2 on lie in other chunks alone than in the whole.
    assert Part.of(whole, keys=range(2, 9)).problem(whole, support) is None


def test_a_kind_from_outside_is_doubled(chunked: type[Atom]) -> None:
    declaration = direct.declared(masks=("chunked",))
    assert duplicated_keys.excludes(declaration) is None
    assert duplicated_keys.doubled(PLAIN.but(mask=chunked(4))).problem.mask == chunked(8)
    trial = direct.trial(direct.Kernel(), PLAIN.but(mask=chunked(4)), declaration)
    assert acquitted(duplicated_keys.judge(trial))


def asked_outside(problem: Problem, support: Support) -> Launch:
    """The run of a kernel that begins with `support.check`, and else answers right."""
    trial = trial_of(problem)
    q, k, v = (tensor.to(problem.format.torch) for tensor in trial.expanded)
    args = AttentionArgs(q, k, v, problem.mask, problem.scale, problem.score_mod, Config())
    run = right_run(trial)
    try:
        support.check(args, run.outputs["out"])
    except Unsupported as error:
        for tensor in run.outputs.values():
            fill(tensor, "nan")
        return Launch(Reply("unsupported", str(error), error.argument), "nan", run.outputs)
    return Launch(OK, "nan", run.outputs)


def test_a_kind_from_outside_is_refused_by_a_kernel_without_it(chunked: type[Atom]) -> None:
    declaration = direct.declared()
    found = collected(outside(declaration, dtype="float16", limits=LIMITS["interpreter"]), 150)
    edges = [(p, argument) for p, argument in found if p.mask.kind == "chunked"]
    assert edges
    assert {argument for _, argument in edges} == {"mask"}
    problem = PLAIN.but(mask=chunked(4))
    assert not inside(declaration.support, problem)
    for support, right in ((declaration.support, True), (having("chunked"), False)):
        trial = trial_of(problem, support=declaration.support)
        trial.launches["first"] = asked_outside(problem, support)
        ruling = refusal.judge(trial)
        assert acquitted(ruling) is right
    said = "should refuse mask: chunked.4 is not supported with Unsupported, but gave a result"
    convicted(ruling, said)


def test_a_file_in_the_folder_is_all_that_a_kind_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"from {__name__} import define\n\nChunked = define()\n"
    (tmp_path / "chunked_elsewhere.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(masks, "__path__", [*masks.__path__, str(tmp_path)])
    try:
        masks.import_kinds()
        assert parse_mask("chunked.4").kind == "chunked"
        assert mask_words()[-2:] == ("chunked", "chunked.square")
    finally:
        KINDS.pop("chunked", None)


def test_a_kind_that_draws_another_word_is_found_out(
    chunked: type[Atom],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "word", "chunked.other")
    declaration = direct.declared(masks=("chunked",))
    strategy = problems(declaration, dtype="float16", limits=LIMITS["interpreter"])
    with pytest.raises(AssertionError, match=r"drawn as chunked, but its word is chunked\.other"):
        collected(strategy, 5)
