"""Intersections of masks, and the names of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from references.masks.base import (
    KINDS,
    Atom,
    Device,
    Interval,
    Mask,
    MaskMod,
    MaskNameError,
    gallery,
    kinds,
)
from references.masks.full import Full


@dataclass(frozen=True)
class Intersection(Mask):
    """Visible where every part says so.

    `intersect` and `&` build it: flattened, sorted, without repeats.
    """

    parts: tuple[Atom, ...]
    kind: ClassVar[str] = "intersection"

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return self.parts

    def check(self, batch: int) -> None:
        for part in self.parts:
            part.check(batch)

    def mod(self, seqlen_q: int, seqlen_kv: int, device: Device = "cpu") -> MaskMod:
        mods = [part.mod(seqlen_q, seqlen_kv, device) for part in self.parts]
        return lambda b, h, q, k: reduce(torch.Tensor.__and__, (mod(b, h, q, k) for mod in mods))

    def interval(self, seqlen_q: int, seqlen_kv: int, b: Tensor, q: Tensor) -> Interval | None:
        bounds = [part.interval(seqlen_q, seqlen_kv, b, q) for part in self.parts]
        if any(bound is None for bound in bounds):
            return None
        lows, highs = zip(*(bound for bound in bounds if bound is not None), strict=True)
        return reduce(torch.maximum, lows), reduce(torch.minimum, highs)


def intersect(*masks: Mask) -> Mask:
    """The intersection of masks, in a canonical order: equal sets of parts have one name."""
    parts = {part for mask in masks for part in mask.atoms if not isinstance(part, Full)}
    if not parts:
        return Full()
    ordered = tuple(sorted(parts, key=lambda part: (part.rank, part.kind, part.name)))
    return ordered[0] if len(ordered) == 1 else Intersection(ordered)


def parse_mask(name: str) -> Mask:
    """The mask of that name; raises `MaskNameError` with the part that does not parse."""
    return intersect(*(_parse_atom(part) for part in name.split("+")))


def _parse_atom(name: str) -> Atom:
    kind, *fields = name.split(".")
    if kind in KINDS:
        try:
            return KINDS[kind].parse(fields)
        except ValueError:
            pass
    known = ", ".join(kind.kind for kind in kinds())
    examples = ", ".join(mask.name for mask in gallery())
    raise MaskNameError(f"not a mask: {name!r} (kinds: {known}; examples: {examples})")
