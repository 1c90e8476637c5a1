"""The first look: what profile dev leaves to larger profiles when it judges the collection.

It asks a group that is `costly` of one target of each kernel file.  A campaign of files that the
user names leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verify.campaign.targets import Target, targets_of
from verify.evidence import NotRun
from verify.oracles import groups
from verify.variant import Declaration


def asked(group: str, targets: Sequence[Target]) -> list[Target]:
    """Those of a group's targets that a first look asks: of a costly group, of each kernel file the
    first that is asked anything."""
    return [*_first_of_files(targets).values()] if groups()[group].costly else [*targets]


def left_out(declarations: Sequence[Declaration]) -> Iterator[NotRun]:
    """What a first look at these variants does not ask: one record for each variant and group."""
    for group in groups().values():
        targets = targets_of(declarations, group.name) if group.costly else []
        first = _first_of_files(targets)
        spared: dict[str, Target] = {}
        for target in targets:
            kept = first.get(target.declaration.path)
            if kept is not None and kept is not target and target.asked:
                spared[target.declaration.ref] = kept
        for ref, kept in spared.items():
            reason = (
                f"of the targets in its file only {kept.id} is asked: profile dev leaves the"
                " others to larger ones"
            )
            yield NotRun(variant=ref, dtype=f"({group.name})", reason=reason)


def _first_of_files(targets: Sequence[Target]) -> dict[str, Target]:
    """By path of a kernel file, the first of its targets that is asked anything."""
    found: dict[str, Target] = {}
    for target in targets:
        if target.declaration.path not in found and target.asked:
            found[target.declaration.path] = target
    return found
