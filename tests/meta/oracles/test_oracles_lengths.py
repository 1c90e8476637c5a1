"""Lengths beside powers of two: what is asked where, and indices that wrap there are convicted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from references.masks import Causal, Documents, Full, Lengths, Mask, Prefix, Window, intersect
from tests.faults.fault import (
    BACKWARD_KERNELS,
    TRITON_BACKWARD,
    TRITON_FORWARD,
    TRITON_TILES,
    plant,
)
from tests.faults.stand import Stand, finest
from tests.harness.fake_trials import DECLARED, PLAIN, acquitted, convicted, tried
from tests.properties import tier
from verify.campaign.targets import Target
from verify.cell.process import PLAIN_CUDA
from verify.oracles import counting
from verify.oracles.long import lengths
from verify.problem.visibility import intervals
from verify.variant import GradientNumerics

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


WRAPS = {
    "keys at 2048": (
        TRITON_FORWARD,
        TRITON_FORWARD,
        (
            "rows_of(k_head, steps[1], key, ALIGNED)",
            "rows_of(k_head, steps[1], key % 2048, ALIGNED)",
        ),
    ),
    "keys at 2048 in dQ": (
        TRITON_BACKWARD,
        BACKWARD_KERNELS,
        (
            "tl.load(rows_of(k_head, steps[1], key, ALIGNED) + dims,",
            "tl.load(rows_of(k_head, steps[1], key % 2048, ALIGNED) + dims,",
        ),
    ),
    "rows at 4096": (
        TRITON_FORWARD,
        TRITON_FORWARD,
        ("ALIGNED), steps[0], row, ALIGNED)", "ALIGNED), steps[0], row % 4096, ALIGNED)"),
    ),
    "a counter of 64 blocks of keys": (
        TRITON_FORWARD,
        TRITON_TILES,
        ("    return walk[2] - walk[1]\n", "    return (walk[2] - walk[1]) % 64\n"),
    ),
    "delta of rows at 4096": (
        TRITON_BACKWARD,
        BACKWARD_KERNELS,
        (
            "delta_row = tl.load(delta + sums + row)\n",
            "delta_row = tl.load(delta + sums + row % 4096)\n",
        ),
    ),
    "rows of dO at 8192": (
        TRITON_BACKWARD,
        BACKWARD_KERNELS,
        (
            "do_rows = rows_of(do_head, steps[3], row, ALIGNED)",
            "do_rows = rows_of(do_head, steps[3], row % 8192, ALIGNED)",
        ),
    ),
}
VARIANTS = {TRITON_FORWARD: "triton-flash-forward", TRITON_BACKWARD: "triton-flash-backward"}


@pytest.mark.parametrize("name", tier.for_ci(WRAPS, keep=0))
def test_an_index_that_wraps_at_thousands_is_convicted_without_a_gpu(
    name: str, stand: Stand
) -> None:
    """Each kernel file's own campaign asks these problems in every profile."""
    file, edited, (right, wrong) = WRAPS[name]

    def edit(text: str) -> str:
        assert text.count(right) == 1
        return text.replace(right, wrong)

    path = plant(stand.folder / f"wrap {list(WRAPS).index(name)}", file, edited, edit)
    planted = stand.load(path, VARIANTS[file])
    group = "lengths" if file == TRITON_FORWARD else "lengths_gradients"
    target = Target(planted, finest(planted), "float16", group)
    failing: set[str] = set()
    # rows are asked after keys
    for problem in target.asked[:: -1 if "rows" in name else 1]:
        verdicts = stand.judge.judge(target, problem)
        failing = {verdict.oracle for verdict in verdicts if verdict.outcome == "fail"}
        if failing:
            break
    assert failing
    assert failing <= {"counting", "gather", "gather_backward", "memory"}


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "environment", lambda: PLAIN_CUDA)


def test_a_gpu_is_asked_every_length_beside_a_power_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch)
    every = {power + side for power in (1024, 2048, 4096, 8192) for side in (-1, 0, 1)}
    gradients = replace(DECLARED, gradients=GradientNumerics(), entries=("forward", "backward"))
    for problems in (lengths.forward_problems, lengths.backward_problems):
        asked = problems(gradients, "float16")
        ragged = {n for p in asked for n in p.kv_lengths() if p.distribution == "counting"}
        for distribution in {p.distribution for p in asked} - {"counting"}:
            gathered = [p for p in asked if p.distribution == distribution]
            assert {p.seqlen_kv for p in gathered if p.seqlen_q == 3} == every
            assert {p.seqlen_q for p in gathered if p.seqlen_kv == 5} == every
            assert any(min(p.seqlen_q, p.seqlen_kv) > 2048 for p in gathered)
        assert ragged in (every, set())
        further = problems(gradients, "float32")
        assert {p.seqlen_kv for p in further if p.seqlen_q == 3} == {2047, 4096, 8193}


def test_a_cpu_is_asked_one_dtype_and_an_interpreter_a_few_lengths() -> None:
    for declaration in (DECLARED, replace(DECLARED, interpreted=True)):
        assert lengths.forward_problems(declaration, "float32") == []
        (first, *rest) = lengths.forward_problems(declaration, "float16")
        assert first.distribution == "counting"
        assert max(first.kv_lengths()) == 8193
        assert {p.seqlen_kv for p in rest if p.seqlen_q == 3} >= {2047, 4096, 8193}
        assert max(p.seqlen_q for p in rest) == 8193


def test_no_square_is_asked_of_a_kernel_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    causal = replace(DECLARED, support=replace(DECLARED.support, masks=("full", "causal")))
    (group, _) = lengths.GROUPS
    assert group.asks is not None
    asked = group.asks(causal, "float16")
    assert len(asked) > 20
    assert max(p.pairs for p in asked) < 50_000
    single = [p for p in asked if p.distribution == "counting"]
    assert {p.seqlen_kv for p in single} == {p.seqlen_q for p in asked if p.seqlen_kv == 5}


MASKS: tuple[Mask, ...] = (
    Full(),
    Causal(),
    Causal("tl"),
    Window(3, 0),
    Window(None, -2),
    Prefix(4),
    Documents((2, 0, 4)),
    Lengths((6, 2), (9, 0)),
    intersect(Causal(), Lengths((4, 6), (7, 9))),
)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_keys_are_counted_from_intervals_as_from_the_whole_mask(mask: Mask) -> None:
    case = PLAIN.but(distribution="counting", mask=mask)
    trial = tried(case)
    seen = mask.dense(case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    hits, visible = counting._counts(trial)
    assert intervals(case) is not None
    assert torch.equal(visible, seen.sum(-1))
    want = seen.double() @ trial.expanded[2].double().repeat_interleave(case.group, 1)
    assert torch.equal(hits, want)


def test_a_lost_block_of_keys_is_miscounted() -> None:
    case = PLAIN.but(
        batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=4097, distribution="counting"
    )
    right = tried(case)
    assert acquitted(counting.judge(right))
    convicted(
        counting.judge(tried(case, lambda out, lse: lse.add_(math.log(4033 / 4097)))),
        "lse counts 4033 keys",
        "should be 4097",
    )
