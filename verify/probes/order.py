"""The order in which a forward adds P V: the tree of its sum over the keys.

It is found by calls of the variant's entry point.  With Q = 0 all keys have the same weight, so
every column of V is a separate experiment (see `verify.probes.tree`): M at one key, -M at another,
units at some of the others.  O times the number of keys counts the units that survived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verify.arithmetic.dtypes import dtype_named
from verify.cell.arena import Arena
from verify.cell.process import Cell
from verify.judging.trial import Trial
from verify.probes import tree
from verify.probes.experiments import Scale, meeting_of
from verify.probes.report import OrderProbe
from verify.probes.tree import Meeting, Node
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.variant import Config, Declaration

KEYS = 256  # a power of two, so that dividing by it is exact
_ROWS = (64, KEYS, 1)  # rows of Q to try; the first supported number is used
_HEADS = 128  # at most, in one launch
_DTYPES = ("bfloat16", "float32", "float16")  # the largest exponent range first


def _scale(dtype: str, keys: int) -> Scale:
    if dtype != "float16":
        return Scale(2.0**60, 1.0, 1 << (dtype_named(dtype).precision - 1))
    unit = keys * dtype_named(dtype).smallest_subnormal
    return Scale(2.0**15, unit, int(2.0 ** (15 - 27) / unit))


@dataclass
class _Reader:
    """Runs the experiments with one variant; `launches` counts its launches."""

    declaration: Declaration
    config: Config
    problem: Problem
    cell: Cell
    arena: Arena
    arch: str
    launches: int = field(default=0)

    @property
    def meeting(self) -> Meeting:
        """Of keys."""
        keys, scale = self.problem.seqlen_kv, _scale(self.problem.dtype, self.problem.seqlen_kv)
        return meeting_of(keys, scale, lambda columns: self.sums(columns) / scale.unit)

    def sums(self, columns: Tensor) -> Tensor:
        """Sums over the keys of V's columns; columns: (keys, n); returns (n,) in fp64."""
        p = self.problem
        heads = -(-columns.shape[1] // p.head_dim_v)
        padded = torch.nn.functional.pad(columns, (0, heads * p.head_dim_v - columns.shape[1]))
        v = padded.view(p.seqlen_kv, heads, p.head_dim_v).transpose(0, 1)
        parts = [self._launch(v[at : at + _HEADS]) for at in range(0, heads, _HEADS)]
        return torch.cat(parts).flatten()[: columns.shape[1]]

    def _launch(self, v: Tensor) -> Tensor:
        """Sums of every head's columns, (heads, head_dim_v): one launch."""
        heads = len(v)
        p = replace(self.problem, heads_q=heads, heads_kv=heads)
        dtype = p.format.torch
        q, k = torch.zeros(p.shape_q, dtype=dtype), torch.zeros(p.shape_k, dtype=dtype)
        trial = Trial(self.declaration, self.config, p, self.cell, self.arena, self.arch)
        # These replace the distribution's inputs.
        trial.__dict__["inputs"] = Inputs(q, k, v[None].to(dtype).contiguous())
        self.launches += 1
        run = trial.first
        if not run.reply.ok or run.out is None:
            raise RuntimeError(f"{run.reply.status}: {run.reply.message}")
        return run.out[0, :, 0].double() * p.seqlen_kv


def probe(
    declaration: Declaration, config: Config, cell: Cell, arena: Arena, arch: str, keys: int = KEYS
) -> OrderProbe:
    """Find one config's order; the result holds any error."""
    begun, result = time.perf_counter(), OrderProbe(declaration.ref, config.name)
    problem = _problem(declaration, keys)
    if isinstance(problem, str):
        return replace(result, reason=problem)
    reader = _Reader(declaration, config, problem, cell, arena, arch)
    result = replace(result, dtype=problem.dtype, keys=keys)
    try:
        revealed = tree.reveal(range(keys), reader.meeting)
        result = replace(result, order=tree.describe(revealed), groups=_first_groups(revealed))
    except Exception as error:
        result = replace(result, reason=f"{type(error).__name__}: {error}")
    return replace(result, launches=reader.launches, seconds=round(time.perf_counter() - begun, 3))


def _problem(declaration: Declaration, keys: int) -> Problem | str:
    """The problem for the variant, before the number of heads is set; or why there is none."""
    support = declaration.support
    if "forward" not in declaration.entries:
        return "no forward of its own"
    dtypes = [dtype for dtype in _DTYPES if dtype in support.dtypes]
    if not dtypes:
        return f"none of {', '.join(_DTYPES)}"
    head_dim = 64 if 64 in support.head_dims else min(support.head_dims)
    refusal: tuple[str, str] | None = None
    for rows in _ROWS:
        problem = Problem(
            heads_q=2, heads_kv=2, seqlen_q=rows, seqlen_kv=keys, head_dim=head_dim, dtype=dtypes[0]
        )
        refusal = support.refusal(problem)
        if refusal is None:
            return problem
    assert refusal is not None
    return f"{refusal[0]}: {refusal[1]}"


def _first_groups(revealed: Node) -> tuple[str, ...]:
    groups = tree.chain(revealed) or tree.chain(next(iter(tree.blocks(revealed)), revealed)) or []
    return tuple(tree.ranges(group) for group in groups[:4])
