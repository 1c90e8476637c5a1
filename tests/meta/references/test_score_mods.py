"""What each kind of score mod says of itself is true; an incomplete one is refused; a kind from
outside the tree, ALiBi, is drawn, judged, refused and reported."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from references import multiprecision
from references.attention import backward, forward
from references.definition import Attention
from references.masks import Causal, Full, Lengths
from references.row_blocks import row_blocks
from references.score_mods import (
    Extent,
    ScoreMod,
    ScoreModNameError,
    Softcap,
    mod_words,
    parse_score_mod,
)
from references.score_mods.base import KINDS
from tests.harness import in_process as direct
from tests.harness.declared import flat_numerics
from tests.meta.references.test_references import Shape, as_double, operands, tensors
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

EXTENT = Extent(heads=4, seqlen_q=7, seqlen_kv=9)

ALIBI = '''
    """ALiBi (Press et al., arXiv 2108.12409): a bias that grows with the key's position."""

    from dataclasses import dataclass
    from typing import ClassVar

    import torch

    from references.premises import Premise
    from references.score_mods import Rounding, ScoreMod


    @dataclass(frozen=True)
    class Alibi(ScoreMod):
        """f(s) = s + slope_h (k - q), with slope_h = 2^(-steps (h + 1) / heads) in fp32."""

        steps: float
        word: ClassVar[str] = "alibi"
        steepest: ClassVar[float] = 1.0
        breaks = frozenset({Premise.POSITION_FREE_SCORES, Premise.NORM_BOUNDED_SCORES})

        @property
        def text(self):
            return str(self.steps)

        @classmethod
        def parse(cls, text):
            return cls(float(text))

        @classmethod
        def gallery(cls):
            return cls(8.0), cls(1.0)

        def slopes(self, heads):
            return torch.tensor([2.0 ** (-self.steps * (h + 1) / heads) for h in range(heads)])

        def function(self, extent, device="cpu"):
            slopes = self.slopes(extent.heads).double().to(device)
            return lambda s, b, h, q, k: s.add_(slopes[h] * (k - q))

        def precise(self, mp, extent, score, at):
            _, h, q, k = at
            return score + mp.mpf(float(self.slopes(extent.heads)[h])) * (k - q)

        def slope(self, modified):
            return None

        def reach(self, extent, size):
            farthest = max(extent.seqlen_q, extent.seqlen_kv)
            return size + float(self.slopes(extent.heads).max()) * farthest

        def moved(self, size, error, modified):
            return error

        def roundings(self, extent):
            """A kernel in base 2 rounds log2 e, and a slope times it; the bias, and the sum."""
            return Rounding("added", 3), Rounding("result", 1)
'''
KERNEL = """
    import math
    from dataclasses import replace

    import torch

    from alibi_mod import Alibi
    from verify.variant import (
        Contract,
        GradientNumerics,
        GradientProducts,
        GradientSoftmax,
        GradientSums,
        Numerics,
        Output,
        Products,
        ScoreGradient,
        Softmax,
        Support,
        Variant,
    )

    SUPPORT = Support(
        dtypes=("float16", "bfloat16", "float32"),
        head_dims=(16, 32, 64),
        masks=("full", "causal", "lengths"),
        grouped_heads=True,
        score_mods=("alibi",),
    )


    def right(slopes, distance):
        return slopes[:, None, None] * distance


    def steeper(slopes, distance):
        return 1.01 * slopes[:, None, None] * distance


    def flipped(slopes, distance):
        signs = torch.where(torch.arange(len(slopes)) == len(slopes) - 1, -1.0, 1.0)
        return signs[:, None, None] * slopes[:, None, None] * distance


    def of_the_next_row(slopes, distance):
        return slopes[:, None, None] * (distance - 1)


    def scores(args, bias):
        group = args.heads_q // args.heads_kv
        k, v = (t.float().repeat_interleave(group, 1) for t in (args.k, args.v))
        lengths = args.seqlen_q, args.seqlen_kv
        seen = args.mask.dense(args.batch, args.heads_q, *lengths)
        s = args.q.float() @ k.mT * args.softmax_scale
        if args.score_mod is not None:
            assert isinstance(args.score_mod, Alibi)
            steps, heads = args.score_mod.steps, torch.arange(args.heads_q)
            slopes = torch.exp2(-steps * (heads + 1.0).double() / args.heads_q).float()
            distance = (torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]).float()
            s = s + bias(slopes, distance)
        return s.masked_fill(~seen, -math.inf), seen, k, v


    def forward_by(bias, support):
        def forward(args, out, lse, workspace):
            support.check(args, out)
            s, _, _, v = scores(args, bias)
            top = s.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
            e = torch.exp(s - top)
            total = e.sum(-1, keepdim=True)
            out.copy_(torch.where(total == 0, 0.0, e / total) @ v)
            lse.copy_((top + total.log())[..., 0])

        return forward


    def backward_by(bias, support):
        def backward(args, saved, dout, gradients, workspace):
            support.check_backward(args, saved, dout, gradients)
            s, seen, k, v = scores(args, bias)
            dout, lse = dout.float(), saved.lse[..., None]
            p = torch.where(seen, torch.exp(s - torch.where(lse == -math.inf, math.inf, lse)), 0.0)
            delta = (saved.out.float() * dout).sum(-1, keepdim=True)
            ds = torch.where(seen, p * (dout @ v.mT - delta), 0.0)
            group = args.heads_q // args.heads_kv
            dk = ds.mT @ args.q.float() * args.softmax_scale
            dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, p.mT @ dout))
            gradients.copy_(ds @ k * args.softmax_scale, dk, dv)

        return backward


    def variant(name, bias, of_backward=None, support=SUPPORT):
        return Variant(
            name=name,
            family="torch",
            forward=forward_by(bias, support),
            backward=backward_by(of_backward or bias, support),
            support=support,
            numerics=Numerics(
                products=Products(operands="float32"),
                softmax=Softmax(exp="vexp", block_n=0),
                output=Output(probability="float32", normalised=True),
            ),
            gradients=GradientNumerics(
                products=GradientProducts(operands="float32"),
                softmax=GradientSoftmax(exp="vexp", probability="float32"),
                score_gradient=ScoreGradient(dtype="float32"),
                sums=GradientSums(block_m=0, block_n=0),
            ),
            contract=Contract(),
        )


    VARIANTS = [
        variant("right", right),
        variant("steeper", steeper),
        variant("flipped", flipped),
        variant("next-row", of_the_next_row),
        variant("steeper-backward", right, steeper),
        variant("flipped-backward", right, flipped),
        variant("untold", right, support=replace(SUPPORT, score_mods=())),
    ]
"""
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


def quickly(count: int = 40) -> settings:
    return settings(deadline=None, max_examples=count, database=None, derandomize=True)


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


# What a kind says of itself.


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
            PROBLEM.but(score_mod=kind())
    finally:
        KINDS.pop("mask", None)


# A kind from outside the tree.


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
