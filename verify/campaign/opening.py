"""What a run records before its first case: its variants, and what it does not ask, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import hypothesis
import torch

from verify.bundle import published
from verify.campaign.builds import arches, left_out
from verify.campaign.targets import Target, excludes_here
from verify.cell import confinement, plain_gradients
from verify.cell.discovery import Roster
from verify.cell.helper_files import Unloadable
from verify.evidence import (
    NO_KERNEL,
    Drawn,
    Evidence,
    Finding,
    NotRun,
    RunInfo,
    VariantEntry,
    Verdict,
)
from verify.evidence.judge_version import judge_hash
from verify.evidence.known_failures import at_start, digest
from verify.machine import device
from verify.oracles import used_files
from verify.problem import kind_files
from verify.statistics.verdicts import GROUP
from verify.tolerance import MODEL
from verify.variant import Declaration

_BUILDS = "(builds)"  # in place of a dtype: what is compiled
_WITNESS = "(witness)"  # in place of a dtype: a stored case that is dropped


def run_info(run: str, profile: str) -> RunInfo:
    """Who runs what, where and when."""
    return RunInfo(
        run=run,
        started=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"),
        profile=profile,
        device=device.fingerprint(),
        versions={
            "torch": torch.__version__,
            "hypothesis": hypothesis.__version__,
            "judge": judge_hash(),
            "bounds": MODEL,
            "cells": confinement.state(),
            "xfails": digest(at_start()),
            **outside_files(),
        },
    )


def variants(declarations: Sequence[Declaration]) -> Iterator[VariantEntry | NotRun]:
    """The variants, and why some cannot run here."""
    for declaration in declarations:
        yield _entry(declaration)
        reason = excludes_here(declaration)
        if reason is not None:
            yield NotRun(variant=declaration.ref, reason=reason)


def builds_left_out(
    declarations: Sequence[Declaration], profile: str, *, first_look: bool
) -> Iterator[NotRun]:
    """The variants whose builds are not compiled, or not all of them."""
    compiled_for = arches(profile, declarations, first_look=first_look)
    for declaration in declarations:
        if declaration.compiles:
            chosen = compiled_for[declaration.ref]
            reason = declaration.uncompilable or left_out(profile, chosen)
            if reason:
                yield NotRun(variant=declaration.ref, dtype=_BUILDS, reason=reason)


def gradients_left_out(here: Sequence[Declaration]) -> Iterator[NotRun]:
    """Gradients of plain functions that are not judged."""
    for ref, dtype, reason in plain_gradients.unjudged(here):
        yield NotRun(variant=ref, dtype=dtype, reason=reason)


def dropped(stored: Sequence[tuple[Target, str, str | None]]) -> Iterator[NotRun]:
    """The stored cases (`CampaignRun.stored_cases`) that cannot be asked today."""
    for target, id_, why in stored:
        if why is not None:
            reason = f"a case on record is dropped, {why}: {id_}"
            yield NotRun(variant=target.declaration.ref, dtype=_WITNESS, reason=reason)


def other_files(discovered: Roster, *, failing: bool) -> Iterator[VariantEntry | Verdict | NotRun]:
    """The files without variants.  failing: a file that does not load gets a failing verdict."""
    for failure in discovered.failures if failing else ():
        yield from _unloadable(failure)
    for file in discovered.helpers:
        yield NotRun(variant=file.ref, dtype=NO_KERNEL, reason=file.message)
    for file in discovered.unmet:
        yield _unknown(file)
        yield NotRun(variant=file.ref, reason=file.message)


def outside_files() -> dict[str, str]:
    """Names and hashes of the files outside the package with oracles and kinds, where there are
    any."""
    used = {"oracles": used_files(), "kinds": kind_files.used_files()}
    return {
        name: ", ".join(f"{path.name} {digest(path.read_text(encoding='utf-8'))}" for path in files)
        for name, files in used.items()
        if files
    }


def uncounted(evidence: Evidence) -> Iterator[Drawn]:
    """How many problems were drawn by processes that ended before they could record it."""
    judged: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for table in evidence.verdicts.tables:
        shape = table.shape
        if shape.phase == "generate":
            judged[shape.variant, shape.dtype, shape.group].update(table.cases)
    missing = Counter({key: len(cases) for key, cases in judged.items()})
    missing.subtract({(d.variant, d.dtype, d.group): d.drawn for d in evidence.drawn})
    for (variant, dtype, group), drawn in sorted(missing.items()):
        if drawn > 0 and group not in ("loading", GROUP):
            yield Drawn(variant=variant, dtype=dtype, group=group, drawn=drawn, refused=0)


def _entry(declaration: Declaration) -> VariantEntry:
    return VariantEntry(
        ref=declaration.ref,
        name=declaration.name,
        family=declaration.family,
        path=(
            declaration.path if declaration.ref != declaration.name else published(declaration.path)
        ),
        source_hash=declaration.source_hash,
        configs=tuple(config.name for config in declaration.configs),
        further_configs=len(declaration.further_configs),
        support=asdict(declaration.support),
        numerics=asdict(declaration.numerics),
        contract=asdict(declaration.contract),
        entries=declaration.entries,
        gradients=None if declaration.gradients is None else asdict(declaration.gradients),
        unavailable=declaration.unavailable,
        undeclared=declaration.undeclared,
    )


def _unknown(file: Unloadable) -> VariantEntry:
    """What stands for the variants of a file that was not loaded."""
    return VariantEntry(
        ref=file.ref,
        name=file.ref,
        family="unknown",
        path=file.ref,
        source_hash="",
        configs=(),
        support={},
        numerics={},
        contract={},
    )


def _unloadable(failure: Unloadable) -> list[VariantEntry | Verdict]:
    finding = Finding(
        oracle="loading",
        message=f"does not load: {failure.message}",
        replay=f"python -m verify run {failure.ref}",
    )
    verdict = Verdict(
        case=f"{failure.ref}:-:loading:-",
        variant=failure.ref,
        config="-",
        dtype="-",
        oracle="loading",
        group="loading",
        outcome="fail",
        phase="generate",
        problem="-",
        finding=finding,
    )
    return [_unknown(failure), verdict]
