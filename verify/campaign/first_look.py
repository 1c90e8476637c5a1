"""The first look: what profile dev leaves to larger profiles when it judges the collection.

It asks some groups of few targets: of one of each kernel file, or of each variant, or of one for
each question, or in all dtypes of one config alone (`Group.first_look`).  A campaign of files that
the user names leaves nothing out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from zlib import crc32

from verify.campaign.edge_cases import leading, leads
from verify.campaign.targets import Target, targets_of
from verify.evidence import NotRun
from verify.oracles import groups
from verify.variant import Declaration


def asked(group: str, targets: Sequence[Target]) -> list[Target]:
    """Those of a group's targets that a first look asks, in their order."""
    match _kind(group):
        case "":
            return [*targets]
        case "config":
            return [target for target in targets if _is_kept(target)]
        case "question":
            return [*_of_question(group, targets).values()]
        case _:
            return [*_first(group, targets).values()]


def left_out(declarations: Sequence[Declaration]) -> Iterator[NotRun]:
    """What a first look at these variants does not ask: one record for each variant."""
    spared: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for group in groups().values():
        kind = _kind(group.name)
        targets = targets_of(declarations, group.name) if kind else []
        kept = asked(group.name, targets)
        by_shared = {_shared(kind, target): target.id for target in kept}
        refs = dict.fromkeys(
            (target.declaration.ref, _told(kind, target, by_shared))
            for target in targets
            if target not in kept and (group.asks is None or target.asked)
        )
        for ref, told in refs:
            spared[ref].setdefault(told, []).append(group.name)
    for ref, kept_by in spared.items():
        all_told = "; ".join(f"{', '.join(names)}: {told}" for told, names in kept_by.items())
        reason = (
            f"some groups are asked of few targets, not of all; larger profiles ask all. {all_told}"
        )
        yield NotRun(variant=ref, dtype="(targets)", reason=reason)


def _kind(group: str) -> str:
    """`Group.first_look`, which a group of a family need not say."""
    found = groups()[group]
    return found.first_look or ("question" if found.family else "")


def _first(group: str, targets: Sequence[Target]) -> dict[str, Target]:
    """The first target that is asked anything, of each file or variant."""
    found: dict[str, Target] = {}
    for target in targets:
        shared = _shared(_kind(group), target)
        if shared not in found and target.asked:
            found[shared] = target
    return found


def _of_question(group: str, targets: Sequence[Target]) -> dict[str, Target]:
    """One target of each variant.  Its questions go to its targets in turn, so that its configs and
    dtypes share them."""
    of_variants: defaultdict[str, list[Target]] = defaultdict(list)
    for target in targets:
        if _is_kept(target):
            of_variants[target.declaration.ref].append(target)
    questions = sorted({_question(name) for name in groups() if _kind(name) == "question"})
    number = questions.index(_question(group))
    return {ref: own[(number + crc32(ref.encode())) % len(own)] for ref, own in of_variants.items()}


def _question(group: str) -> str:
    """One test draws from all groups of a family."""
    return groups()[group].family or group


def _is_kept(target: Target) -> bool:
    """Whether a first look asks a target that stands for itself: all dtypes with the leading
    config, and the first dtype with the others."""
    return leads(target) or target.dtype == target.declaration.support.dtypes[0]


def _shared(what: str, target: Target) -> str:
    return target.declaration.path if what == "file" else target.declaration.ref


def _told(what: str, target: Target, kept: dict[str, str]) -> str:
    """In words, what stands for a target that is not asked."""
    if what != "config":
        return kept[_shared(what, target)]
    return f"all dtypes of {leading(target.declaration).name}, the first of each other config"
