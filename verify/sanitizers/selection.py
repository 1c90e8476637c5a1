"""Selection: a few small problems for each variant, config and dtype, out of many drawn ones.

They are small because a tool makes a kernel ten to a hundred times slower.  They are selected
because tools find errors at edges: more KV tiles than pipeline stages, ragged tails, grouped heads,
empty rows, unequal lengths, strided memory, and a full pipeline in as many builds of the variant as
possible (head-dim bucket, mask kind, alignment).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from verify.problem import Problem, strategies
from verify.problem.coverage import coverage_bins
from verify.problem.sampling import draws
from verify.problem.strategies import Limits
from verify.variant import Config, Declaration

MAX_PROBLEMS = 8
_QUICK = 4
_DRAWS = 500
_TILE, _STAGES = 64, 2  # if a config does not declare them
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
    """At most MAX_PROBLEMS problems that fill as many edges as possible, by a greedy selection.

    Smaller problems are preferred.  The result is deterministic.
    """
    drawn = _drawn(declaration, dtype)
    edges = {problem.name: _edges(declaration, config, problem) for problem in drawn}
    missing = set().union(*edges.values())
    selected: list[Problem] = []
    while missing and len(selected) < (_QUICK if quick else MAX_PROBLEMS):
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
        selected.append(best)
        missing -= edges[best.name]
    return tuple(selected)


def covering(configs: Sequence[Config]) -> tuple[Config, ...]:
    """The configs of a quick run: the first, and the first with each further set of options, which
    are other kernels (overlapped, persistent) and not other sizes of one."""
    first: dict[frozenset[str], Config] = {}
    for config in configs:
        first.setdefault(frozenset(name for name, _ in config.options), config)
    return tuple(first.values())


def deep(config: Config) -> int:
    """A number of keys for two tiles more than the pipeline has stages, the last one partial."""
    return ((config.num_stages or _STAGES) + 1) * (config.block_n or _TILE) + 1


def _edges(declaration: Declaration, config: Config, problem: Problem) -> frozenset[str]:
    filled = coverage_bins(problem, config)
    edges = {name for name in filled if name in _EDGES} | {
        f"descaling {problem.descaling}",
        f"dtype_out {problem.dtype_out}",
    }
    if problem.seqlen_q > 2 * (config.block_m or _TILE):
        edges.add("query_tiles>=3")  # a backward iterates over query tiles
    if problem.seqlen_kv < deep(config):
        return frozenset(edges)
    # A build counts only with a full pipeline.  Head-dim bucket, mask kind and alignment select it.
    edges |= {"deep", "deep misaligned" if "misaligned" in filled else "deep aligned"}
    edges |= {f"deep {name}" for name in filled if name.startswith("mask:")}
    widest = max(problem.head_dim, problem.head_dim_v)
    bucket = min((b for b in declaration.head_dim_buckets if b >= widest), default=None)
    return frozenset(edges | ({f"deep head_dim<={bucket}"} if bucket is not None else set()))


@cache
def _drawn(declaration: Declaration, dtype: str) -> Sequence[Problem]:
    """Problems in the variant's support, each with at least one row and one key."""
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
