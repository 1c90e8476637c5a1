"""The turnstile of the Gluon forward on Hopper without a GPU: what it computes when Python runs its
partitions in drawn orders, that its consumers take turns in all of them, slips that must show in
some, and its builds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import triton

from kernels.gluon import hopper_forward as kernel
from kernels.gluon.host import SHARED_BYTES
from kernels.triton.compile import arguments, compiled, meta
from tests.harness.gluon_host import Host
from tests.harness.gluon_partitions import PartitionError, Partitions
from tests.harness.ptx_host import convict, run
from tests.planted import gluon_turnstile
from tests.properties import tier
from verify.cuda.edits import Edit
from verify.cuda.sass import listing
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Config

pytestmark = pytest.mark.for_ci

torch.set_num_threads(1)

WIDE, NARROW = kernel.TURNSTILE
TINY = Config(block_m=16, block_n=8, num_warps=8, num_stages=2, options=(("turns", 1),))
WALK = "sq=16,skv=43,d=8,dtype=float16,mask=causal"  # six blocks of one tile
WHOLE = "sq=16,skv=48,d=8,dtype=float16"  # six of another, in which nothing is hidden
SEEDS = range(16)


def verdict(*edits: Edit, text: str, config: Config, seed: int = 0) -> str | None:
    """What is wrong with O and LSE or with the turns, or None."""
    machine = Partitions(seed=seed)
    host = Host(*edits, kernel="hopper_turnstile", entry="hopper_forward", machine=machine)
    problem = Problem.parse(text)
    variant = replace(kernel.VARIANT, forward=host.forward)
    try:
        out, lse = run(variant, problem, config)
    except PartitionError as error:
        return str(error)
    if not machine.turns_taken():
        return "the consumers did not take turns"
    return convict(variant, problem, config, out, lse, arch="sm_90a")


@pytest.mark.parametrize(
    "text",
    [
        "sq=1,skv=1,d=8",
        "b=2,hq=4,hkv=2,sq=130,skv=200,d=40,mask=causal",
        "sq=70,skv=131,d=64,mask=causal.tl,scale=-0.3",
        "hq=2,hkv=1,sq=131,skv=300,d=64,dv=128,mask=window.70.3",
        "b=2,sq=130,skv=140,d=64,mask=lengths.130_40.7_140",
        "sq=200,skv=200,d=64,mask=documents.30_100_70+window.20.0",
        "sq=5,skv=0,d=64",
        "sq=300,skv=70,d=64,mask=causal",
        "b=2,hq=2,hkv=1,sq=66,skv=65,d=64,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8",
    ],
)
def test_its_text_stays_inside_its_bounds(text: str) -> None:
    for config, dtype in ((WIDE, "bfloat16"), (NARROW, "float16")):
        assert verdict(text=f"{text},dtype={dtype}", config=config) is None


@pytest.mark.parametrize("keys", [1, 8, 9, 17, 43])
def test_no_drawn_order_changes_the_result_or_the_turns(keys: int) -> None:
    """Walks of one to six blocks, with one slot and with two, and each sign of the scale."""
    for seed in SEEDS:
        text = f"sq=20,skv={keys},d=8,dtype=float16,scale={(0.35, -0.35, 0.0)[seed % 3]}"
        stages = 1 + seed // 4 % 2
        assert verdict(text=text, config=replace(TINY, num_stages=stages), seed=seed) is None


UNSEEN = {  # behind the last visible key, and before the first one, which the loop hides
    "sq=12,skv=43,d=8,mask=window.3.0.tl": slice(12, None),
    "sq=12,skv=75,d=8,mask=window.40.0": slice(0, 23),
}


@pytest.mark.parametrize("text", UNSEEN)
def test_values_that_no_row_sees_are_hidden_from_both(text: str) -> None:
    """The first consumer hides them: the second one reads V in the turn after that."""
    shown = Edit(r"(?m)^( +)hide_early\(v_here, [^\n]*", r"\1pass", times=2)
    late = Edit(r"if WHO == 0:\n( +)hide_early", r"if WHO == 1:\n\1hide_early", times=2)
    assert all(finite(text, seed=seed) for seed in SEEDS)
    for slip in (shown, late):  # the second one would hide them when the first has read them
        assert not all(finite(text, slip, seed=seed) for seed in SEEDS)


def finite(text: str, *edits: Edit, seed: int) -> bool:
    """Whether O is finite with NaN in each value of UNSEEN."""
    machine = Partitions(seed=seed)
    host = Host(*edits, kernel="hopper_turnstile", entry="hopper_forward", machine=machine)
    problem = Problem.parse(f"{text},dtype=float16")
    inputs = tensors(problem)
    inputs.v[:, :, UNSEEN[text]] = torch.nan
    args = AttentionArgs(
        inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, TINY
    )
    out, lse = torch.empty(problem.shape_out, dtype=torch.float16), torch.empty(1, 1, 12)
    host.forward(args, out, lse, {})
    return bool(out.isfinite().all())


# What is changed; of the texts with one more place that this program does not run (partitions.py),
# both.
SLIPS: dict[str, Edit] = {
    "no first turn": Edit(r"take_turn\(turns, 0, WHO\)", "pass"),
    "no turn": Edit(r"take_turn\(turns, t, WHO\)", "pass"),
    "no last turn": Edit(r"take_turn\(turns, total, WHO\)", "pass"),
    "an early exit": Edit(r"take_turn\(turns, total \+ 1, WHO\)[^\n]*", "pass"),
    "a turn that is not passed": Edit(
        r"(acc = warpgroup_mma\(p_tile, v_tile, acc, is_async=True\)\n +)pass_turn\(turns, WHO\)"
        r"(\n +s = )",
        r"\1pass\2",
    ),
    "a turn passed before its products": Edit(
        r"(            acc = warpgroup_mma\([^\n]*\n)(            pass_turn[^\n]*\n)",
        r"\2\1",
    ),
    "both begin": Edit(r"\^ \(1 - WHO\)\)", "^ 1)"),
    "none begins": Edit(r"\^ \(1 - WHO\)\)", "^ 0)"),
    "a turn passed to oneself": Edit(r"turns\.index\(1 - WHO\)", "turns.index(WHO)"),
    "no wait for Q": Edit(r"mbarrier\.wait\(q_here[^\n]*", "pass", times=2),
    "no wait for the first K": Edit(r"await_tile\(k_here, 0, STAGES\)", "0"),
    "no wait for K": Edit(r"await_tile\(k_here, t, STAGES\)", "t % STAGES"),
    "no wait for V": Edit(r"await_tile\(v_here, t - 1, STAGES\)", "(t - 1) % STAGES"),
    "no wait for the last V": Edit(
        r"await_tile\(v_here, total - 1, STAGES\)", "(total - 1) % STAGES"
    ),
    "K over one that is read": Edit(r"await_free\(k_free, t, STAGES\)", "t % STAGES", times=2),
    "V over one that is read": Edit(r"await_free\(v_free, t, STAGES\)", "t % STAGES", times=2),
    "free for one is free for both": Edit(r"count=2", "count=1"),
    "no arrival for K": Edit(
        r"mbarrier\.arrive\(k_free\.index\(slot\), count=1\)", "pass", times=2
    ),
    "no arrival for V": Edit(
        r"mbarrier\.arrive\(v_free\.index\(last_slot\), count=1\)", "pass", times=2
    ),
    "the other consumer's rows": Edit(r"2 \* tile \+ WHO", "2 * tile + 1 - WHO"),
    "no wait for V before it is hidden": Edit(
        r"(BLOCK_N\):\n +slot = )await_tile\(v_here, t, STAGES\)", r"\1t % STAGES"
    ),
    "no wait for the first S": Edit(r"s = warpgroup_mma_wait\(0, deps=\(s,\)\)", "pass"),
    "no wait for S": Edit(r"s = warpgroup_mma_wait\(1, deps=\(s,\)\)", "pass"),
    "no wait for O": Edit(
        r"(l = l[^\n]*\n +)acc = warpgroup_mma_wait\(0, deps=\(acc,\)\)", r"\1pass"
    ),
    "barriers of turns not opened": Edit(r"open_ring\(turns, 2\)", "pass"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_shows_in_some_order(slip: str) -> None:
    asked = itertools.product((WALK, WHOLE), SEEDS)
    if not any(verdict(SLIPS[slip], text=text, config=TINY, seed=seed) for text, seed in asked):
        pytest.fail("it is right in every drawn order")


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("no turn", "the consumers did not take turns"),
        ("an early exit", "whose partner has left"),
        ("a turn that is not passed", "deadlock"),
    ],
)
def test_what_a_slip_is_convicted_of(slip: str, said: str) -> None:
    """Where the numbers are right, too."""
    found = [verdict(SLIPS[slip], text=WHOLE, config=TINY, seed=seed) for seed in SEEDS]
    assert any(said in word for word in found if word)


# Builds.


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def test_shared_memory_holds_the_tiles() -> None:
    for config in kernel.TURNSTILE:
        for bucket in kernel.BUCKETS:
            blocks = kernel.effective_blocks(config, bucket)
            assert blocks.num_stages >= 1
            tiles = blocks.block_m + 2 * blocks.num_stages * blocks.block_n
            assert 2 * bucket * tiles <= SHARED_BYTES - 1024


def test_one_of_its_configs_is_listed_and_one_a_further_one() -> None:
    told = kernel.VARIANT.describe()
    assert WIDE in kernel.VARIANT.configs
    assert told["further_configs"] == [NARROW.name]
    names = [build.name for build in kernel.builds("sm_90a")]
    for config in kernel.TURNSTILE:
        assert any(name.startswith(f"{config.name}, ") for name in names)


def test_a_build_has_partitions_and_keeps_its_budget() -> None:
    """What ptxas gives each of the 12 warps is what the partitions deal out again."""
    (build,) = (
        b for b in kernel.builds("sm_90a") if b.name.startswith(f"{WIDE.name}, bfloat16, d 64")
    )
    made = build.compile()
    assert made.resources.shared <= SHARED_BYTES
    assert made.resources.registers == 168
    text = listing(made.cubin)
    counts = {w: len(re.findall(rf" {w}[ .]", text)) for w in ("HGMMA", "UTMALDG", "LDL", "STL")}
    assert not list(build.broken(made.resources, counts))
    assert re.search(r" USETMAXREG[ .]", text)


@pytest.mark.parametrize("slip", ["missing-wait", "early-refill"])
def test_planted_races_are_found(slip: str) -> None:
    """In some of the drawn orders; none accuses the text without the slip."""
    edits = gluon_turnstile.SLIPS[slip].edits
    assert all(verdict(text=WALK, config=TINY, seed=seed) is None for seed in SEEDS)
    assert any(verdict(*edits, text=WALK, config=TINY, seed=seed) for seed in SEEDS)


def ptx_of(forward: ModuleType, config: Config) -> str:
    args = arguments(config, "float16", 128, "causal")
    outputs = meta(tuple(args.q.shape), "float16"), meta(tuple(args.q.shape[:3]), "float32")
    return str(compiled(forward.launch(args, *outputs), "sm_90a").asm["ptx"])


@pytest.mark.parametrize("slip", tier.for_ci(gluon_turnstile.SLIPS))
def test_a_planted_copy_is_of_the_turnstile_and_differs_by_its_slip(slip: str) -> None:
    copies = gluon_turnstile.COPIES
    assert dict(copies.config.options) == {"turns": 1}
    copy = copies.copy_of(slip)
    assert copy.turnstile_forward.__module__.startswith("planted_gluon_turnstile_")
    shipped, planted = (ptx_of(module, copies.config) for module in (kernel, copy))
    assert "setmaxnreg" in planted
    assert planted != shipped
