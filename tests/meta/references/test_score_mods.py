"""A kind of score mod from outside the tree, ALiBi, is drawn, judged, refused and reported."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references import multiprecision
from references.attention import backward, forward
from references.definition import Attention
from references.masks import Causal, Full, Lengths
from references.row_blocks import row_blocks
from references.score_mods import (
    ScoreMod,
    Softcap,
)
from references.score_mods.base import KINDS
from tests.harness import in_process as direct
from tests.harness.declared import flat_numerics
from tests.harness.outside_score_mod import ALIBI, KERNEL
from tests.meta.references.test_references import Shape, as_double, operands, tensors
from tests.meta.references.test_score_mod_kinds import holds, quickly
from tests.meta.report.test_report_states import campaign
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.evidence import Recorder, Verdict
from verify.problem import Problem, ProblemError
from verify.problem.coverage import bins_reachable, bins_required, coverage_bins
from verify.problem.outside import outside
from verify.problem.strategies import LIMITS, problems
from verify.report import build, states
from verify.tolerance import backward as gradients
from verify.tolerance import forward as tolerance
from verify.variant import (
    Config,
    Declaration,
    DeclarationError,
    GradientNumerics,
)

torch.set_num_threads(1)

PROBLEM = Problem(
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=19,
    seqlen_kv=33,
    head_dim=16,
    dtype="float32",
    mask=Causal(),
    seed=3,
)


def collected(strategy: st.SearchStrategy, count: int = 60) -> list:
    found = []

    @quickly(count)
    @given(strategy)
    def collect(one: object) -> None:
        found.append(one)

    collect()
    return found


@pytest.fixture(scope="module")
def outside_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ALiBi in a file, and a file of kernels that import it."""
    folder = tmp_path_factory.mktemp("outside")
    for name, text in {"alibi_mod": ALIBI, "alibi_kernels": KERNEL}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


@pytest.fixture
def alibi(outside_folder: Path) -> Iterator[type[ScoreMod]]:
    """The kind, which the judge imports from its file."""
    spec = importlib.util.spec_from_file_location("alibi_mod", outside_folder / "alibi_mod.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module.Alibi
    finally:
        KINDS.pop("alibi", None)


def test_a_kind_from_outside_is_what_it_says(alibi: type[ScoreMod]) -> None:
    for mod in alibi.gallery():
        holds(mod)
    problem = PROBLEM.but(score_mod=alibi(8.0))
    assert problem.name.endswith(",mask=causal,alibi=8.0,seed=3")
    assert Problem.parse(problem.name) == problem
    assert [feature.label for feature in problem.features] == ["alibi"]
    with pytest.raises(ProblemError, match=r"'softcap=1\.0' is not a field"):
        Problem.parse(f"{problem.name},softcap=1.0")


@pytest.mark.parametrize("mask", [Full(), Causal(), Lengths((6, 0), (9, 4))], ids=str)
def test_both_references_agree_on_a_kind_from_outside(
    alibi: type[ScoreMod], mask: Full | Causal | Lengths
) -> None:
    attention = Attention(mask, -0.5, alibi(1.0))
    given = operands(Shape(), attention)
    exact = multiprecision.attention(given)
    found = forward(given.q, given.k, given.v, attention, block_q=3, block_kv=4)
    of_inputs = backward(*tensors(given), attention, block_q=3, block_kv=4)
    for name, got in {**vars(found), **vars(of_inputs)}.items():
        torch.testing.assert_close(got, as_double(getattr(exact, name)), rtol=0, atol=1e-13)
    blocks = list(row_blocks(given.q, given.k, given.v, attention, budget=70))
    out = torch.cat([block.out.flatten(0, 1) for block in blocks]).sum()
    torch.testing.assert_close(out, found.out.sum())


def test_a_kind_from_outside_is_drawn(alibi: type[ScoreMod]) -> None:
    for words in (("alibi",), ("softcap", "alibi")):
        declaration = direct.declared(score_mods=words)
        found = collected(problems(declaration, dtype="float16", limits=LIMITS["interpreter"]), 200)
        assert sum(isinstance(p.score_mod, alibi) for p in found) >= 5
        assert {"alibi", *words} <= bins_reachable(declaration.support)
    assert "alibi" in bins_required()
    assert "alibi" in coverage_bins(PROBLEM.but(score_mod=alibi(8.0)), Config())
    assert "alibi" not in coverage_bins(PROBLEM, Config())


def test_a_kind_that_no_kernel_declares_is_refused(alibi: type[ScoreMod]) -> None:
    declaration = direct.declared()
    found = collected(outside(declaration, dtype="float16", limits=LIMITS["interpreter"]), 150)
    edges = [argument for p, argument in found if isinstance(p.score_mod, alibi)]
    assert set(edges) == {"alibi"}
    support = declaration.support
    assert support.refusal(PROBLEM.but(score_mod=alibi(8.0))) == ("alibi", "is not supported")
    assert support.refusal(PROBLEM.but(score_mod=Softcap(1.0))) is None
    capless = replace(support, score_mods=("alibi",))
    assert capless.refusal(PROBLEM.but(score_mod=Softcap(1.0))) == ("softcap", "is not supported")
    KINDS.pop("alibi")
    with pytest.raises(DeclarationError, match="score_mods: 'alibi' is none of softcap"):
        direct.declared(score_mods=("alibi",))


def test_scores_in_16_bits_are_refused_where_they_are_not_derived(alibi: type[ScoreMod]) -> None:
    narrow, problem = (
        flat_numerics(scores="input"),
        PROBLEM.but(dtype="float16", dtype_out="float16"),
    )
    tolerance.resolve(narrow, Config(), problem.but(score_mod=Softcap(1.0)), "cpu")
    tolerance.resolve(narrow, Config(), PROBLEM.but(score_mod=alibi(8.0)), "cpu")
    with pytest.raises(
        ValueError, match=r"numerics\.softmax\.scores: no bound is derived .* beside alibi"
    ):
        tolerance.resolve(narrow, Config(), problem.but(score_mod=alibi(8.0)), "cpu")
    gradients.resolve(GradientNumerics(), Config(), problem.but(score_mod=alibi(8.0)), "cpu")


@pytest.mark.parametrize("name", ["steeper", "larger"])
def test_a_kind_that_may_overflow_is_given_no_bound(alibi: type[ScoreMod], name: str) -> None:
    """Overflow is derived of scaled scores, before the score mod."""
    members = {"steeper": {"steepest": 2.0}, "larger": {"reach": lambda *given: given[2] + 2.0**64}}
    try:
        kind = type("Other", (alibi,), {"word": "other", **members[name]})
        problem = PROBLEM.but(score_mod=kind(8.0))
        for resolve, declared in (
            (tolerance.resolve, flat_numerics()),
            (gradients.resolve, GradientNumerics()),
        ):
            with pytest.raises(ValueError, match="score_mod: no bound is derived for other="):
                resolve(declared, Config(), problem, "cpu")
    finally:
        KINDS.pop("other", None)


# Its kernels, in a cell.


@pytest.fixture
def declared(alibi: type[ScoreMod], outside_folder: Path) -> dict[str, Declaration]:
    found = roster([outside_folder / "alibi_kernels.py"])
    assert not found.failures
    return {declaration.name: declaration for declaration in found.declarations}


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    made = Judge(Recorder(tmp_path, "main"))
    try:
        yield made
    finally:
        made.close()


def verdicts(
    judge: Judge, declaration: Declaration, group: str, problem: Problem
) -> dict[str, Verdict]:
    target = Target(declaration, declaration.configs[0], problem.dtype, group)
    return {found.oracle: found for found in judge.judge(target, problem)}


BOUNDS = {"accuracy": "bound", "gradients": "gradient_bound"}


def test_right_kernels_of_a_kind_from_outside_pass(
    alibi: type[ScoreMod], declared: dict[str, Declaration], judge: Judge
) -> None:
    """Every oracle of the two groups that is asked."""
    problem = PROBLEM.but(score_mod=alibi(8.0))
    half = problem.but(dtype="bfloat16", mask=Full(), score_mod=alibi(1.0), softmax_scale=-0.3)
    for case in (problem, half, problem.but(mask=Lengths((19, 4), (33, 2)), dtype="float16")):
        for group, oracle in BOUNDS.items():
            found = verdicts(judge, declared["right"], group, case)
            assert not [each.finding for each in found.values() if each.outcome == "fail"]
            assert found[oracle].outcome == "pass"
            assert "alibi" in found[oracle].bins


def test_wrong_kernels_of_a_kind_from_outside_are_convicted(
    alibi: type[ScoreMod], declared: dict[str, Declaration], judge: Judge
) -> None:
    """Slopes that are 1 % too steep, one that has the wrong sign, the bias of the next row."""
    problem = PROBLEM.but(score_mod=alibi(8.0))
    for name in ("steeper", "flipped", "next-row"):
        found = verdicts(judge, declared[name], "accuracy", problem)
        assert found["bound"].outcome == "fail", name
    for name in ("steeper-backward", "flipped-backward"):
        found = verdicts(judge, declared[name], "accuracy", problem)
        assert found["bound"].outcome == "pass", name
        found = verdicts(judge, declared[name], "gradients", problem)
        assert found["gradient_bound"].outcome == "fail", name


def test_a_kernel_refuses_a_kind_that_it_does_not_declare(
    alibi: type[ScoreMod], declared: dict[str, Declaration], judge: Judge
) -> None:
    problem = PROBLEM.but(score_mod=alibi(8.0))
    found = verdicts(judge, declared["untold"], "refusal", problem)
    assert found["refusal"].outcome == "pass"
    # One that says less than it does.
    silent = replace(declared["right"], support=declared["untold"].support)
    found = verdicts(judge, silent, "refusal", problem)
    assert found["refusal"].outcome == "fail"
    assert "should refuse alibi: is not supported with Unsupported" in str(found["refusal"].finding)


def test_reports_name_the_score_mods_of_a_support() -> None:
    """Older records have a flag for the softcap in place of the words."""
    assert states.score_mods({"softcap": True}) == ("softcap",)
    assert states.score_mods({"softcap": False}) == ()
    assert states.score_mods({"score_mods": ["softcap", "alibi"]}) == ("softcap", "alibi")
    assert states.score_mods({}) == ()


@pytest.mark.parametrize("on_record", [{"score_mods": ["softcap", "alibi"]}, {"softcap": True}])
def test_a_report_shows_a_kind_and_asks_for_its_bin(
    alibi: type[ScoreMod], on_record: dict[str, object]
) -> None:
    made = campaign(support=on_record)
    if "softcap" in on_record:  # as older versions recorded it
        (entry,) = made.variants
        del entry.support["score_mods"]
    (variant,) = build(made)["variants"]
    words = states.score_mods(on_record)
    assert "; ".join(words) in states.claims(variant)
    for dtype in variant["dtypes"]:
        assert {*dtype["bins_missing"]} & {"softcap", "alibi"} == {*words}
