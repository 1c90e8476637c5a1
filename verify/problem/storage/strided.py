"""Strided storage: a tensor as one view, with an order, a pitch, an offset and shared
dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from references.premises import Premise
from references.tensor import Tensor
from verify.problem.storage.base import Piece, ProblemError, Shape4, Storage
from verify.variant import STRIDED

ORDERS = ("bhsd", "bshd", "sbhd")
EXPANSIONS = ("b", "h")


@dataclass(frozen=True)
class Layout(Storage):
    """A strided view; a name is its order and what differs from the default (bshd.p8.o1.xh).

    order: the storage order of the four dimensions; head_dim is always the innermost.
    pitch: unused elements behind every row of head_dim elements.
    offset: unused elements before the first one; an odd offset misaligns the tensor.
    expand: dimensions ("b", "h") stored once and expanded with stride 0.
    """

    order: str = "bhsd"
    pitch: int = 0
    offset: int = 0
    expand: str = ""
    word: ClassVar[str] = STRIDED
    heads: ClassVar[tuple[str, ...]] = ORDERS
    holds: ClassVar[tuple[str, ...]] = ("q", "k", "v", "out", "dout")
    breaks: ClassVar[frozenset[Premise]] = frozenset()

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ProblemError(f"layout: order {self.order!r} is none of {', '.join(ORDERS)}")
        if self.pitch < 0 or self.offset < 0:
            raise ProblemError("layout: pitch and offset count elements and cannot be negative")
        if any(dim not in EXPANSIONS for dim in self.expand):
            raise ProblemError(
                f"layout: expand {self.expand!r} may hold only {', '.join(EXPANSIONS)}"
            )

    @property
    def name(self) -> str:
        parts = [
            self.order,
            f"p{self.pitch}" * bool(self.pitch),
            f"o{self.offset}" * bool(self.offset),
        ]
        return ".".join(filter(None, [*parts, f"x{self.expand}" * bool(self.expand)]))

    @classmethod
    def parse(cls, text: str) -> Layout:
        order, *rest = text.split(".")
        found = {part[:1]: part[1:] for part in rest}
        if set(found) - set("pox") or len(found) != len(rest):
            raise ProblemError(f"layout: {text!r} is not a layout (example: bshd.p8.o1.xh)")
        return Layout(order, int(found.get("p", "0")), int(found.get("o", "0")), found.get("x", ""))

    def strides(self, shape: Shape4) -> Shape4:
        """Strides in elements of (batch, heads, seqlen, head_dim)."""
        sizes = dict(zip("bhsd", shape, strict=True))
        strides = {"d": 1}
        step = sizes["d"] + self.pitch
        for dim in reversed(self.order[:-1]):
            strides[dim] = 0 if dim in self.expand else step
            step *= 1 if dim in self.expand else max(sizes[dim], 1)
        return strides["b"], strides["h"], strides["s"], strides["d"]

    def pieces(self, shape: Shape4) -> dict[str, Piece]:
        return {"": Piece(shape, self.strides(shape), self.offset, self.pitch)}

    def aligned(self, shape: Shape4, itemsize: int, alignment: int) -> bool:
        # All steps are multiples of a row's: nearly always that decides.
        steps = (shape[-1] + self.pitch, self.offset)
        if not any(step * itemsize % alignment for step in steps):
            return True
        return super().aligned(shape, itemsize, alignment)

    def write(self, values: Tensor, views: Mapping[str, Tensor]) -> None:
        """Values of any rank; what is stored once is written through a narrowed view."""
        view = views[""]
        for dim, (have, want) in enumerate(zip(values.shape, view.shape, strict=True)):
            view = view.narrow(dim, 0, have) if have != want else view
        view.copy_(values)

    @property
    def sibling(self) -> Layout:
        return replace(self, order=ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)])

    @property
    def gradient(self) -> Layout:
        """As the tensor lies, with nothing expanded."""
        return replace(self, expand="")
