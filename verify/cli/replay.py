"""`verify replay`: judge one case again."""

from __future__ import annotations

from pathlib import Path

import click

from verify.cli import options
from verify.cli.options import UsageError, console


@click.command()
@click.argument("case")
@options.oracles
@options.with_files
def replay(case: str, oracles: tuple[Path, ...]) -> int:
    """Judge one CASE again, by the id that a failing verdict prints: first alone, then after the
    cases that ran before it.

    Ends with FAILED (exit code 1), FIXED or HOLDS (0), or NOT REPRODUCED (3): it failed on record,
    and nothing has changed.
    """
    options.case_shaped(case)
    from verify.cli.replay_case import replay as replay_case
    from verify.oracles import use_files
    from verify.problem.case import Case
    from verify.problem.inputs import check_distribution

    options.load_kinds()
    try:
        use_files(oracles)
        parsed = Case.parse(case)
        check_distribution(parsed.problem)
        return replay_case(parsed, console)
    except ValueError as error:
        raise UsageError(str(error)) from None
