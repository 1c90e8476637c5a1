"""How a tensor lies in memory: order, pitch, offset and shared dimensions, as one word."""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = ("bhsd", "bshd", "sbhd")
EXPANSIONS = ("b", "h")


class ProblemError(ValueError):
    """A Problem, or the text of one, that makes no sense; the message names the field."""


@dataclass(frozen=True)
class Layout:
    """How one tensor of logical shape (batch, heads, seqlen, head_dim) lies in memory.

    order: the storage order of the four dimensions; head_dim is always the innermost.
    pitch: unused elements behind every row of head_dim elements.
    offset: unused elements before the first one; an odd offset misaligns the tensor.
    expand: dimensions ("b", "h") stored once and expanded with stride 0.
    """

    order: str = "bhsd"
    pitch: int = 0
    offset: int = 0
    expand: str = ""

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

    @staticmethod
    def parse(text: str) -> Layout:
        order, *rest = text.split(".")
        found = {part[:1]: part[1:] for part in rest}
        if set(found) - set("pox") or len(found) != len(rest):
            raise ProblemError(f"layout: {text!r} is not a layout (example: bshd.p8.o1.xh)")
        return Layout(order, int(found.get("p", "0")), int(found.get("o", "0")), found.get("x", ""))

    def strides(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Strides in elements of (batch, heads, seqlen, head_dim)."""
        sizes = dict(zip("bhsd", shape, strict=True))
        strides = {"d": 1}
        step = sizes["d"] + self.pitch
        for dim in reversed(self.order[:-1]):
            strides[dim] = 0 if dim in self.expand else step
            step *= 1 if dim in self.expand else max(sizes[dim], 1)
        return strides["b"], strides["h"], strides["s"], strides["d"]

    def aligned(self, shape: tuple[int, int, int, int], itemsize: int, alignment: int) -> bool:
        """Whether every row begins at a multiple of `alignment` bytes, counted from an aligned
        allocation."""
        steps = [
            step
            for step, size in zip(self.strides(shape)[:-1], shape[:-1], strict=True)
            if size > 1
        ]
        return 0 in shape or not any(n * itemsize % alignment for n in (self.offset, *steps))

    def extent(self, shape: tuple[int, int, int, int]) -> int:
        """Elements of storage from the tensor's allocation start to just behind its last
        element."""
        if 0 in shape:
            return self.offset
        return (
            self.offset
            + 1
            + sum((n - 1) * s for n, s in zip(shape, self.strides(shape), strict=True))
        )
