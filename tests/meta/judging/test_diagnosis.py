"""Diagnosis: a finding says for which other problem the results would be right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import parse_mask
from tests.harness.fake_trials import OK, PLAIN, right_run, trial_of
from verify.evidence import Finding
from verify.judging import diagnosis
from verify.judging.diagnosis import Diagnoses
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.other_problems import hypotheses
from verify.judging.trial import Trial
from verify.oracles import bound
from verify.problem import Layout, Problem
from verify.variant import Contract, Numerics, Output, Products, Softmax

EXACT = Numerics(
    products=Products(operands="float32"),
    softmax=Softmax(exp="vexp"),
    output=Output(probability="float32"),
)
CAUSAL, WINDOW = parse_mask("causal"), parse_mask("window.3.1")
SCALED = PLAIN.but(softmax_scale=0.3, head_dim=32, head_dim_v=32)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """O and LSE by torch's own functions."""
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def wrongly(p: Problem, how: str) -> Trial:
    """A trial whose kernel has the named fault."""
    trial = trial_of(p, numerics=EXACT)
    q, k, v = (x.double() for x in trial.expanded)
    heads = torch.arange(p.heads_q)
    heads = heads % p.heads_kv if how == "modulo" else heads // p.group
    k, v = k[:, heads], v[:, heads]
    rows, keys = torch.arange(p.seqlen_q)[:, None], torch.arange(p.seqlen_kv)
    diagonal = p.seqlen_kv - p.seqlen_q
    seen: Tensor = p.mask.dense(p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    scale = {"default scale": p.head_dim**-0.5, "no scale": 1.0}.get(how, p.scale)
    masks: dict[str, Callable[[], Tensor]] = {
        "off by one": lambda: keys < rows + diagonal,
        "one more": lambda: keys <= rows + diagonal + 1,
        "top left": lambda: keys <= rows,
        "exclusive": lambda: (keys > rows + diagonal - 3) & (keys <= rows + diagonal + 1),
        "no mask": lambda: torch.ones_like(seen),
        "causal": lambda: keys <= rows + diagonal,
    }
    if how in masks:
        seen = masks[how]()
    if how == "unmasked end":
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, -p.seqlen_kv % 16)) for x in (k, v))
        seen = torch.ones(k.shape[2], dtype=torch.bool)
    if how == "lost end":
        seen = keys < p.seqlen_kv - p.seqlen_kv % 8
    out, lse = attention(q, k, v, seen, scale)
    top = (q @ k.mT * p.scale).masked_fill(~seen, -math.inf).amax(-1)
    changed: dict[str, Callable[[], Tensor]] = {
        "base 2": lambda: lse / math.log(2),
        "unscaled maximum": lambda: top / p.scale + lse - top,
        "unscaled scores": lambda: (q @ k.mT).logsumexp(-1),
        "no maximum": lambda: lse - top,
        "maximum alone": lambda: top,
        "mixed bases": lambda: top + (lse - top) / math.log(2),
    }
    if how in changed:
        lse = changed[how]()
    if how == "rescale":
        out = out * 1.5
    trial.launches["first"] = Launch(OK, "nan", {"out": out.float(), "lse": lse.float()})
    return trial


def said(diagnoses: Diagnoses, trial: Trial) -> str:
    ruling = bound.FORWARD.judge(trial)
    assert ruling.finding is not None
    told = diagnoses.explained(trial, ruling).finding
    assert told is not None
    assert replace(told, message=ruling.finding.message) == ruling.finding, "no verdict changes"
    assert told.message.startswith(ruling.finding.message)
    return told.message.removeprefix(ruling.finding.message)


FAULTS = [
    ("default scale", SCALED, "softmax_scale = head_dim ** -0.5 (0.176777, not 0.3)"),
    ("no scale", SCALED, "scores that are not scaled"),
    ("off by one", PLAIN.but(mask=CAUSAL), "one key less on the right"),
    ("one more", PLAIN.but(mask=CAUSAL), "one key more on the right"),
    ("top left", PLAIN.but(mask=CAUSAL), "aligned to the top left"),
    ("exclusive", PLAIN.but(mask=WINDOW), "one key less on the left"),
    ("no mask", PLAIN.but(mask=WINDOW), "no mask"),
    ("causal", PLAIN, "a causal mask, where none was asked"),
    ("modulo", PLAIN.but(heads_q=6, heads_kv=3), "key head h % heads_kv"),
    ("unmasked end", PLAIN.but(seqlen_kv=4), "12 further keys of zeros"),
    ("lost end", PLAIN, "the first 8 keys"),
    ("base 2", SCALED, "an LSE in base 2"),
    ("unscaled maximum", SCALED, "an LSE whose row maximum is not scaled"),
    ("unscaled scores", SCALED, "an LSE of scores that are not scaled"),
    ("no maximum", SCALED, "an LSE without the row maximum"),
    ("maximum alone", SCALED, "the row maximum alone"),
    ("mixed bases", SCALED, "the row sum's logarithm in base 2"),
]


@pytest.mark.parametrize(("how", "problem", "words"), FAULTS, ids=[how for how, _, _ in FAULTS])
def test_the_finding_names_what_was_computed_instead(
    how: str, problem: Problem, words: str
) -> None:
    text = said(Diagnoses(), wrongly(problem, how))
    assert text.startswith("; the results would be right for ")
    assert words in text
    assert ", or for " not in text


def test_a_right_kernel_has_no_diagnosis() -> None:
    trial = trial_of(PLAIN, numerics=EXACT)
    trial.launches["first"] = right_run(trial)
    ruling = bound.FORWARD.judge(trial)
    assert ruling.finding is None
    assert Diagnoses().explained(trial, ruling) is ruling


def test_what_is_less_than_a_bound_has_no_diagnosis() -> None:
    """Such a finding is of numbers that are known, not of another problem."""
    trial = trial_of(PLAIN, numerics=EXACT)
    trial.launches["first"] = right_run(trial)
    finding = Finding(oracle="bound", message="no rounding of what is known", got=1.0, bound=0.0)
    ruling = Ruling(finding)
    assert Diagnoses().explained(trial, ruling) is ruling


def test_what_no_problem_can_be_is_left_out() -> None:
    """The square of this scale is below fp32's range: an error of the judge, once."""
    tiny = SCALED.but(softmax_scale=2.5e-30)
    found = [other.problem.scale for other in hypotheses(tiny, wrongly(tiny, "").expanded)]
    assert found
    assert 2.5e-30**2 not in found


def test_strides_do_not_matter() -> None:
    strided = PLAIN.but(heads_q=6, heads_kv=3, layout_k=Layout("bshd", 8, 1))
    assert "h % heads_kv" in said(Diagnoses(), wrongly(strided, "modulo"))


def test_a_right_lse_beside_a_wrong_output_says_where_to_look() -> None:
    assert said(Diagnoses(), wrongly(PLAIN, "rescale")) == (
        "; its LSE is right, so are scores and mask: look at P V, V and the rescaling of O"
    )


def test_a_sum_that_overflows_is_named() -> None:
    p = PLAIN.but(dtype="float16")
    trial = trial_of(p, contract=Contract(lse=None))
    inputs = trial.inputs
    trial.__dict__["inputs"] = replace(
        inputs, q=torch.full_like(inputs.q, 100.0), k=torch.full_like(inputs.k, 100.0)
    )
    out = torch.full(p.shape_out, math.nan, dtype=torch.float16)
    trial.launches["first"] = Launch(OK, "nan", {"out": out})
    text = said(Diagnoses(), trial)
    assert "sum up to as much as 1.6e+05, more than float16 holds" in text
    small = trial_of(PLAIN, contract=Contract(lse=None))
    small.launches["first"] = Launch(OK, "nan", {"out": torch.full(PLAIN.shape_out, math.nan)})
    assert said(Diagnoses(), small) == ""


def test_a_small_case_is_explained_by_what_larger_ones_have_shown() -> None:
    """One key without a mask fits several masks; the case before it fits one."""
    small = PLAIN.but(seqlen_q=2, seqlen_kv=2, mask=CAUSAL)
    assert ", or for " in said(Diagnoses(), wrongly(small, "no mask"))
    kept = Diagnoses()
    assert said(kept, wrongly(PLAIN.but(mask=CAUSAL), "no mask")).endswith(" for no mask")
    assert said(kept, wrongly(small, "no mask")).endswith(" for no mask")


def test_what_nothing_explains_costs_a_few_cases_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []
    real = diagnosis.compute_truth

    def counted(p: Problem, *rest: object) -> object:
        asked.append(p)
        return real(p, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(diagnosis, "compute_truth", counted)
    kept = Diagnoses()
    counts = []
    for seed in range(6):
        said(kept, wrongly(PLAIN.but(seed=seed), "rescale"))
        counts.append(len(asked))
    assert counts[0] > 3
    assert counts[3] == counts[4] == counts[5]
    large = wrongly(PLAIN, "causal")
    monkeypatch.setattr(diagnosis, "_MOST", 1)
    assert said(Diagnoses(), large) == ""
