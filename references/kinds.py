"""The check that the registries of masks, score mods and storages share."""

from __future__ import annotations


def refuse_incomplete(cls: type, noun: str, attributes: tuple[str, ...], see: str) -> None:
    """Raise TypeError, in one line, if a class leaves a method abstract or lacks an attribute.

    noun: the kind of class, for the message; see: the base class and its file.
    """
    members = ((name, getattr(cls, name, None)) for name in dir(cls))
    lacks = [name for name, member in members if getattr(member, "__isabstractmethod__", False)]
    lacks += [name for name in attributes if not hasattr(cls, name)]
    if lacks:
        raise TypeError(f"{noun}: {cls.__name__} lacks {', '.join(lacks)}; see {see}")
