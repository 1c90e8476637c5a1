"""`python3 -m tests.bound_terms CASE`: the truth and the bound of one element of O, term by term.

The terms are those of docs/tolerance.md.  They are computed here a second time, from the formulas
of that page, and compared with `verify.tolerance.forward.bound`: the command fails where the two
differ.  No kernel runs, so the bound on any architecture can be asked for.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from references.definition import Attention
from references.row_blocks import RowBlock, row_blocks
from verify.cell.discovery import collection, roster
from verify.judging.findings import coordinate, place
from verify.problem import Problem
from verify.problem.case import Case, CaseError
from verify.problem.inputs import dequantised, tensors
from verify.tolerance.arithmetic import TINY, ForwardArithmetic, U, relative
from verify.tolerance.averages import Values
from verify.tolerance.forward import bound
from verify.tolerance.resolution import resolve
from verify.tolerance.scratch import room_on
from verify.tolerance.subnormals import Lost
from verify.tolerance.weights import Weights, loss_of, weights_of
from verify.variant import Declaration

_SHOWN = 4  # keys of a row, and numbers of Q
_REST = 1e-9  # of the bound: what fp64 operations in two orders may differ by


class UnexplainedError(Exception):
    """A bound that cannot be taken apart; the message is one line."""


@dataclass(frozen=True)
class Term:
    """One term of a bound: its name, the formula of docs/tolerance.md, and its size."""

    name: str
    formula: str
    size: float


@dataclass(frozen=True)
class Element:
    """One element of O, and what its bound is made of.

    index: batch, head, row and column.  query: the row of Q, descaled, fp64.
    """

    index: tuple[int, int, int, int]
    query: Tensor
    block: RowBlock
    arithmetic: ForwardArithmetic
    problem: Problem

    @property
    def at(self) -> tuple[int, int, int]:
        """Its place in the tensors of the block: head of the batch, row, column."""
        batch, head, row, column = self.index
        return batch * self.problem.heads_q + head, row, column

    @property
    def truth(self) -> float:
        """O in fp64."""
        return float(self.block.out[self.at])

    @property
    def bound(self) -> float:
        """The error that the judge allows."""
        return float(bound(self.block, self.arithmetic, self.problem).out[self.at])

    def weights(self) -> Weights:
        """The errors of the softmax weights.  The tensors per key last until the next call."""
        full, room = bool(self.block.visible.all()), room_on(self.block.scores.device)
        return weights_of(self.block, self.arithmetic, self.problem, full, room)


def declaration_of(variant: str) -> Declaration:
    """The declaration of a case's variant.  Raises UnexplainedError if no file has it."""
    file, at, _ = variant.rpartition("@")
    named = [path for path in collection() if f'"{variant}"' in path.read_text(encoding="utf-8")]
    for declaration in roster([Path(file)] if at else named).declarations:
        if declaration.ref == variant:
            return declaration
    raise UnexplainedError(f"{variant}: no kernel file declares a variant of that name")


def element_of(case: Case, declaration: Declaration, index: int, arch: str) -> Element:
    """The element of O with that flat index.  Raises UnexplainedError if there is none."""
    p = case.problem
    config = next((one for one in declaration.configs if one.name == case.config), None)
    if config is None:
        raise UnexplainedError(f"{case.variant} has no config {case.config}")
    size = math.prod(p.shape_out)
    if not 0 <= index < size:
        raise UnexplainedError(f"--index: {index} is not from 0 to {size - 1}")
    batch, head, row, column = coordinate(index, p.shape_out)
    q, k, v = dequantised(p, tensors(p))
    blocks = list(row_blocks(q, k, v, Attention(p.mask, p.scale, p.score_mod)))
    if len(blocks) != 1:
        raise UnexplainedError(f"{p.name}: too large, it has {len(blocks)} blocks of rows, not one")
    arithmetic = resolve(declaration.numerics, config, p, arch)
    query = q[batch, head, row].double()
    return Element((batch, head, row, column), query, blocks[0], arithmetic, p)


def terms_of(element: Element) -> list[Term]:
    """The terms in the order of docs/tolerance.md.

    Raises UnexplainedError if they do not add up to the bound: the declaration has terms that only
    few kernels need (narrow accumulators, a lagging maximum, merged parts...).
    """
    a, block, at, w = element.arithmetic, element.block, element.at, element.weights()
    values = Values.of(block, bool(block.visible.all()))
    row, column, size = at[:2], (at[0], 0, at[2]), abs(element.truth)
    keys, total, share = (float(tensor[row]) for tensor in (w.keys, w.total, w.share))
    sizes = values.size[at[0], :, at[2]]
    carried = min(float(w.upper[row] @ sizes) / total, float(values.most[column]))
    each = torch.minimum(w.upper[row], torch.tensor(loss_of(a) * share * total))
    lost = float(each * block.visible[row] @ sizes) / total
    moved = float(values.deviation(w.grown.clone(), block.out)[at]) / total
    moved = min(moved, float(values.spread[column]))
    apart, sums = (float(part[row]) for part in a.values.splits(w.keys, element.problem.seqlen_kv))
    between = relative(2 * a.blocks, U)
    rescales = (1 + between) * (1 + relative(a.division * a.normalised, U)) - 1
    rounding = (1 + a.probability_roundoff) * (1 + apart + sums) * (1 + rescales) - 1
    of_sums = (1 + sums) * (1 + between) - 1
    rounded = rounding * carried - of_sums * max(carried - size - moved, 0.0) / 2
    aligned = _aligned(element, w, carried, lost) * (1 + rescales)
    before = moved + rounded + lost + aligned
    drift = -math.expm1(-float(w.normaliser[row]))
    summed = (before + drift * size) / (1 - drift)
    divided = 0.0 if a.normalised else relative(a.division, U) * (size + summed)
    flushed = float(w.growth[row]) * (2 * keys + 2 * a.blocks + 2) * TINY
    inside = summed + divided + flushed
    output = a.output.unit_roundoff * (size + inside) + a.output.smallest_subnormal / 2
    found = [
        Term("moved weights", "J", moved),
        Term("P, product-sum, rescales", "R", rounded),
        Term("small P", "lost", lost),
        Term("subnormal operands", "of P V", aligned),
        Term("row sum", "(ls |O| + ls * all above) / (1 - ls)", summed - before),
        Term("division", f"rel({a.division}) (|O| + pre)", divided),
        Term("flushed arithmetic", "(2 n + 2 n_b + 2) t g g_1", flushed),
        Term("output", "u_o (|O| + pre) + eta_o", output),
    ]
    rest = element.bound - sum(term.size for term in found)
    if not abs(rest) <= _REST * element.bound:
        told = f"{rest:.4g} of the bound {element.bound:.4g}"
        raise UnexplainedError(f"{told} belongs to terms that this command does not take apart")
    return found


def _aligned(element: Element, w: Weights, carried: float, lost: float) -> float:
    """What the product P V may lose because one of its operands is subnormal."""
    a, at = element.arithmetic, element.at
    if not a.weighted.threshold:
        return 0.0
    keys = w.keys[at[:2]]
    alone = keys * w.share[at[:2]] * loss_of(a)
    small = element.block.value_sizes.least[at[0], 0, at[2]] < a.weighted.threshold
    reach, weighted = (torch.tensor(x, dtype=torch.float64) for x in (carried, lost))
    return float(a.weighted.loss(keys, 1.0, reach, Lost(weighted, alone), small))


def lines(element: Element, terms: list[Term]) -> Iterator[str]:
    """What the command prints.  u is 2^-24, the unit roundoff of fp32."""
    a, p, block, w = element.arithmetic, element.problem, element.block, element.weights()
    at = element.at
    row = at[:2]
    seen = block.visible[row].nonzero().flatten()
    told = f"its row sees keys {seen[0]} to {seen[-1]}, n = {len(seen)}"
    yield f"element   {place('out', element.index)}: {told}"
    numbers = " ".join(f"{x:.8g}" for x in element.query[:_SHOWN].tolist())
    yield f"Q         {numbers} ... ({p.head_dim} numbers)"
    m, mass, lse = (float(tensor[row]) for tensor in (block.row_max, block.row_sum, block.lse))
    yield f"row       m = {m:.7g}, l = {mass:.7g}, LSE = {lse:.7g}"
    yield f"{'key':9} {'S':>11} {'A':>10} {'P':>10} {'V':>12} {'delta / u':>10}"
    heaviest = block.probabilities[row].topk(min(_SHOWN, len(seen))).indices.sort().values
    for key in heaviest.tolist():
        one = (*row, key)
        tensors_of_pairs = block.scores, block.magnitude, block.probabilities, w.upper
        score, magnitude, weight, upper = (float(tensor[one]) for tensor in tensors_of_pairs)
        value, delta = float(block.values[at[0], key, at[2]]), math.log(upper / weight) / U
        numbers = f"{score:11.7f} {magnitude:10.7f} {weight:10.7f} {value:12.8f}"
        yield f"{key:<9} {numbers} {delta:10.2f}"
    of_scores = a.scores.kappa(p.head_dim) / U
    of_values = float(a.values.kappas(w.keys, p.seqlen_kv)[row]) / U
    yield f"kappa     {of_scores:.4g} u of Q K^T, {of_values:.4g} u of P V"
    roundoff = a.probability_roundoff / U
    yield f"P         {a.probability.name}, u_P = {roundoff:.6g} u; n_b = {a.blocks}"
    yield f"truth     {element.truth:.9g}"
    yield f"{'term':25} {'size':>10} {'size / u':>10} {'share':>7}  formula"
    for term in terms:
        sizes = f"{term.size:10.4e} {term.size / U:10.3f} {term.size / element.bound:7.1%}"
        yield f"{term.name:25} {sizes}  {term.formula}"
    sizes = f"{element.bound:10.4e} {element.bound / U:10.3f} {1:7.1%}"
    yield f"{'bound':25} {sizes}  = {element.bound:.9g}"


def main(arguments: list[str]) -> int:
    """Print the element; 2 if it cannot be taken apart, and why."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python3 -m tests.bound_terms", description=about)
    parser.add_argument("case", metavar="CASE", help="the id of a case of a forward")
    parser.add_argument("--index", type=int, default=0, help="flat index into O; default: 0")
    parser.add_argument("--arch", default="cpu", help="sm_80, sm_90...; default: cpu")
    given = parser.parse_args(arguments)
    try:
        case = Case.parse(given.case)
        element = element_of(case, declaration_of(case.variant), given.index, given.arch)
        print("\n".join(lines(element, terms_of(element))))
    except (CaseError, UnexplainedError) as error:
        print(f"bound_terms: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
