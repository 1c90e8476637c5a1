"""Plain functions: the meaning of their signatures, their layouts, and the messages for illegal
ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from references.masks import Causal, Window
from references.score_mods import Softcap
from tests.harness.fake_trials import OK, acquitted, trial_of
from tests.harness.problem_tensors import INSIDE
from tests.harness.property_cases import Bench, bench
from tests.meta.package.test_guide import called, loaded
from verify.bundle import ROOT
from verify.campaign.run import CampaignRun
from verify.campaign.targets import Target
from verify.cell.breach import Breach
from verify.cell.loading import load as load_kernel
from verify.cell.plain_functions import WEAKEST
from verify.evidence import Verdict, load
from verify.evidence.explanation import explain
from verify.judging.launch import Launch
from verify.oracles import bound
from verify.problem import Problem
from verify.variant import Contract

PROBLEM = Problem(
    batch=2, heads_q=3, heads_kv=3, seqlen_q=9, seqlen_kv=9, head_dim=32, dtype="float32"
)
ASKED = {
    "plain": PROBLEM,
    "other lengths": PROBLEM.but(seqlen_q=5),
    "causal": PROBLEM.but(mask=Causal()),
    "window": PROBLEM.but(mask=Window(3, 1)),
    "open window": PROBLEM.but(mask=Window(None, 2, "tl")),
    "softcap": PROBLEM.but(score_mod=Softcap(1.0)),
    "softcap in 16 bits": PROBLEM.but(score_mod=Softcap(1.0), dtype="bfloat16", softmax_scale=1.0),
    "large scores in 16 bits": PROBLEM.but(
        score_mod=Softcap(20.0), dtype="bfloat16", softmax_scale=4.0
    ),
}


def verdicts_of(bench: Bench, problem: Problem) -> list[Verdict]:
    (declaration,) = bench.variants.values()
    target = Target(declaration, declaration.configs[0], problem.dtype, "accuracy")
    assert declaration.support.refusal(problem) is None
    return bench.judge.judge(target, problem)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("correct_bshd.py", tmp_path_factory.mktemp("right")) as opened:
        yield opened


@pytest.mark.parametrize("name", ASKED)
def test_flash_attn_func_is_right_in_its_own_layout(name: str, right: Bench) -> None:
    assert [v.finding for v in verdicts_of(right, ASKED[name]) if v.outcome == "fail"] == []


def test_an_eager_softcap_in_16_bits_is_within_its_bounds(one_thread: None) -> None:
    """Scores are rounded as x / c, as tanh of it and as c times that, and also before and after
    scaling."""
    worst = 0.0
    for seed in range(6):
        problem = PROBLEM.but(
            dtype="bfloat16", score_mod=Softcap(20.0), softmax_scale=4.0, batch=1, seed=seed
        )
        problem = problem.but(heads_q=2, heads_kv=2)
        trial = trial_of(problem, Contract(lse=None), numerics=WEAKEST)
        q, k, v = (x.to(torch.bfloat16) for x in trial.expanded)
        capped = torch.tanh(q @ k.mT * 4.0 / 20.0) * 20.0
        trial.launches["first"] = Launch(OK, "nan", {"out": torch.softmax(capped, -1) @ v})
        ruling = bound.FORWARD.judge(trial)
        assert acquitted(ruling)
        worst = max(worst, ruling.measures["r_out"])
    assert worst > 0.3, "the bound says nothing"


def test_what_lies_in_another_layout_is_told_so(tmp_path: Path) -> None:
    with bench("untold_bshd.py", tmp_path) as opened:
        for name in ("plain", "other lengths", "causal"):  # wrong numbers, or a raise
            failed = [v for v in verdicts_of(opened, ASKED[name]) if v.outcome == "fail"]
            assert failed, name
            assert failed[0].finding is not None
            message = failed[0].finding.message
            assert message.startswith(
                "this function computes attention in (batch, seqlen, heads, head_dim); say LAYOUT ="
                ' "bshd" in the file ('
            )
            assert "\n" not in message


def test_what_is_wrong_in_every_layout_is_not(tmp_path: Path) -> None:
    with bench("wrong_bshd.py", tmp_path) as opened:
        assert not [v for v in verdicts_of(opened, ASKED["causal"]) if v.outcome == "fail"]
        for name in ("window", "softcap in 16 bits"):
            failed = [v for v in verdicts_of(opened, ASKED[name]) if v.outcome == "fail"]
            assert failed, name
            assert failed[0].finding is not None
            assert "out is off by" in failed[0].finding.message
            assert "LAYOUT" not in failed[0].finding.message


def test_a_window_is_passed_as_flash_attn_has_it(tmp_path: Path) -> None:
    square = INSIDE.but(seqlen_q=9)
    for mask, expected in (
        (Window(3, None), (3, -1)),
        (Window(None, 0, "tl"), (-1, 0)),
        (Causal(), (-1, 0)),
    ):
        seen = called(tmp_path, "q, k, v, window_size=None", problem=square.but(mask=mask))
        assert seen["window_size"] == expected
    assert called(tmp_path, "q, k, v, window_size=None")["window_size"] == (-1, -1)
    both = called(tmp_path, "q, k, v, window_size, causal=False", problem=square.but(mask=Causal()))
    assert (both["window_size"], both["causal"]) == ((-1, -1), True)
    support = loaded(tmp_path, "def attention(q, k, v, window_size): return q").variants[0].support
    assert support.masks == ("full", "causal.square", "window.square")
    assert support.refusal(square.but(mask=Window(1, 1))) is None
    # beyond squares both alignments differ
    assert support.refusal(INSIDE.but(mask=Window(1, 1))) is not None


def test_a_mask_that_is_named_by_a_text_is_no_tensor(tmp_path: Path) -> None:
    square = PROBLEM.but(mask=Causal())
    assert called(tmp_path, "q, k, v, mask=None", problem=square)["mask"].dtype == torch.bool
    seen = called(tmp_path, 'q, k, v, mask="full", causal=False', problem=square)
    assert (seen["mask"], seen["causal"]) == ("full", True)
    (variant,) = loaded(tmp_path, 'def attention(q, k, v, mask="full"): return q').variants
    assert variant.support.masks == ("full",)


def test_a_softcap_is_passed_where_there_is_one(tmp_path: Path) -> None:
    seen = called(tmp_path, "q, k, v, softcap", problem=INSIDE.but(score_mod=Softcap(20.0)))
    assert seen["softcap"] == 20.0
    assert called(tmp_path, "q, k, v, softcap=None")["softcap"] == 0.0
    assert (
        loaded(tmp_path, "def attention(q, k, v, softcap): return q").variants[0].support.score_mods
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("DTYPES = 'float16'", "DTYPES: 'float16' is no tuple of names out of float16, bfloat16"),
        ("DTYPES = ('float64',)", "DTYPES: 'float64' is none of float16, bfloat16, float32"),
        ("DTYPES = ()", "DTYPES: is empty"),
        ("DTYPES = (torch.float16,)", "DTYPES: torch.float16 is none of"),
        ("HEAD_DIMS = 64", "HEAD_DIMS: 64 is no tuple of whole numbers"),
        ("HEAD_DIMS = (32.5,)", "HEAD_DIMS: 32.5 is no whole number"),
        ("LAYOUT = 'sbhd'", "LAYOUT: 'sbhd' is none of bhsd, bshd"),
        ("LAYOUT = None", "LAYOUT: None is none of bhsd, bshd"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Breach) as refused:
        loaded(tmp_path, f"{text}\ndef attention(q, k, v): return q")
    assert f".py: {words}" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (
            "q, k, v, alibi",
            "attention: unknown parameter 'alibi' has no default (known: causal, ",
        ),
        ("q, k, v, *, bias, scale=None", "unknown parameter 'bias' has no default"),
        ("q, k", "attention: does not take three tensors q, k and v by position"),
    ],
)
def test_an_unknown_parameter_is_an_error(tmp_path: Path, signature: str, words: str) -> None:
    with pytest.raises(Breach) as refused:
        loaded(tmp_path, f"def attention({signature}): return q")
    assert words in str(refused.value)
    assert loaded(
        tmp_path, "def attention(q, k, v, alibi=None, *rest, **others): return q"
    ).variants


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("attention(q, k, v, cu_seqlens_q, cu_seqlens_k)", "'cu_seqlens_q' has no default"),
        ("attention(q, k, v, cu_seqlens_q, cu_seqlens_k)", "around it that packs its tensors"),
        ("attention(q, k, v, bias, alibi)", "'bias' has no default"),
        ("attention(q, k, v, bias)", "around it that passes one"),
        ("paged(q, k_cache, v_cache, block_table)", "only paged(q, k_cache, v_cache, block_table)"),
        ("paged(q, k_cache, v_cache, block_table)", "declare a VARIANT (docs/adding-a-kernel.md)"),
        ("fused(q, kv)", "no function of (q, k, v), only fused(q, kv): declare one"),
        ("other(x)", "no function of (q, k, v): declare one"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_how_it_can(
    tmp_path: Path, signature: str, words: str
) -> None:
    with pytest.raises(Breach) as refused:
        loaded(tmp_path, f"def {signature}: return q")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_flag_that_is_true_by_default_is_passed(tmp_path: Path) -> None:
    """A function that is causal unless it is told otherwise is told."""
    called(
        tmp_path,
        "q, k, v, causal=True, enable_gqa=True",
        returns="q * 1 if causal is enable_gqa is False else None",
    )


def test_a_file_that_does_not_load_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("DTYPES = 'float16'\ndef attention(q, k, v): return q")
    right = tmp_path / "right.py"
    right.write_text("def attention(q, k, v): return q")
    run = CampaignRun(tmp_path / "run", "dev", (path, right))
    (failure,) = run.roster.failures
    assert failure.message.startswith(
        "mine.py: DTYPES: 'float16' is no tuple of names out of float16, "
    )
    (verdict,) = load(run.directory).verdicts
    assert explain(verdict) == f"{path} does not load: {failure.message}"
    assert "\n" not in explain(verdict)


def test_an_input_that_was_changed_in_a_copy_is_a_breach(tmp_path: Path) -> None:
    with pytest.raises(Breach, match="changes its input k"):
        called(tmp_path, "q, k, v", returns="(k.fill_(1), q * 1)[1]\nLAYOUT = 'bshd'")


def test_a_link_gives_its_own_name(tmp_path: Path) -> None:
    """Its sources are those of the file that it leads to."""
    file, link = tmp_path / "one.py", tmp_path / "other.py"
    file.write_text("def attention(q, k, v):\n    return v\n", encoding="utf-8")
    link.symlink_to(file)
    found = load_kernel(link, str(ROOT))
    assert {variant.name for variant in found.variants} == {"other"}
    assert str(file) in found.sources
    assert str(link) not in found.sources
