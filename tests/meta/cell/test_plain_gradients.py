"""Gradients of plain functions by autograd: honest ones of every kind are within the bounds of an
unknown backward, wrong ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from references.masks import Causal
from references.score_mods import Softcap
from tests.properties import tier
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.cell.plain_gradients import DTYPES, unjudged
from verify.evidence import Recorder, Verdict
from verify.problem import Problem

HEAD = """
import math
import torch

GRADIENTS = True
HEAD_DIMS = (32,)


def masked(scores, causal):
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, -math.inf) if causal else scores
"""
EAGER = """
def attention(q, k, v, causal=False, softmax_scale=None, softcap=0.0):
    scores = q @ k.mT * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(masked(scores, causal), -1) @ v
"""
PRESCALED = """
def attention(q, k, v, causal=False, softmax_scale=None):
    return torch.softmax(masked((q * softmax_scale) @ k.mT, causal), -1) @ v
"""
FLASH = """
class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        scores = masked(q.float() @ k.float().mT * scale, causal)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        out = torch.exp(scores - lse).to(q.dtype) @ v
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        p = torch.exp(masked(q.float() @ k.float().mT * ctx.scale, ctx.causal) - lse)
        dp = dout.float() @ v.float().mT
        delta = DELTA
        ds = (p * (dp - delta)).to(q.dtype)
        dq, dk = ((x.float() * ctx.scale).to(q.dtype) for x in (ds @ k, ds.mT @ q))
        return dq, dk, p.to(q.dtype).mT @ dout, None, None


def attention(q, k, v, causal=False, softmax_scale=None):
    return Flash.apply(q, k, v, causal, softmax_scale)
"""
OF_OUTPUT, OF_WEIGHTS = "(dout.float() * out.float()).sum(-1, True)", "(p * dp).sum(-1, True)"
SDPA = """
def attention(q, k, v, is_causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""
MODULE = """
class Attention(torch.nn.Module):
    def forward(self, q, k, v, scale):
        return torch.softmax(q @ k.mT * scale, -1) @ v


MODULE = Attention()


def attention(q, k, v, softmax_scale=None):
    return MODULE(q, k, v, softmax_scale)
"""
OPERATOR = """
@torch.library.custom_op("plain_gradients::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, dout):
    q, k, v = ctx.saved_tensors
    scale = q.shape[-1] ** -0.5
    p = torch.softmax(q @ k.mT * scale, -1)
    dp = dout @ v.mT
    ds = p * (dp - (p * dp).sum(-1, True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


attend.register_autograd(backward, setup_context=save)


def attention(q, k, v):
    return attend(q, k, v)
"""
HONEST = {
    "a module": MODULE,
    "an operator": OPERATOR,
    "eager": EAGER,
    "prescaled": PRESCALED,
    "delta of O": FLASH.replace("DELTA", OF_OUTPUT),
    "delta of P dP": FLASH.replace("DELTA", OF_WEIGHTS),
    "torch": SDPA,
}
WRONG = {
    "no delta": (FLASH.replace("DELTA", "0.0"), "is off by"),
    "delta halved": (FLASH.replace("DELTA", f"{OF_OUTPUT} / 2"), "is off by"),
    "no scale in dK": (
        FLASH.replace("DELTA", OF_OUTPUT).replace("return dq, dk,", "return dq, dk / ctx.scale,"),
        "dk is off by",
    ),
    "no gradient of V": (
        EAGER.replace("-1) @ v", "-1) @ v.detach()"),
        "its result does not depend on v: no gradient",
    ),
}
SQUARE = Problem(
    batch=1, heads_q=2, heads_kv=2, seqlen_q=33, seqlen_kv=33, head_dim=32, dtype="bfloat16"
)
LARGE = SQUARE.but(softmax_scale=4.0)  # scores of a hundred: D and LSE are known badly
ONE_KEY = SQUARE.but(seqlen_q=5, seqlen_kv=1)  # where D is dP
PROBLEMS = (
    SQUARE,
    SQUARE.but(mask=Causal()),
    SQUARE.but(seqlen_kv=70, seed=1),
    LARGE,
    SQUARE.but(score_mod=Softcap(1.0)),
    SQUARE.but(distribution="sink"),
)


def judged(folder: Path, text: str, problems: tuple[Problem, ...] = PROBLEMS) -> list[Verdict]:
    file = folder / "mine.py"
    file.write_text(HEAD + text, encoding="utf-8")
    found = {each.name: each for each in roster([file]).declarations}
    backward = found["mine-gradients"]
    assert backward.unavailable is None
    assert backward.support.dtypes == DTYPES
    judge = Judge(Recorder(folder / "run", "main"))
    verdicts: list[Verdict] = []
    try:
        for problem in problems:
            for dtype in DTYPES:
                asked = problem.but(dtype=dtype)
                if backward.support.refusal(asked) is None:
                    target = Target(backward, backward.configs[0], dtype, "gradients")
                    verdicts += judge.judge(target, asked)
    finally:
        judge.close()
    return verdicts


@pytest.mark.parametrize("name", tier.for_ci(HONEST, keep=2))
def test_an_honest_backward_passes(name: str, tmp_path: Path) -> None:
    verdicts = judged(tmp_path, HONEST[name])
    assert [verdict.finding for verdict in verdicts if verdict.outcome == "fail"] == []
    of_bound = [v for v in verdicts if v.oracle == "gradient_bound" and v.dtype == "bfloat16"]
    assert len(of_bound) >= 3
    assert max(v.measures["r_dq"] for v in of_bound) > 0.005, "the bound says nothing"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_is_convicted_in_both_dtypes(name: str, tmp_path: Path) -> None:
    text, words = WRONG[name]
    failed = [v for v in judged(tmp_path, text, (SQUARE, ONE_KEY)) if v.finding is not None]
    assert {verdict.dtype for verdict in failed} == set(DTYPES)
    assert all(words in verdict.finding.message for verdict in failed if verdict.finding)


def test_a_function_that_autograd_does_not_know_is_not_judged_and_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text, words in (
        ("with torch.no_grad():\n        return q * 1", "its result requires no gradient"),
        ("raise OSError('no')", "gradients cannot be tried: OSError: no"),
    ):
        file.write_text(f"{HEAD}\n\ndef attention(q, k, v):\n    {text}\n", encoding="utf-8")
        forward, backward = roster([file]).declarations
        assert forward.unavailable is None
        assert words in str(backward.unavailable)
    file.write_text(f"{HEAD}\nDTYPES = ('float16',)\ndef attention(q, k, v): return q")
    _, backward = roster([file]).declarations
    assert backward.unavailable == (
        "gradients of a plain function are judged in bfloat16 and float32 only"
    )
    file.write_text(f"{HEAD}\nDTYPES = ('float16', 'float32')\n{EAGER}", encoding="utf-8")
    ((ref, dtype, why),) = unjudged(roster([file]).declarations)
    assert (ref, dtype) == (f"{file}@mine-gradients", "float16")
    assert why.startswith("gradients are not judged: its range is so short")


def test_gradients_are_tried_on_a_problem_that_the_function_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    words = {"seqlen_q_multiple": 24, "min_seqlen": 30, "grouped_heads": "only"}
    body = "    assert q.shape[1:3] == (2 * k.shape[1], 48)\n    return q * 1\n"
    for more in ({}, {"max_seqlen": 48}):
        said = f"{HEAD}\nWITHIN = {words | more}\n"
        file.write_text(f"{said}\ndef attention(q, k, v):\n{body}", encoding="utf-8")
        assert [each.unavailable for each in roster([file]).declarations] == [None, None]
