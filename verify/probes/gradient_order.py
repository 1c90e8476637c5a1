"""The orders in which a backward makes its sums, held against what it declares
(`verify.variant.GradientOrder`).

Every sum is asked by calls of the variant's entry point on tensors that leave nothing else to
compute.  LSE = 0 and O = 0 are saved, so P = exp(S) and delta = 0.

- dV: Q = 0, so P = 1, and dV adds up the rows of dO, whose columns are experiments.
- dQ, dK: Q = 0 or K = 0, and dO and V have a product of 1, so dS = 1.  dQ adds up the keys of K,
  dK the rows of Q.
- dP: a row of dO is an experiment along head_dim_v, V = 1 and P = 1, so dS counts the units that
  survived; dQ shows it by a K that is 1 at one key, dK by rows of Q that are 1 in one column each.
- S: a row of Q is an experiment along head_dim, K = 1, and the scale makes of a unit a part of a
  binary place of P: the exponent of P counts.  dV shows it by rows of dO that are 1 in one column
  each, dQ by a V that is 1 at one key.

The mask is one whose sums have whole blocks and blocks before and behind these, if the variant
takes such a mask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from references.masks import Causal, Full, Window
from verify.arithmetic.mma import NearestChain
from verify.cell.arena import Arena
from verify.cell.process import Cell, Reply
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.probes import tree
from verify.probes.declared_order import contradicts
from verify.probes.experiments import Scale, meeting_of, scale_of
from verify.probes.report import GradientOrderProbe
from verify.probes.tree import InconsistentError
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.tolerance.backward import resolve
from verify.tolerance.gradients_arithmetic import GradientArithmetic
from verify.tolerance.gradients_order import STEP
from verify.variant import Config, Declaration

LENGTH = 256  # rows, and keys
_HEADS = 128  # at most, in one launch
_DTYPES = (("bfloat16", "float16"), ("float32",))  # one of each group is asked
_CHAIN = 8  # products of a sum to nearest among which any order is right
_PLACES = 8.0  # binary places of P that the units of one experiment together make


@dataclass(frozen=True, eq=False)
class Given:
    """What one launch gets: q, k, v and dout of the problem's shapes, in its dtype.  O and LSE are
    zero."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def zeros(p: Problem) -> Given:
        """Of that problem."""
        shapes = p.shape_q, p.shape_k, p.shape_v, p.shape_out
        return Given(*(torch.zeros(shape, dtype=p.format.torch) for shape in shapes))


Backward = Callable[[Problem, Given], Mapping[str, Tensor]]
"""One launch: dq, dk and dv by name."""


@dataclass(frozen=True)
class Sum:
    """A sum of a backward.

    seen_in: the gradient that shows it.  declared: its order.
    """

    what: str
    seen_in: str
    declared: str

    @property
    def name(self) -> str:
        """ "dQ", or "S, in dV"."""
        shown = f"d{self.seen_in[1:].upper()}"
        return shown if self.what == shown else f"{self.what}, in {shown}"


def sums_of(arithmetic: GradientArithmetic, dtype: str) -> list[Sum]:
    """The sums of which the declared order has an effect on the bounds, in that dtype."""
    found = [
        Sum(f"d{name[1:].upper()}", name, arithmetic.order_of(name))
        for name in ("dq", "dk", "dv")
        if arithmetic.order_of(name) != "any"
    ]
    if arithmetic.in_order:
        found += [Sum("dP", "dq", "ascending"), Sum("dP", "dk", "ascending")]
        found.append(Sum("S", "dv", "ascending"))
        if dtype != "float16":  # the scale would leave its range
            found.append(Sum("S", "dq", "ascending"))
    return found


@dataclass
class Reader:
    """Runs the experiments with one backward; `launches` counts its launches."""

    run: Backward
    problem: Problem
    arithmetic: GradientArithmetic
    launches: int = field(default=0)

    @cached_property
    def scale(self) -> Scale:
        """Of the problem's dtype."""
        return scale_of(self.problem.dtype)

    @cached_property
    def _visible(self) -> Tensor:
        p = self.problem
        return p.mask.dense(1, 1, p.seqlen_q, p.seqlen_kv)[0, 0]

    @cached_property
    def row(self) -> int:
        """The row that sees the most keys."""
        return int(self._visible.sum(1).argmax())

    @cached_property
    def key(self) -> int:
        """The key that the most rows see."""
        return int(self._visible.sum(0).argmax())

    @cached_property
    def rows(self) -> list[int]:
        """The rows that see `key`."""
        return [int(at) for at in self._visible[:, self.key].nonzero()[:, 0]]

    @cached_property
    def keys(self) -> list[int]:
        """The keys that `row` sees."""
        return [int(at) for at in self._visible[self.row].nonzero()[:, 0]]

    def positions(self, one: Sum) -> list[int]:
        """The terms of a sum: rows, keys, or places along the head dim."""
        if one.what in ("S", "dP"):
            return list(range(self.problem.head_dim))
        return self.keys if one.what == "dQ" else self.rows

    def steps(self, one: Sum) -> list[list[int]]:
        """The terms of a sum, as numbers from 0 on, by the step in which they are added."""
        length = STEP
        if one.what in ("S", "dP"):
            unit = self.arithmetic.scores
            length = _CHAIN if isinstance(unit, NearestChain) else unit.products
        found: dict[int, list[int]] = {}
        for leaf, position in enumerate(self.positions(one)):
            found.setdefault(position // length, []).append(leaf)
        return list(found.values())

    def tree(self, one: Sum) -> tree.Node:
        """The tree of a sum.  Raises UncountableError, InconsistentError, and RuntimeError for a
        launch that failed."""
        terms = len(self.positions(one))
        return tree.reveal(
            range(terms), meeting_of(terms, self.scale, lambda columns: self._units(one, columns))
        )

    def _units(self, one: Sum, columns: Tensor) -> Tensor:
        """The surviving units of every column, (terms, n); returns (n,) in fp64."""
        if one.what == "S":
            return self._of_scores(one.seen_in, columns)
        ask = self._of_products if one.what == "dP" else self._over
        return ask(one.seen_in, columns) / self.scale.unit

    def _over(self, seen_in: str, columns: Tensor) -> Tensor:
        """Sums over rows or keys: the columns lie in the columns of dO, Q or K."""
        width = self.problem.head_dim
        positions = self.keys if seen_in == "dq" else self.rows
        name = {"dq": "k", "dk": "q", "dv": "dout"}[seen_in]
        heads = _chunks(columns, width)  # (heads, terms, width)

        def tensors(given: Given, chunk: Tensor) -> None:
            if seen_in != "dv":
                given.v[..., 0] = 1
                given.dout[..., 0] = 1
            getattr(given, name)[0][:, positions] = chunk.to(given.q.dtype)

        at = self.row if seen_in == "dq" else self.key
        read = self._launched(self.problem, heads, tensors, seen_in)
        return read[:, at].flatten()[: columns.shape[1]]

    def _of_products(self, seen_in: str, columns: Tensor) -> Tensor:
        """Sums of dO V^T: each column is a row of dO."""
        rows = self.rows if seen_in == "dq" else self.rows[: self.problem.head_dim]
        heads = _chunks(columns, len(rows)).mT  # (heads, rows, terms)

        def tensors(given: Given, chunk: Tensor) -> None:
            given.v.fill_(1)
            given.dout[0][:, rows] = chunk.to(given.q.dtype)
            if seen_in == "dq":
                given.k[..., self.key, 0] = 1
            else:
                given.q[0][:, rows, list(range(len(rows)))] = 1

        read = self._launched(self.problem, heads, tensors, seen_in)
        found = read[:, rows, 0] if seen_in == "dq" else read[:, self.key, : len(rows)]
        return found.flatten()[: columns.shape[1]]

    def _of_scores(self, seen_in: str, columns: Tensor) -> Tensor:
        """Sums of Q K^T: each column is a row of Q, and P = 2^(places times surviving units)."""
        width = self.problem.head_dim
        rows = self.rows if seen_in == "dq" else self.rows[:width]
        places = _PLACES / width
        scale = places * math.log(2) / self.scale.unit
        heads = _chunks(columns, len(rows)).mT

        def tensors(given: Given, chunk: Tensor) -> None:
            given.k.fill_(1)
            given.q[0][:, rows] = chunk.to(given.q.dtype)
            if seen_in == "dq":
                given.v[..., self.key, 0] = 1
                given.dout[..., 0] = 1
            else:
                given.dout[0][:, rows, list(range(len(rows)))] = 1

        problem = replace(self.problem, softmax_scale=scale)
        read = self._launched(problem, heads, tensors, seen_in)
        # the scale multiplies dQ, too
        found = read[:, rows, 0] / scale if seen_in == "dq" else read[:, self.key, : len(rows)]
        return found.log2().flatten()[: columns.shape[1]] / places

    def _launched(
        self,
        problem: Problem,
        heads: Tensor,
        fill: Callable[[Given, Tensor], None],
        seen_in: str,
    ) -> Tensor:
        """The gradient of every head's experiments, (heads, positions, head_dim) in fp64."""
        found = []
        for at in range(0, len(heads), _HEADS):
            chunk = heads[at : at + _HEADS]
            p = replace(problem, heads_q=len(chunk), heads_kv=len(chunk))
            given = Given.zeros(p)
            fill(given, chunk)
            self.launches += 1
            found.append(self.run(p, given)[seen_in][0].double())
        return torch.cat(found)


def _chunks(columns: Tensor, width: int) -> Tensor:
    """Columns, (terms, n), by heads of so many, (heads, terms, width); the last filled with 0."""
    heads = -(-columns.shape[1] // width)
    padded = torch.nn.functional.pad(columns, (0, heads * width - columns.shape[1]))
    return padded.view(len(columns), heads, width).transpose(0, 1)


def ask(reader: Reader, one: Sum, variant: str, config: str) -> GradientOrderProbe:
    """Find one sum's order and compare it with the declared one; the result holds any error."""
    begun, before = time.perf_counter(), reader.launches
    problem = reader.problem
    positions = reader.positions(one)
    found = GradientOrderProbe(
        f"{variant}, {problem.dtype}: {one.name}", config, one.declared, problem.mask.name
    )
    try:
        revealed = reader.tree(one)
        wrong = contradicts(revealed, reader.steps(one), one.declared)
        found = replace(found, order=tree.describe(revealed), wrong=wrong)
    except InconsistentError as error:
        found = replace(found, wrong=f"no order explains the sums: {error}")
    except Exception as error:
        found = replace(found, error=f"{type(error).__name__}: {error}")
    return replace(
        found,
        terms=len(positions),
        launches=reader.launches - before,
        seconds=round(time.perf_counter() - begun, 3),
    )


@dataclass(frozen=True)
class CellVariant:
    """A variant's config in its cell."""

    declaration: Declaration
    config: Config
    cell: Cell
    arena: Arena
    arch: str

    def run(self, problem: Problem, given: Given) -> Mapping[str, Tensor]:
        """One launch of its backward.  Raises RuntimeError if it fails."""
        trial = Trial(
            self.declaration,
            self.config,
            problem,
            self.cell,
            self.arena,
            self.arch,
            entry="backward",
        )
        out = torch.zeros(problem.shape_out, dtype=problem.format_out.torch)
        saved = {"out": out, "lse": torch.zeros(problem.shape_q[:3])}
        # These replace the distribution's inputs and the forward.
        trial.__dict__["inputs"] = Inputs(given.q, given.k, given.v)
        trial.__dict__["dout"] = given.dout
        trial.launches["saved"] = Launch(Reply("ok"), "nan", saved)
        launch = trial.first
        if not launch.reply.ok:
            raise RuntimeError(f"{launch.reply.status}: {launch.reply.message}")
        return launch.outputs


def probe(asked: CellVariant, length: int = LENGTH) -> list[GradientOrderProbe]:
    """Ask for every sum of which an order is declared, in one dtype of 16 bits and in fp32; [] if
    none is declared that has an effect here.  length: of rows and keys."""
    found = []
    declared = asked.declaration.gradients
    for problem in problems_of(asked.declaration, length):
        assert declared is not None
        arithmetic = resolve(declared, asked.config, problem, asked.arch)
        reader = Reader(asked.run, problem, arithmetic)
        found += [
            ask(reader, one, asked.declaration.ref, asked.config.name)
            for one in sums_of(arithmetic, problem.dtype)
        ]
    return found


def build_rows(asked: CellVariant) -> None:
    """Launch without keys, so that kernels which own rows are built, and those that own keys are
    not: beside a `probe`, which builds these first, both are made at the same time, where the cache
    of builds is shared."""
    for problem in problems_of(asked.declaration, LENGTH):
        p = replace(problem, seqlen_kv=0)
        if asked.declaration.support.refusal(p) is None:
            asked.run(p, Given.zeros(p))


def problems_of(declaration: Declaration, length: int) -> list[Problem]:
    """The problems that a backward is asked, before the number of heads is set: none where P or
    delta would be more than the experiments allow for."""
    support, declared = declaration.support, declaration.gradients
    if "backward" not in declaration.entries or declared is None or not declared.reads_out:
        return []
    head_dim = 64 if 64 in support.head_dims else min(support.head_dims)
    masks = (Window(length * 2 // 5, length * 2 // 5), Causal(), Full())
    found = []
    for group in _DTYPES:
        for dtype in [dtype for dtype in group if dtype in support.dtypes][:1]:
            asked = (
                Problem(
                    heads_q=2,
                    heads_kv=2,
                    seqlen_q=length,
                    seqlen_kv=length,
                    head_dim=head_dim,
                    dtype=dtype,
                    mask=mask,
                    softmax_scale=1.0,
                )
                for mask in masks
            )
            found += [problem for problem in asked if support.refusal(problem) is None][:1]
    return found
