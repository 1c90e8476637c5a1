"""Which oracle judges which variant, and why not: the table of docs/applicability.md, made from
declarations alone."""

from __future__ import annotations

from collections.abc import Sequence

import click

from verify.bundle import INSTALLED, ROOT
from verify.campaign import derivations
from verify.campaign.targets import excludes_group
from verify.cell.discovery import roster
from verify.oracles import Oracle, groups, oracles
from verify.variant import Declaration

PATH = ROOT / "docs" / "applicability.md"


def reason(declaration: Declaration, oracle: Oracle) -> str | None:
    """Why an oracle does not judge a variant, or None.  What single problems are not its business
    is not counted."""
    group = groups()[oracle.group]
    if group.entry not in declaration.entries or group.outside:
        whole = excludes_group(declaration, oracle.group)
        if whole is not None:
            return whole
    own = oracle.excludes(declaration)
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
    """Markdown: one row per oracle and group, one column per variant, and below the reasons of what
    is left out, except that a variant has no such entry point."""
    columns = sorted(declarations, key=lambda declaration: declaration.ref)
    head = ["oracle", "group", *(str(number) for number, _ in enumerate(columns, 1))]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    reasons: dict[tuple[str, str], list[int]] = {}
    for oracle in oracles():
        cells = []
        for number, declaration in enumerate(columns, 1):
            why = reason(declaration, oracle)
            cells.append("x" if why is None else "")
            if why is not None and groups()[oracle.group].entry in declaration.entries:
                reasons.setdefault((_title(oracle), why), []).append(number)
        lines.append(" | ".join([oracle.name, oracle.group, *cells]))
    rows = "\n".join(f"| {line} |" for line in lines)
    names = "\n".join(
        f"{number}. {declaration.ref}" for number, declaration in enumerate(columns, 1)
    )
    left_out = "\n".join(
        f"- {title}, {_numbers(found)}: {why}." for (title, why), found in reasons.items()
    )
    return (
        f"# Which oracle judges which variant\n\nMade by `{derivations.COMMAND}` from the"
        " declarations; [oracles.md](oracles.md) says what each oracle asks. A variant is asked\n"
        "about its own entry points alone, and an oracle may still leave single problems to"
        f" others.\n\n{rows}\n\n{names}\n\n## Left out\n\n{left_out}\n"
    )


def _title(oracle: Oracle) -> str:
    return oracle.name if oracle.group == oracle.name else f"{oracle.name} ({oracle.group})"


def _numbers(found: Sequence[int]) -> str:
    """1-4, 7."""
    parts: list[list[int]] = []
    for number in found:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def list_oracles(write: bool) -> int:
    """Print the oracles: what each catches, and in which group it sits; or `write`
    docs/applicability.md and docs/oracles.md."""
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
