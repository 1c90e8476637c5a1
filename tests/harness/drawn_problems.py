"""Supports of every kind, and problems that the strategies draw inside them: the same ones in every
run."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from references.output_scale import DTYPES as EIGHT_BITS
from verify.problem import Problem
from verify.problem.storage import storage_words
from verify.problem.strategies import LIMITS, Limits, problems
from verify.variant import DESCALINGS, MASK_KINDS, Config, Contract, Declaration, Numerics, Support

T = TypeVar("T")
HALF = ("float16", "bfloat16")
EVERYTHING = Support(
    descalings=DESCALINGS,
    dtypes=(*HALF, "float32", "float64"),
    dtypes_out=EIGHT_BITS,
    head_dims=range(1, 513),
    masks=tuple(kind for kind in MASK_KINDS if kind != "causal.square"),
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
    min_seqlen=0,
    score_mods=("softcap",),
    storages=storage_words(),
)
SUPPORTS = {
    "everything": EVERYTHING,
    "usual": Support(dtypes=HALF, head_dims=range(16, 257), grouped_heads=True),
    "tutorial": Support(
        dtypes=("float16",),
        head_dims=(64, 128),
        masks=("full", "causal.square"),
        cross_lengths=False,
        layouts="contiguous",
    ),
    "rigid": Support(
        dtypes=HALF,
        head_dims=(40,),
        masks=("causal.square",),
        min_seqlen=16,
        max_seqlen=100,
        scales="default",
        layouts="contiguous",
    ),
    "square or full": Support(
        dtypes=HALF, head_dims=(32, 64), masks=("full", "causal.square", "lengths"), min_seqlen=0
    ),
    "packed": Support(
        dtypes=HALF,
        head_dims=range(8, 129, 8),
        masks=("documents", "causal"),
        intersections=True,
        min_seqlen=0,
    ),
    "one token": Support(dtypes=HALF, head_dims=(16,), max_seqlen=1, separate_head_dim_v=True),
    "tiles": Support(
        dtypes=HALF,
        head_dims=(16, 64),
        masks=("full", "causal", "window", "lengths"),
        windows="causal",
        grouped_heads="only",
        longer_q=False,
        seqlen_q_multiple=16,
        seqlen_kv_multiple=24,
        min_seqlen=20,
        max_seqlen=200,
        scales="nonzero",
    ),
    "squares of tiles": Support(
        dtypes=HALF,
        head_dims=(16,),
        masks=("window.square", "causal.square"),
        windows="one_sided",
        seqlen_kv_multiple=32,
        min_seqlen=0,
    ),
    "window": Support(
        dtypes=HALF,
        head_dims=(64,),
        masks=("window",),
        cross_lengths=False,
        min_seqlen=0,
        max_seqlen=512,
    ),
}
# Draws at once where a test asks for bins or for refusals, and how often as many more are drawn if
# they do not fill all: what Hypothesis draws depends on the modules that are imported.
FILLING, ROUNDS = 250, 9
quietly = settings(
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def declare(support: Support) -> Declaration:
    return Declaration(
        ref="some-kernel",
        path="some.py",
        source_hash="0",
        name="some-kernel",
        family="tests",
        configs=(Config(block_m=64, block_n=32),),
        support=support,
        numerics=Numerics(),
        contract=Contract(),
    )


def sample(strategy: st.SearchStrategy[T], count: int, number: int = 0) -> list[T]:
    """`count` examples of a strategy, the same ones every time; others for another number."""
    drawn: list[T] = []

    @seed(20240607 + number)
    @settings(quietly, max_examples=count)
    @given(strategy)
    def collect(example: T) -> None:
        drawn.append(example)

    collect()
    return drawn


@cache
def drawn(name: str, limits: Limits, number: int = 0) -> list[Problem]:
    """Problems of a support, drawn once for all tests: FILLING where a test asks for bins, else a
    few; other ones for another number."""
    support = SUPPORTS[name]
    count = FILLING if limits == LIMITS["cpu"] else 150
    strategy = problems(declare(support), dtype=dtype_of(support), limits=limits)
    return sample(strategy, count, number)


def dtype_of(support: Support) -> str:
    return "bfloat16" if "bfloat16" in support.dtypes else "float16"
