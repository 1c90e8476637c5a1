"""Words of support in a campaign: a kernel that keeps its words passes, and one that computes
outside them is convicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from references.masks import Window
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.evidence import Recorder
from verify.problem import Problem
from verify.variant import DeclarationError, Numerics, Softmax, Support, Variant

KERNEL = """
import math
from dataclasses import replace

import torch

from verify.variant import Contract, Numerics, Output, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float32",),
    head_dims=(16,),
    masks=("full", "causal", "window"),
    windows="causal",
    grouped_heads="only",
    longer_q=False,
    seqlen_q_multiple=16,
    seqlen_kv_multiple=24,
    scales="nonzero",
    layouts="contiguous",
    devices=("cpu",),
)
CHECKED = replace(SUPPORT, **WIDER)


def forward(args, out, lse, workspace):
    CHECKED.check(args, out)
    group = args.heads_q // args.heads_kv
    k, v = (x.repeat_interleave(group, 1) for x in (args.k, args.v))
    shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
    scores = (args.q @ k.mT * args.softmax_scale).masked_fill(~args.mask.dense(*shape), -math.inf)
    total = torch.logsumexp(scores, -1)
    p = torch.exp(scores - total.clamp(min=torch.finfo(torch.float32).min)[..., None])
    out.copy_(p @ v)
    lse.copy_(total)


VARIANT = Variant(
    name="NAME",
    family="torch",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(
        softmax=Softmax(exp="exp_u20", block_n=0), output=Output(normalised=True, normaliser="lse")
    ),
    contract=Contract(masked_values="finite", deterministic=True),
)
"""
INSIDE = Problem(heads_q=2, seqlen_q=16, seqlen_kv=24, head_dim=16, dtype="float32")
# What a wrong kernel accepts besides, and a problem that it should refuse.
OUTSIDE = {
    "seqlen_q": ({"seqlen_q_multiple": 1}, INSIDE.but(seqlen_q=17)),
    "seqlen_kv": ({"seqlen_kv_multiple": 1}, INSIDE.but(seqlen_kv=25)),
    "longer": ({"longer_q": True}, INSIDE.but(seqlen_q=32)),
    "heads_kv": ({"grouped_heads": True}, INSIDE.but(heads_q=1)),
    "mask": ({"windows": "any"}, INSIDE.but(mask=Window(3, 2))),
    "softmax_scale": ({"scales": "any"}, INSIDE.but(softmax_scale=0.0)),
}


def test_a_kernel_keeps_its_words_or_is_convicted(tmp_path: Path) -> None:
    files = [tmp_path / "right.py", *(tmp_path / f"{name}.py" for name in OUTSIDE)]
    for file, wider in zip(files, [{}, *(each for each, _ in OUTSIDE.values())], strict=True):
        text = KERNEL.replace("WIDER", repr(wider)).replace("NAME", file.stem)
        file.write_text(text, encoding="utf-8")
    found = roster(files)
    assert not found.failures, found.failures
    right, *wrong = found.declarations
    judge = Judge(Recorder(tmp_path / "run", "main"))

    def failures(declaration: object, group: str, problem: Problem) -> list[str]:
        target = Target(declaration, declaration.configs[0], "float32", group)  # type: ignore[attr-defined, arg-type]
        return [v.finding.message for v in judge.judge(target, problem) if v.finding is not None]

    try:
        assert failures(right, "accuracy", INSIDE) == []
        for _, problem in OUTSIDE.values():
            assert failures(right, "refusal", problem) == []
        for declaration, (_, problem) in zip(wrong, OUTSIDE.values(), strict=True):
            assert failures(declaration, "refusal", problem) != [], declaration.name
    finally:
        judge.close()


def test_an_arithmetic_for_each_dtype() -> None:
    whole = Variant(
        name="mine",
        family="tests",
        forward=lambda *_: None,
        support=Support(dtypes=("float16", "bfloat16"), head_dims=(64,)),
        numerics=Numerics(softmax=Softmax(block_n=32)),
        builds=lambda arch: (),
    )
    half = Numerics(softmax=Softmax(block_n=128))
    first, second = whole.by_dtype(numerics={"bfloat16": half})
    assert (first.name, second.name) == ("mine-float16", "mine-bfloat16")
    assert (first.support.dtypes, second.support.dtypes) == (("float16",), ("bfloat16",))
    assert (first.numerics, second.numerics) == (whole.numerics, half)
    assert first.builds is not None
    assert second.builds is None
    for given, words in (
        ({"numerics": {"float32": half}}, "mine: numerics: 'float32' is none of float16, bfloat16"),
        ({"numerics": half}, "mine: numerics: Numerics.* is no mapping of dtypes out of float16"),
        ({"numerics": {"float16": 3}}, "mine-float16: numerics: 3 is no Numerics"),
        ({"gradients": {"half": None}}, "mine: gradients: 'half' is none of float16, bfloat16"),
    ):
        with pytest.raises(DeclarationError, match=words):
            whole.by_dtype(**given)  # type: ignore[arg-type]
