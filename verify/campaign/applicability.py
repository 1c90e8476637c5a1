"""Which oracle is asked about which feature and which variant: docs/applicability.md, made from
declarations alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from references.output_scale import DTYPES as EIGHT_BITS
from references.quantisation import parse_quantisation, quantisation_words
from references.score_mods import mod_kind_of, mod_words
from verify.bundle import INSTALLED, ROOT
from verify.campaign import derivations
from verify.campaign.targets import excludes_group, excludes_variant
from verify.cell.discovery import roster
from verify.oracles import Oracle, groups, oracles
from verify.problem import Problem
from verify.problem.premises import broken
from verify.problem.storage import storage_kind, storage_words
from verify.variant import Declaration

PATH = ROOT / "docs" / "applicability.md"

_INTRODUCTION = f"""# What each oracle judges

Made by `{derivations.COMMAND}` from premises and declarations;
[oracles.md](oracles.md) says what each oracle asks.

## Features

A feature is what a problem has beyond plain attention. It breaks premises
(`references/premises.py`). An oracle names the premises that it needs, and is not asked about a
problem with a feature that breaks one of them; the verdict is then `inapplicable`, with the reason.
A group of which no oracle can be asked draws its problems without that feature. An oracle that
names no premises is asked about no feature.
"""

_EXCEPTIONS = """## Variants

Each oracle judges every variant that has the entry point that it asks for, `forward` or `backward`,
but for these. It may still leave single problems to other oracles.
"""


def reason(declaration: Declaration, oracle: Oracle) -> str | None:
    """Why an oracle judges no problem of a variant, or None."""
    group = groups()[oracle.group]
    if group.entry not in declaration.entries or group.outside:
        whole = excludes_group(declaration, oracle.group)
        if whole is not None:
            return whole
    own = excludes_variant(declaration, oracle)
    if own is not None or group.asks is None:
        return own
    asked = [
        problem
        for dtype in declaration.support.dtypes
        for problem in group.asks(declaration, dtype)
    ]
    supported = any(declaration.support.refusal(problem) is None for problem in asked)
    return None if supported else "supports none of the problems that it asks"


def table(declarations: Sequence[Declaration]) -> str:
    """Markdown: which oracle is asked about which feature, and which variants it does not judge."""
    return "\n".join((_INTRODUCTION, *_features(), "", _EXCEPTIONS, *_exceptions(declarations), ""))


def _features() -> Iterator[str]:
    """One row per oracle and group, one column per feature."""
    plain = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16")
    problems = [plain.but(score_mod=mod_kind_of(word).gallery()[0]) for word in mod_words()]
    problems += [plain.but(quantisation=parse_quantisation(word)) for word in quantisation_words()]
    kinds = map(storage_kind, storage_words())
    problems += [plain.but(**{f"layout_{kind.holds[0]}": kind()}) for kind in kinds]
    problems.append(plain.but(dtype_out=EIGHT_BITS[0]))
    found = {feature.label: problem for problem in problems for feature in problem.features}
    yield " | ".join(("| oracle", "group", *found)) + " |"
    yield "|" + " --- |" * (2 + len(found))
    for oracle in oracles():
        cells = (_asked(oracle, problem) for problem in found.values())
        yield " | ".join((f"| {oracle.name}", oracle.group, *cells)) + " |"


def _asked(oracle: Oracle, problem: Problem) -> str:
    reason = broken(oracle.needs, problem)
    return "yes" if reason is None else "no: " + reason.partition(",")[0]


def _exceptions(declarations: Sequence[Declaration]) -> Iterator[str]:
    """Items of a list: an oracle, the variants that it does not judge, and why not."""
    found: dict[tuple[str, str], list[str]] = {}
    for oracle in oracles():
        entry = groups()[oracle.group].entry
        for declaration in sorted(declarations, key=lambda declaration: declaration.ref):
            why = reason(declaration, oracle) if entry in declaration.entries else None
            if why is not None:
                found.setdefault((_title(oracle), why), []).append(declaration.ref)
    for (title, why), refs in found.items():
        yield derivations.filled(f"- **{title}**: {', '.join(refs)}. Reason: {why}.", indent="  ")


def _title(oracle: Oracle) -> str:
    return oracle.name if oracle.group == oracle.name else f"{oracle.name} ({oracle.group})"


def list_oracles(write: bool) -> int:
    """Print the oracles with their groups and the faults that they catch; returns an exit code.

    write: write docs/applicability.md and docs/oracles.md instead.
    """
    if write and INSTALLED:
        raise click.UsageError(
            "--table: docs/applicability.md and docs/oracles.md are files of a checkout; an"
            " installed wheel has none"
        )
    if write:
        for path, text in (
            (PATH, table(roster().declarations)),
            (derivations.PATH, derivations.page()),
        ):
            path.write_text(text, encoding="utf-8")
            click.echo(f"wrote {path}")
        return 0
    for oracle in oracles():
        click.echo(f"{oracle.name} ({oracle.group}): {oracle.catches}")
    return 0
