"""Whether a function without a declaration keeps its scores in fp32, in the launch that is judged.

Such a function may round operands and scores to the inputs' format (`verify.cell.plain_functions`),
and its bounds allow for that.  `keeping` is the same arithmetic without this freedom.  An error
beyond the bounds of `keeping` comes from these roundings, from others behind the scores
(`later_roundings` bounds them), or from a fault.  A second launch tells whether scores are rounded.
It differs from the judged one in the values of q, k and v alone: lengths, heads, dtype, memory,
mask and scale are the same, and a kernel chooses its arithmetic by these.  Its values (`Telling`)
show every one of the roundings, and hide errors that are in proportion to the differences of
scores, such as a wrong scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from references.row_blocks import RowBlock
from verify.arithmetic.dtypes import DType
from verify.arithmetic.rounding import to_bits, to_format
from verify.judging.measuring import make_inputs, rounded
from verify.problem import Problem
from verify.problem.inputs import Inputs, dequantised
from verify.problem.source import Source
from verify.variant import Numerics

GROUPS = 8  # different keys; each stands at every eighth position
VISIBLE = 2.0  # times the bound that a rounding must cost, or the launch tells nothing
# All scores are within _SPREAD of _SCORE, where fp16's numbers lie 1 apart.  Each is a sum of
# products of which the magnitudes add up to _MAGNITUDE.
_SCORE, _SPREAD, _MAGNITUDE = 1400.0, 0.25, 4096.0
_TERMS = 8  # large products of a score; of more, the roundings would cancel
_PARTS = 3  # elements of head_dim that bring a score to where it shall be: 24 bits
_SCALES = (2.0**-8, 2.0**4)  # beyond these fp16 does not hold the values
_LOG2_E = math.log2(math.e)


def keeping(declared: Numerics, dtype: str) -> Numerics | None:
    """The declared arithmetic with operands and scores in fp32; None if it has no such freedom in
    that dtype."""
    products, softmax = declared.products, declared.softmax
    if dtype not in ("float16", "bfloat16"):
        return None
    if products.prescale == "none" and softmax.scores == "float32":
        return None
    return replace(
        declared,
        products=replace(products, prescale="none"),
        softmax=replace(softmax, scores="float32"),
    )


@dataclass(frozen=True)
class Telling:
    """Values that tell whether a launch rounds operands or scores.

    One query q (head_dim) for all rows; keys k (GROUPS, head_dim), of which key j is number j %
    GROUPS; values v (GROUPS, head_dim_v) of 1 and -1; all fp64, in the problem's format.  The
    scores of the keys are the same up to _SPREAD.
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def of(p: Problem) -> Telling | None:
        """None if no such values exist, or none were thought of: another function of the scores,
        factors, a head dim that is too small, an extreme scale."""
        size = abs(p.scale)
        plain = p.score_mod is None and not p.quantisation.stored(p.shapes)
        if not plain or p.head_dim < _TERMS + _PARTS or not _SCALES[0] <= size <= _SCALES[1]:
            return None
        source, large = Source(p), slice(_PARTS, _PARTS + _TERMS)
        each = _MAGNITUDE / (size * _TERMS)
        q = torch.zeros(p.head_dim, dtype=torch.float64)
        k = torch.zeros(GROUPS, p.head_dim, dtype=torch.float64)
        factor = 2.0 ** round(math.log2(each) / 2) / 1.5
        q[large] = factor * _mantissas(source, "q", (_TERMS,))
        signs = source.integers("k", "telling signs", 0, 2, (GROUPS, _TERMS))
        k[:, large] = each / factor / 2.25 * _mantissas(source, "k", (GROUPS, _TERMS))
        k[:, large] *= signs.double() * 2 - 1
        q, k = (rounded(x, p).double() for x in (q, k))
        up = torch.where(torch.arange(GROUPS) % 2 == 0, 1.0, -1.0).double()
        near = up * torch.linspace(_SPREAD / 2, _SPREAD, GROUPS).double()
        missing = (_SCORE + near) / size - k @ q
        weight = 2.0 ** round(math.log2(float(missing.abs().max())) / 2)
        for place in range(_PARTS):
            q[place] = weight
            k[:, place] = rounded(missing / weight, p).double()
            missing = missing - weight * k[:, place]
        flips = source.integers("v", "telling signs", 0, 2, (GROUPS, p.head_dim_v))
        v = flips.double() * 2 - 1
        v[:, 0] = up
        return Telling(p, q * math.copysign(1.0, p.scale), k, v)

    @property
    def inputs(self) -> Inputs:
        """These values in the shapes of the problem."""
        p = self.problem
        at = torch.arange(p.seqlen_kv) % GROUPS
        return make_inputs(p, self.q, self.k[at], self.v[at])

    @property
    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        return dequantised(self.problem, self.inputs)

    def showing(self, seen: Tensor, out: Tensor, bound: Tensor) -> set[str]:
        """Names of the roundings that move some element of O by VISIBLE times its bound.

        seen: the keys that each row sees, (..., rows, keys); out, bound: exact O and what is
        allowed, (..., rows, head_dim_v).
        """
        counts = torch.stack([seen[..., g::GROUPS].sum(-1) for g in range(GROUPS)], -1).double()
        found = set()
        for name, scores in self.roundings().items():
            weights = counts * torch.exp(scores - scores.amax())
            total = weights.sum(-1, keepdim=True)
            # a row whose keys have all lost their weight shows nothing
            other = torch.where(total == 0, out, weights @ self.v / total)
            if bool(((other - out).abs() > VISIBLE * bound).any()):
                found.add(name)
        return found

    def roundings(self) -> Mapping[str, Tensor]:
        """The scores (GROUPS) after each of the roundings that a function may do; those that this
        scale makes exact, as a power of two does, are left out."""
        exact = self._exact
        return {
            name: scores
            for name, scores in self._roundings()
            if not torch.allclose(scores, exact, rtol=2.0**-40, atol=0.0)
        }

    def exact_for(self, q: Tensor, k: Tensor) -> bool:
        """Whether the roundings that `roundings` leaves out are exact for these values too, which
        they are not where a product is subnormal."""
        left_out = {name for name, _ in self._roundings()} - self.roundings().keys()
        dtype, scale = self.problem.dtype, self.problem.scale
        root, short = math.sqrt(abs(scale)), to_format(dtype)
        factors = {"q": (scale, 1.0), "k": (1.0, scale), "both": (root, root)}
        for name in left_out:
            for x, factor in zip((q, k), factors[name.split()[0]], strict=True):
                product = x.double() * factor
                if not torch.equal(short(product), product):
                    return False
        return True

    @property
    def _exact(self) -> Tensor:
        return self.k @ self.q * self.problem.scale

    def _roundings(self) -> Iterator[tuple[str, Tensor]]:
        p, q, k = self.problem, self.q, self.k
        for truncate, said in ((False, ""), (True, ", truncated")):
            short = to_bits(p.format.precision, truncate=truncate)
            yield f"scores{said}", short(k @ q) * p.scale
            for factor, base in ((1.0, said), (_LOG2_E, f" in base 2{said}")):
                scale, root = p.scale * factor, math.sqrt(abs(p.scale) * factor)
                yield f"scaled scores{base}", short(k @ q * scale) / factor
                yield f"q times the scale{base}", k @ short(q * scale) / factor
                yield f"k times the scale{base}", short(k * scale) @ q / factor
                signed = math.copysign(root, p.scale)
                yield f"both times a root{base}", short(k * root) @ short(q * signed) / factor


def later_roundings(block: RowBlock, output: DType) -> Tensor:
    """What is lost of O, at most, if besides P and O everything behind the scores is rounded to
    that 16-bit format: the exponents S - m, P once more, the row sum, and sums of P V twice;
    (heads, rows, head_dim_v), fp64.

    It takes (rows, keys, head_dim_v) elements of memory.
    """
    u, places = output.unit_roundoff, 4 * output.smallest_subnormal
    depth = torch.where(block.visible, block.row_max[..., None] - block.scores, 0.0)
    # weights that change by a factor, and are divided by their sum, move O by P |V - O| each
    moved = block.probabilities * depth.nan_to_num(nan=0.0, posinf=0.0)
    v, out = block.values, block.out
    lost = 3 * torch.bmm(block.probabilities, v.abs()) + 2 * out.abs()
    for head, weights in enumerate(moved):
        apart = (v[head] - out[head, :, None]).abs_()
        lost[head] += torch.einsum("rk,rkd->rd", weights, apart)
    return u * lost + places * (torch.bmm(block.visible.double(), v.abs()) + 1)


def _mantissas(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [1, 2), of 16 bits."""
    return 1 + source.integers(name, "telling", 0, 65536, shape) / 65536.0
