"""Every adapter, against pure-torch doubles of its signature: a right one and a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from references.masks import Causal, Window
from references.score_mods import Softcap
from tests.properties import tier
from verify.adapters import NAMES
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.evidence import Recorder
from verify.problem import Problem
from verify.variant import Declaration

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = """
import math
import torch

HEAD_DIMS = (64,)
GRADIENTS = True


def attend(q, k, v, scale, seen=None, cap=0.0):
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * (SCALE * scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
        empty = ~seen.any(-1, keepdim=True)
        return (torch.softmax(scores.masked_fill(empty, 0.0), -1) @ v).masked_fill(empty, 0.0).to(q)
    return (torch.softmax(scores, -1) @ v).to(q.dtype)


def band(q, k, left, right):
    diagonal = k.shape[2] - q.shape[2] if ALIGNED else 0
    rows = torch.arange(q.shape[2])[:, None] + diagonal
    keys = torch.arange(k.shape[2])
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if left >= 0:
        seen &= keys >= rows - left
    if right >= 0:
        seen &= keys <= rows + right
    return seen
"""
DOUBLES = {
    "flash_attn_func": """
ALIGNED = True
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                    window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = band(q, k, window_size[0], 0 if causal else window_size[1])
    return attend(q, k, v, softmax_scale, seen, softcap).transpose(1, 2)
""",
    "scaled_dot_product_attention": """
ALIGNED = False
def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0,
                                 is_causal=False, scale=None, enable_gqa=False):
    assert enable_gqa or query.shape[1] == key.shape[1]
    seen = band(query, key, -1, 0) if is_causal else attn_mask
    return attend(query, key, value, scale, seen)
""",
    "flex_attention": """
ALIGNED = False
from torch.nn.attention import flex_attention as flex
def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None,
                   enable_gqa=False, return_lse=False, kernel_options=None):
    assert enable_gqa or query.shape[1] == key.shape[1]
    return flex.flex_attention(query, key, value, score_mod, block_mask, SCALE * scale, enable_gqa)
""",
    "memory_efficient_attention": """
ALIGNED = False
def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    seen = None if attn_bias is None else attn_bias == 0
    return attend(q, k, v, scale, seen).transpose(1, 2)
""",
    "parallel_attn": """
ALIGNED = True
def parallel_attn(q, k, v, g=None, scale=None, cu_seqlens=None):
    assert q.shape[1] == k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, scale, band(q, k, -1, 0)).transpose(1, 2)
""",
    "single_prefill_with_kv_cache": """
ALIGNED = True
def single_prefill_with_kv_cache(q, k, v, scale_q=None, causal=False, kv_layout="NHD",
                                 window_left=-1, logits_soft_cap=None, sm_scale=None):
    assert kv_layout == "NHD" and q.dim() == 3
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = band(q, k, window_left, 0 if causal else -1)
    return attend(q, k, v, sm_scale, seen, logits_soft_cap)[0].transpose(0, 1)
""",
    "sageattn": """
ALIGNED = False
def integers(x, tile):
    largest = torch.nn.functional.pad(x.abs().amax(-1), (0, -x.shape[2] % tile))
    factor = largest.unflatten(2, (-1, tile)).amax(-1).repeat_interleave(tile, 2) / 127 + 1e-7
    factor = factor[:, :, :x.shape[2], None]
    return torch.round(x / factor).to(torch.int8).int(), factor


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False,
             **kwargs):
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    mean = k.mean(2, keepdim=True)
    (q8, by_q), (k8, by_k) = integers(q.float(), 32), integers((k - mean).float(), 64)
    scores = (q8 @ k8.mT).float() * (by_q * by_k.mT * (SCALE * sm_scale))
    if is_causal:
        scores = scores.masked_fill(~band(q, k, -1, 0), -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    out = (p.half().float() @ v.half().float() / total).to(q.dtype)
    back = (q @ mean.mT)[..., 0].float() * sm_scale if ADDED else 0.0
    lse = (top + torch.log(total))[..., 0] + back
    out = out.transpose(1, 2) if tensor_layout == "NHD" else out
    return (out, lse) if return_lse else out
""",
}
# The first call of torch's own imports its compiler, which takes seconds; the right one calls it.
PLAIN_FLEX = """
def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None,
                   enable_gqa=False, return_lse=False, kernel_options=None):
    assert score_mod is None and block_mask is None
    return attend(query, key, value, scale)
"""
PLAIN = Problem(
    batch=2, heads_q=2, heads_kv=2, seqlen_q=9, seqlen_kv=9, head_dim=64, dtype="bfloat16"
)
ASKED = (
    PLAIN,
    PLAIN.but(heads_q=4, seqlen_q=5),
    PLAIN.but(mask=Causal()),
    PLAIN.but(mask=Causal(), heads_q=4),
    PLAIN.but(mask=Causal(), seqlen_q=70, seqlen_kv=70),
    PLAIN.but(mask=Causal(), seqlen_kv=12),
    PLAIN.but(mask=Causal("tl"), seqlen_kv=12),
    PLAIN.but(mask=Window(3, 1)),
    PLAIN.but(score_mod=Softcap(1.0)),
)


@contextmanager
def judged(
    name: str, scale: float, folder: Path, more: str = "", double: str = ""
) -> Iterator[tuple[Judge, list[Declaration]]]:
    file = folder / "double.py"
    said = f"LIKE = {name!r}\nSCALE = {scale}\nADDED = True\n{more}\n"
    file.write_text(said + BASE + (double or DOUBLES[name]), encoding="utf-8")
    found = roster([file])
    assert not found.failures, found.failures
    judge = Judge(Recorder(folder / "run", "main"))
    try:
        yield judge, list(found.declarations)
    finally:
        judge.close()


def verdicts(judge: Judge, declaration: Declaration, problems: tuple[Problem, ...]) -> list:
    group = "gradients" if "backward" in declaration.entries else "accuracy"
    target = Target(declaration, declaration.configs[0], "bfloat16", group)
    asked = [problem for problem in problems if declaration.support.refusal(problem) is None]
    assert asked
    return [verdict for problem in asked for verdict in judge.judge(target, problem)]


def test_every_adapter_has_a_double() -> None:
    assert set(DOUBLES) == set(NAMES)


@pytest.mark.parametrize("name", tier.for_ci(NAMES, keep=2))
def test_a_right_function_passes(name: str, tmp_path: Path) -> None:
    with judged(name, 1.0, tmp_path) as (judge, declarations):
        forward, backward = declarations
        found = verdicts(judge, forward, ASKED)
        assert len({verdict.problem for verdict in found}) >= 2
        assert len(found) >= 3
        if backward.unavailable is None:
            found += verdicts(judge, backward, ASKED)
        assert [v.finding for v in found if v.outcome == "fail"] == []


@pytest.mark.parametrize("name", tier.for_ci(NAMES, keep=2))
def test_a_wrong_scale_is_convicted(name: str, tmp_path: Path) -> None:
    double = PLAIN_FLEX if name == "flex_attention" else ""
    with judged(name, 1.3, tmp_path, double=double) as (judge, (forward, *_)):
        first = [p for p in ASKED if forward.support.refusal(p) is None][:1]
        found = [v.finding for v in verdicts(judge, forward, tuple(first)) if v.outcome == "fail"]
        assert found
        assert "out is off by" in found[0].message
        assert judge.layouts.tried == {}  # its layout is that of the signature: no other is tried


@pytest.mark.parametrize("layout", tier.for_ci(["bshd", "bhsd"]))
def test_the_mean_of_keys_that_lse_does_not_get_back_is_convicted(
    layout: str, tmp_path: Path
) -> None:
    """Both layouts of the signature are called; the right function passes in both."""
    problem = PLAIN.but(heads_q=4, mask=Causal(), seqlen_q=70, seqlen_kv=70, dtype="float16")
    for added, outcome in (("True", []), ("False", ["lse"])):
        folder = tmp_path / added
        folder.mkdir()
        more = f"ADDED = {added}\nLAYOUT = {layout!r}"
        with judged("sageattn", 1.0, folder, more) as (judge, (forward, *others)):
            assert forward.contract.lse == "natural"
            assert all("inference" in str(each.unavailable) for each in others)
            target = Target(forward, forward.configs[0], "float16", "accuracy")
            failed = [v.finding for v in judge.judge(target, problem) if v.outcome == "fail"]
            assert [f.message.split()[0] for f in failed if f is not None] == outcome


def test_what_a_signature_does_not_have_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text, words in (
        ("LIKE = 'flash'", "LIKE: 'flash' is none of flash_attn_func, "),
        ("LIKE = 'sageattn'\nLAYOUT = 'sbhd'", "LAYOUT: 'sbhd' is none of bhsd, bshd"),
        ("LIKE = 'flash_attn_func'\nLAYOUT = 'bhsd'", "LAYOUT: that of flash_attn_func is bshd"),
        ("LIKE = 'flash_attn_func'\nMASKS = ('dense',)", "MASKS: 'dense' is none of full, causal"),
    ):
        file.write_text(f"{text}\ndef attention(q, k, v): return q", encoding="utf-8")
        (failure,) = roster([file]).failures
        assert words in failure.message
        assert "\n" not in failure.message
