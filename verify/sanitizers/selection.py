"""Selection: a handful of small problems for each variant, config and dtype, chosen among many that
are drawn.

Small, because a tool makes a kernel ten to a hundred times slower; chosen, because what a tool can
find lies at edges: more KV tiles than the pipeline has stages, ragged tails, grouped heads, empty
rows, unequal lengths, strided memory, and a full pipeline in as many as possible of the builds that
the variant compiles (head-dim bucket, mask kind, alignment).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from verify.problem import Problem, strategies
from verify.problem.coverage import coverage_bins
from verify.problem.sampling import draws
from verify.problem.strategies import Limits
from verify.variant import Config, Declaration

MOST = 8
_QUICK = 4
_DRAWS = 500
_TILE, _STAGES = 64, 2  # where a config does not say
_EDGES = (
    "ragged_tail",
    "seqlen_q<seqlen_kv",
    "seqlen_q>seqlen_kv",
    "empty_row",
    "grouped_heads",
    "strided",
    "expanded",
    "head_dim_v!=head_dim",
)


def select(
    declaration: Declaration, config: Config, dtype: str, *, quick: bool = False
) -> tuple[Problem, ...]:
    """Problems that together fill as many edges as MOST of them can, the smaller ones preferred;
    always the same ones."""
    drawn = _drawn(declaration, dtype)
    edges = {problem.name: _edges(declaration, config, problem) for problem in drawn}
    missing = set().union(*edges.values())
    chosen: list[Problem] = []
    while missing and len(chosen) < (_QUICK if quick else MOST):
        best = max(
            drawn,
            key=lambda p: (
                len(edges[p.name] & missing),
                -p.pairs * (p.head_dim + p.head_dim_v),
                p.name,
            ),
        )
        if not edges[best.name] & missing:
            break
        chosen.append(best)
        missing -= edges[best.name]
    return tuple(chosen)


def deep(config: Config) -> int:
    """Keys that fill two tiles more than the pipeline has stages, the last one partly."""
    return ((config.num_stages or _STAGES) + 1) * (config.block_n or _TILE) + 1


def _edges(declaration: Declaration, config: Config, problem: Problem) -> frozenset[str]:
    filled = coverage_bins(problem, config)
    found = {name for name in filled if name in _EDGES} | {
        f"descaling {problem.descaling}",
        f"dtype_out {problem.dtype_out}",
    }
    if problem.seqlen_q > 2 * (config.block_m or _TILE):
        found.add("query_tiles>=3")  # what a backward walks over
    if problem.seqlen_kv < deep(config):
        return frozenset(found)
    # Every build counts only with a full pipeline: one is chosen by head-dim bucket, mask kind and
    # alignment.
    found |= {"deep", "deep misaligned" if "misaligned" in filled else "deep aligned"}
    found |= {f"deep {name}" for name in filled if name.startswith("mask:")}
    widest = max(problem.head_dim, problem.head_dim_v)
    bucket = min((b for b in declaration.head_dim_buckets if b >= widest), default=None)
    return frozenset(found | ({f"deep head_dim<={bucket}"} if bucket is not None else set()))


@cache
def _drawn(declaration: Declaration, dtype: str) -> Sequence[Problem]:
    """Problems out of the variant's own support, none too small to need a launch."""
    longest = max(max(deep(c), 2 * (c.block_m or _TILE)) for c in declaration.configs) + 45
    limits = Limits(
        seqlen=longest,
        long_seqlen=longest,
        heads=4,
        batch=2,
        pairs=4 * longest**2,
        elements=1 << 18,
    )
    drawn = draws(strategies.problems(declaration, dtype=dtype, limits=limits), _DRAWS)
    return tuple(
        {
            problem.name: problem for problem in drawn if problem.seqlen_q and problem.seqlen_kv
        }.values()
    )
