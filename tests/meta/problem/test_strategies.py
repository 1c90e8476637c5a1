"""The strategies stay inside (or just outside) a support, reach its edges, shrink to the simplest,
and hardly reject."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import find, given, seed, settings
from hypothesis import strategies as st

from tests.harness.drawn_problems import (
    EVERYTHING,
    ROUNDS,
    SUPPORTS,
    declare,
    drawn,
    dtype_of,
    quietly,
    sample,
)
from tests.properties import tier
from verify.campaign.targets import Target
from verify.machine.settings import LARGEST
from verify.problem import Layout, Problem
from verify.problem.coverage import bins_reachable, bins_required, coverage_bins
from verify.problem.distributions import ordinary
from verify.problem.known_answers import gather_possible
from verify.problem.lengths import raised
from verify.problem.outside import outside
from verify.problem.refusal import fewest_heads, inside
from verify.problem.strategies import LIMITS, Limits, problems
from verify.variant import Config, Support

REFUSED = 80  # draws at once of problems outside a support
by_support = pytest.mark.parametrize("name", SUPPORTS)
by_limits = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
ALL_LIMITS = LIMITS | {"small": LIMITS["gpu"].at_most(1 << 14)}
by_all_limits = pytest.mark.parametrize("limits", ALL_LIMITS.values(), ids=ALL_LIMITS)


def simplest(
    strategy: st.SearchStrategy[Problem], wanted: Callable[[Problem], bool] = lambda problem: True
) -> Problem:
    return find(
        strategy,
        wanted,
        settings=settings(database=None, deadline=None, max_examples=2000, derandomize=True),
    )


def elements(problem: Problem) -> int:
    return sum(math.prod(getattr(problem, f"shape_{name}")) for name in ("q", "k", "v", "out"))


@pytest.mark.first_look(3)
@tier.first_tier("name", "limits")
@by_all_limits
@by_support
def test_problems_lie_inside_the_support_and_the_limits(name: str, limits: Limits) -> None:
    support = SUPPORTS[name]
    for problem in drawn(name, limits):
        assert inside(support, problem)
        assert Problem.parse(problem.name) == problem
        assert problem.dtype == dtype_of(support)
        assert support.layouts != "contiguous" or set(problem.layouts.values()) == {Layout()}
        assert problem.heads_q <= limits.heads
        assert problem.batch <= limits.batch
        assert problem.pairs <= limits.pairs
        one = problem.but(batch=1, heads_q=fewest_heads(support), heads_kv=1, mask=_plain)
        assert elements(problem) <= max(limits.elements, elements(one))
        assert max(problem.seqlen_q, problem.seqlen_kv) <= limits.long_seqlen


def test_a_campaign_of_small_problems_is_asked_for_by_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(declare(SUPPORTS["usual"]), Config(), "float16", "accuracy")
    assert max(p.pairs for p in sample(target.problems, 100)) > 1 << 12
    monkeypatch.setenv(LARGEST, str(1 << 12))
    target = replace(target)  # which has drawn nothing yet
    small = sample(target.problems, 100)
    assert max(p.pairs for p in small) <= 1 << 12
    assert max(max(p.seqlen_q, p.seqlen_kv) for p in small) <= 1 << 7


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
def test_rows_are_aligned_where_they_must_be(dtype: str) -> None:
    """In bytes: as many elements lie in fewer of them where they have 8 bits."""
    support = Support(dtypes=(dtype,), head_dims=(16, 64), layouts="aligned")
    strategy = problems(declare(support), dtype=dtype, limits=LIMITS["interpreter"])
    asked = sample(strategy, 150)
    assert all(inside(support, problem) for problem in asked)
    assert any(problem.layouts["k"] != Layout() for problem in asked)


_plain = Problem(seqlen_q=1, seqlen_kv=1, head_dim=1, dtype="float16").mask


@pytest.mark.first_look(2)
@by_support
def test_problems_outside_the_support_name_what_is_refused(name: str) -> None:
    support = SUPPORTS[name]
    wanted = EDGES[name]
    if name != "everything":
        wanted = wanted | {"descales", "layout_k", "layout_v"}
    strategy = outside(declare(support), dtype="float16", limits=LIMITS["cpu"])
    asked = sample(strategy, REFUSED)
    for number in range(1, 3 * ROUNDS):
        if {argument for _, argument in asked} != wanted:
            asked += sample(strategy, REFUSED, number)
    for problem, argument in asked:
        storage = problem.layouts.get(argument.removeprefix("layout_"))
        if storage is not None and storage.word in support.storages:
            assert support.refusal(problem) is None
            assert storage.pitch > 0
            assert min(problem.seqlen_q, problem.seqlen_kv) > 1
        else:
            refusal = support.refusal(problem)
            assert refusal is not None
            assert refusal[0] == argument
    assert {argument for _, argument in asked} == wanted


_layouts = {"layout_q", "layout_k", "layout_v", "layout_out"}
EDGES = {
    "everything": {"head_dim", "head_dim_v"},
    "usual": {"dtype", "head_dim", "head_dim_v", "seqlen_q", "seqlen_kv", "mask", "softcap"},
    "tutorial": {
        "dtype",
        "head_dim",
        "head_dim_v",
        "heads_kv",
        "seqlen_q",
        "seqlen_kv",
        "mask",
        "softcap",
    }
    | _layouts,
    "rigid": {
        "dtype",
        "head_dim",
        "head_dim_v",
        "heads_kv",
        "seqlen_q",
        "seqlen_kv",
        "mask",
        "softmax_scale",
        "softcap",
    }
    | _layouts,
    "square or full": {"dtype", "head_dim", "head_dim_v", "heads_kv", "mask", "softcap"},
    "packed": {"dtype", "head_dim", "head_dim_v", "heads_kv", "mask", "softcap"},
    "one token": {
        "dtype",
        "head_dim",
        "head_dim_v",
        "heads_kv",
        "seqlen_q",
        "seqlen_kv",
        "mask",
        "softcap",
    },
    "window": {"dtype", "head_dim", "head_dim_v", "heads_kv", "seqlen_kv", "mask", "softcap"},
    "tiles": {
        "dtype",
        "head_dim",
        "head_dim_v",
        "heads_kv",
        "seqlen_q",
        "seqlen_kv",
        "mask",
        "softmax_scale",
        "softcap",
    },
    "squares of tiles": {
        "dtype",
        "head_dim",
        "head_dim_v",
        "heads_kv",
        "seqlen_kv",
        "mask",
        "softcap",
    },
}


def test_an_unsupported_dtype_is_an_error_and_has_no_outside() -> None:
    declaration = declare(SUPPORTS["usual"])
    with pytest.raises(ValueError, match="dtype: some-kernel does not support float64"):
        problems(declaration, dtype="float64", limits=LIMITS["cpu"])
    assert outside(declaration, dtype="float64", limits=LIMITS["cpu"]).is_empty


@pytest.mark.first_look(2)
@by_support
def test_drawing_rejects_nothing(name: str) -> None:
    """Nothing is filtered.  The few draws that do not finish are Hypothesis's own (4 %: a mutated
    prefix is cut off)."""
    strategy = problems(declare(SUPPORTS[name]), dtype="float16", limits=LIMITS["gpu"])
    runs: Counter[str] = Counter()

    @seed(1)
    @settings(quietly, max_examples=200)
    @given(st.data())
    def count(data: st.DataObject) -> None:
        runs["begun"] += 1
        data.draw(strategy)
        runs["finished"] += 1

    count()
    assert runs["begun"] - runs["finished"] <= 0.1 * runs["begun"]


@tier.first_tier("name", "limits")
@by_support
@by_limits
def test_problems_shrink_to_the_simplest(name: str, limits: Limits) -> None:
    support = SUPPORTS[name]
    found = simplest(
        problems(
            declare(support),
            dtype=dtype_of(support),
            limits=limits,
        )
    )
    length, _ = raised(support, *[max(support.min_seqlen, support.common_multiple)] * 2)
    dim = next((d for d in (16, 64) if d in support.head_dims), min(support.head_dims))
    masks = dict.fromkeys(("rigid", "packed", "squares of tiles"), "causal")
    mask = (masks | {"window": "window.0.0"}).get(name, "full")
    expected = Problem(
        heads_q=fewest_heads(support),
        seqlen_q=length,
        seqlen_kv=length,
        head_dim=dim,
        dtype=found.dtype,
    )
    assert found.but(mask=expected.mask) == expected
    assert found.mask.name == mask


CONDITIONS: dict[str, tuple[Callable[[Problem], bool], str]] = {
    "causal, 65": (
        lambda p: p.mask.kind == "causal" and min(p.seqlen_q, p.seqlen_kv) >= 65,
        "sq=65,skv=65,d=16,dtype=float16,mask=causal",
    ),
    "two heads": (lambda p: p.heads_q >= 2, "hq=2,hkv=2,sq=1,skv=1,d=16,dtype=float16"),
    "a group": (lambda p: p.group > 1, "hq=2,sq=1,skv=1,d=16,dtype=float16"),
    "wide head": (lambda p: p.head_dim > 64, "sq=1,skv=1,d=128,dtype=float16"),
    "more keys": (lambda p: p.seqlen_kv > p.seqlen_q, "sq=1,skv=2,d=16,dtype=float16"),
    "more queries": (lambda p: p.seqlen_kv < p.seqlen_q, "sq=2,skv=1,d=16,dtype=float16"),
    "expanded k": (lambda p: "h" in p.layout_k.expand, "sq=1,skv=1,d=16,dtype=float16,lk=bhsd.xh"),
    "distribution": (lambda p: p.distribution == "sink", "sq=1,skv=1,d=16,dtype=float16,dist=sink"),
    "negative scale": (lambda p: p.scale < 0, "sq=1,skv=1,d=16,dtype=float16,scale=-0.25"),
}


@pytest.mark.first_look(2)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_failure_shrinks_to_what_it_needs(condition: str) -> None:
    wanted, expected = CONDITIONS[condition]
    found = simplest(
        problems(declare(SUPPORTS["usual"]), dtype="float16", limits=LIMITS["cpu"]), wanted
    )
    assert found.name == expected


@pytest.mark.for_ci
@tier.first_tier()
@by_all_limits
def test_edges_and_bins_are_reached(limits: Limits) -> None:
    """A campaign of 1500 problems fills every bin, on the slowest machine too."""
    config = Config(block_m=64, block_n=32)
    sampled = sample(problems(declare(EVERYTHING), dtype="bfloat16", limits=limits), 1500)
    bins = Counter(name for problem in sampled for name in coverage_bins(problem, config))
    assert set(bins_required()) - set(bins) == set()
    assert min(bins[name] for name in bins_required()) >= 3
    beside = {n for p in sampled for n in (p.seqlen_q, p.seqlen_kv)}
    assert {n + side for n in (16, 32, 64, 128) for side in (-1, 0, 1)} | {0, 1} <= beside
    assert {p.group for p in sampled} >= {1, 2, 3}
    assert {p.head_dim for p in sampled} >= {16, 32, 64, 128, 256}
    assert any(p.head_dim % 8 for p in sampled)
    assert sum(p.seqlen_q == p.seqlen_kv for p in sampled) > 300
    assert sum(p.mask.kind == "full" for p in sampled) > 150


@pytest.mark.first_look(2)
@by_support
def test_the_reachable_bins_are_those_that_are_reached(name: str) -> None:
    config, required = Config(block_m=16, block_n=16), set(bins_required())
    reachable = bins_reachable(SUPPORTS[name], config)

    reached: set[str] = set()
    for number in range(ROUNDS):
        for problem in drawn(name, LIMITS["cpu"], number):
            reached |= coverage_bins(problem, config) & required
        if reached >= reachable:
            break
    assert reached == reachable


@pytest.mark.for_ci
def test_gather_problems_can_nearly_all_be_built() -> None:
    strategy = problems(
        declare(EVERYTHING),
        dtype="float16",
        limits=LIMITS["gpu"],
        distributions=("gather", "counting"),
    )
    gathered = sample(strategy, 300)
    assert {p.distribution for p in gathered} == {"gather", "counting"}
    refused = [
        p.name for p in gathered if p.distribution == "gather" and gather_possible(p) is not None
    ]
    assert len(refused) < 0.15 * len(gathered), refused  # 0.02 to 0.12 of four samples


def test_coverage_bins_of_known_problems() -> None:
    config = Config(block_m=64, block_n=32)

    def bins(text: str) -> set[str]:
        return coverage_bins(Problem.parse(text), config)

    assert bins("sq=64,skv=64,d=64,dtype=float16") == {"mask:full", "distribution:normal"}
    assert bins("sq=64,skv=96,d=64,dtype=float16") >= {"kv_tiles>=3", "seqlen_q<seqlen_kv"}
    assert bins("sq=1,skv=96,d=64,dtype=float16,dist=increasing") >= {
        "decode",
        "ragged_tail",
        "late_maximum",
    }
    assert bins("sq=64,skv=32,d=64,dtype=float16,mask=causal") >= {
        "seqlen_q>seqlen_kv",
        "empty_row",
        "mask:causal",
    }
    assert "empty_row" not in bins("sq=64,skv=64,d=64,dtype=float16,mask=causal")
    assert bins("sq=64,skv=0,d=64,dtype=float16") >= {"zero_length", "empty_row"}
    assert bins("sq=64,skv=64,d=64,dtype=float16,mask=lengths.64.0") >= {
        "zero_length",
        "empty_row",
        "mask:lengths",
    }
    assert bins("sq=64,skv=64,d=64,dtype=float16,mask=causal.tl+dense.1.3") >= {
        "mask:intersection",
        "mask:causal.tl",
        "mask:dense",
        "empty_row",
    }
    assert bins("sq=64,skv=64,d=64,dtype=float16,lk=bhsd.xh") >= {"strided", "expanded"}
    assert bins("sq=64,skv=64,d=60,dtype=float16") >= {"misaligned"}
    assert "misaligned" not in bins("sq=64,skv=64,d=64,dtype=float16,lq=bshd.p8.o8")
    named = {name.partition(":")[2] for name in bins_required() if name.startswith("distribution:")}
    assert named == set(ordinary())
