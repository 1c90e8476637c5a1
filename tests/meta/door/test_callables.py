"""Callables that are no functions, handed to `verify.check` as they are: right ones pass, and wrong
ones are convicted."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from references.masks import Causal
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import Roster, roster
from verify.door.checking import _gradients
from verify.door.stand_in import stand_in
from verify.evidence import Evidence, NotRun, Recorder, Verdict, Verdicts
from verify.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")

OBJECTS = """
import functools
import math

import torch

DTYPES = ("float32",)
HEAD_DIMS = (32,)
GRADIENTS = True


def attend(q, k, v, scale, causal=False):
    scores = q @ k.mT * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return torch.softmax(scores, -1) @ v


class Attention(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, q, k, v, causal=False, softmax_scale=None):
        return attend(q, k, v, self.factor * softmax_scale, causal)


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, delta=1.0):
        ctx.save_for_backward(q, k, v)
        ctx.causal, ctx.scale, ctx.delta = causal, sm_scale, delta
        return attend(q, k, v, sm_scale, causal)

    @staticmethod
    def backward(ctx, dout):
        q, k, v = ctx.saved_tensors
        p = attend(q, k, torch.eye(k.shape[2]), ctx.scale, ctx.causal)
        dp = dout @ v.mT
        ds = p * (dp - ctx.delta * (p * dp).sum(-1, True)) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ dout, None, None, None


class WithoutDelta(Flash):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        return Flash.forward(ctx, q, k, v, causal, sm_scale, 0.0)

    @staticmethod
    def backward(ctx, dout):
        return Flash.backward(ctx, dout)[:5]


class Apart(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, scale=None):
        return attend(q, k, v, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.causal, ctx.scale, ctx.delta = False, inputs[3], 1.0

    @staticmethod
    def backward(ctx, dout):
        return Flash.backward(ctx, dout)[:4]


@torch.library.custom_op("callables::attend", mutates_args=())
def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return attend(q, k, v, scale)


@torch.library.custom_op("callables::wrong", mutates_args=())
def wrong_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return attend(q, k, v, q.shape[-1] ** -0.5, False)


right_module, wrong_module = Attention(1.0), Attention(1.1)
packet = torch.ops.callables.wrong
partial = functools.partial(attend, causal=False)
of_torch = torch.nn.functional.scaled_dot_product_attention
"""
SQUARE = Problem(
    batch=1, heads_q=2, heads_kv=2, seqlen_q=33, seqlen_kv=33, head_dim=32, dtype="float32"
)
# Name -> which of (forward, gradients) is convicted; None: autograd does not know it.
EXPECTED: dict[str, tuple[bool, bool | None]] = {
    "right_module": (False, False),
    "wrong_module": (True, True),
    "Flash.apply": (False, False),
    "WithoutDelta.apply": (False, True),
}
FURTHER: dict[str, tuple[bool, bool | None]] = {
    "Apart.apply": (False, False),
    "partial": (False, False),
    "operator": (False, None),  # a first call takes two seconds
    "packet": (True, None),
}


@pytest.fixture(name="objects")
def _objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "objects_of_theirs.py").write_text(OBJECTS, encoding="utf-8")
    return importlib.import_module("objects_of_theirs")


def named(module: Any, name: str) -> Callable[..., Any]:
    value = module
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def failed(judge: Judge, found: Roster, file: Path, suffix: str) -> bool | None:
    (declared,) = [d for d in found.declarations if d.name == file.stem + suffix]
    if declared.unavailable is not None:
        assert "it has no backward: Trying to backward through callables" in declared.unavailable
        return None
    group = "gradients" if suffix else "accuracy"
    target, verdicts = Target(declared, declared.configs[0], "float32", group), list[Verdict]()
    for problem in (SQUARE, SQUARE.but(mask=Causal())):
        if declared.support.refusal(problem) is None:
            verdicts += judge.judge(target, problem)
    assert len({verdict.problem for verdict in verdicts}) == len(declared.support.masks)
    return any(verdict.outcome == "fail" for verdict in verdicts)


@pytest.mark.parametrize("expected", [EXPECTED, pytest.param(FURTHER, marks=pytest.mark.thorough)])
def test_each_is_judged_as_it_is(
    objects: ModuleType, tmp_path: Path, expected: dict[str, tuple[bool, bool | None]]
) -> None:
    files = {name: stand_in(named(objects, name), {}) for name in expected}
    found = roster(list(files.values()))
    assert not found.failures, found.failures
    judge = Judge(Recorder(tmp_path / "run", "main"))
    try:
        seen = {
            name: (failed(judge, found, file, ""), failed(judge, found, file, "-gradients"))
            for name, file in files.items()
        }
    finally:
        judge.close()
    assert seen == expected


def test_one_without_parameters_needs_a_public_signature(objects: ModuleType) -> None:
    bare = stand_in(objects.of_torch, {})
    like = stand_in(objects.of_torch, {"LIKE": "scaled_dot_product_attention"})
    found = roster([bare, like])
    (failure,) = found.failures
    assert "whose parameters cannot be read: call it from a function" in failure.message
    assert {d.support.grouped_heads for d in found.declarations} == {True}


def test_problems_stay_within_the_words_of_a_call(objects: ModuleType) -> None:
    words = {"seqlen_q_multiple": 16, "grouped_heads": "only", "scales": "positive"}
    without_scale = {"LIKE": "parallel_attn", "WITHIN": {"min_seqlen": 4}}
    files = [stand_in(objects.right_module, {"WITHIN": words})]
    files += [stand_in(objects.attend, without_scale)]
    files += [stand_in(objects.wrong_operator, {"WITHIN": {"scales": "positive"}})]
    found = roster(files)
    first, like = (d.support for d in found.declarations if not d.name.endswith("-gradients"))
    assert {name: getattr(first, name) for name in words} == words
    assert (like.min_seqlen, like.grouped_heads) == (4, True)
    (failure,) = found.failures
    assert "WITHIN: scales: the function has no parameter for a scale" in failure.message


def test_a_report_says_why_a_dtype_has_no_gradients() -> None:
    def verdict(dtype: str, **measures: float) -> Verdict:
        names = dict.fromkeys(("case", "variant", "config", "oracle", "group", "problem"), "mine")
        return Verdict(**names, dtype=dtype, outcome="pass", phase="generate", measures=measures)

    counted = [verdict("float32", r_dq=0.1), verdict("float16"), verdict("bfloat16")]
    unjudged = NotRun(variant="mine-gradients", dtype="float16", reason="its range is short")
    words = _gradients(Evidence(not_run=(unjudged,)), Verdicts.of(counted))
    assert words == "judged in float32, not in bfloat16, float16 (its range is short)"
    assert _gradients(Evidence(), Verdicts.of(counted[:1])) == "judged in float32"


def test_what_no_module_holds_is_refused_in_one_line(objects: ModuleType) -> None:
    for value, words in (
        (objects.Attention(1.0), "an object of Attention cannot be imported by name .* bind it to"),
        (objects.Attention, "Attention is no function: pass an instance of it, or the path"),
        (objects.Flash, "Flash is no function: pass an instance of it, or the path of a file"),
        (3, "an object of int is no function: pass the path of a file"),
    ):
        with pytest.raises(TypeError, match=re.compile(words)) as caught:
            stand_in(value, {})
        assert "\n" not in str(caught.value)
