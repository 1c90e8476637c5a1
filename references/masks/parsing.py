"""The parser of mask names."""

from __future__ import annotations

from references.masks.base import KINDS, Atom, Mask, MaskNameError, gallery, intersect, kinds


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
