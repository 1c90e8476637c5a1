"""The first look: what profile dev leaves to larger profiles when it judges the collection.

It asks some groups of one target of each kernel file, or of each variant (`Group.first_look`).  A
campaign of files that the user names leaves nothing out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from verify.campaign.targets import Target, targets_of
from verify.evidence import NotRun
from verify.oracles import groups
from verify.variant import Declaration


def asked(group: str, targets: Sequence[Target]) -> list[Target]:
    """Those of a group's targets that a first look asks: of those that share what `first_look`
    names, the first that is asked anything."""
    return [*_first(group, targets).values()] if groups()[group].first_look else [*targets]


def left_out(declarations: Sequence[Declaration]) -> Iterator[NotRun]:
    """What a first look at these variants does not ask: one record for each variant."""
    spared: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for group in groups().values():
        targets = targets_of(declarations, group.name) if group.first_look else []
        first = _first(group.name, targets)
        refs = dict.fromkeys(
            (target.declaration.ref, first[_shared(group.first_look, target)].id)
            for target in targets
            if target not in first.values() and target.asked
        )
        for ref, kept in refs:
            spared[ref].setdefault(kept, []).append(group.name)
    for ref, kept_by in spared.items():
        told = "; ".join(f"{', '.join(names)}: {kept}" for kept, names in kept_by.items())
        reason = f"some groups are asked of one target, not of all; larger profiles ask all. {told}"
        yield NotRun(variant=ref, dtype="(targets)", reason=reason)


def _first(group: str, targets: Sequence[Target]) -> dict[str, Target]:
    """The first target that is asked anything, of each file or variant."""
    found: dict[str, Target] = {}
    for target in targets:
        shared = _shared(groups()[group].first_look, target)
        if shared not in found and target.asked:
            found[shared] = target
    return found


def _shared(what: str, target: Target) -> str:
    return target.declaration.path if what == "file" else target.declaration.ref
