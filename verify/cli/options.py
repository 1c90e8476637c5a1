"""Options, arguments, usage errors and the terminal of all commands.  Imports nothing heavy."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from verify.bundle import ROOT
from verify.campaign.runner import USAGE
from verify.evidence import is_plain, new_run_id
from verify.machine.defaults import PROFILES
from verify.machine.settings import KIND_FILES

_MOST_NAMED = 8  # folders in a usage error
console = Console(width=None if sys.stdout.isatty() else 140)  # a log file needs no narrow table


class UsageError(click.ClickException):
    """An illegal argument or option."""

    exit_code = USAGE


def above_zero(context: click.Context, parameter: click.Parameter, seconds: float) -> float:
    """Check that a time in seconds is positive and finite.  Raises UsageError."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"{parameter.opts[0]}: {seconds:g} is not a number of seconds above 0")
    return seconds


def above_zero_or_none(
    context: click.Context, parameter: click.Parameter, seconds: float | None
) -> float | None:
    """`above_zero` of an option that can be left out."""
    return None if seconds is None else above_zero(context, parameter, seconds)


def _run_named(context: click.Context, parameter: click.Parameter, name: str | None) -> str:
    if name is None:
        return new_run_id()
    if not is_plain(name):
        raise UsageError(
            f"--run-id: {name!r} is not a plain name (letters, digits, _ . and -; the first one"
            " not . or -)"
        )
    return name


def _processes(context: click.Context, parameter: click.Parameter, count: str) -> str:
    if count != "auto" and not re.fullmatch(r"\d{1,4}", count, re.ASCII):
        raise UsageError(
            f"--workers: {count!r} is neither auto nor a number of processes (0: this one only)"
        )
    return count


def _shard(context: click.Context, parameter: click.Parameter, text: str) -> str:
    number, _, count = text.partition("/")
    legal = all(re.fullmatch(r"[1-9]\d{0,5}", each, re.ASCII) for each in (number, count))
    if text and not (legal and int(number) <= int(count)):
        raise UsageError(f"--shard: {text!r} is not I/N with 1 <= I <= N, such as 2/8")
    return text


def _expression(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """Check a -k expression with pytest's compiler now, and not after a minute of set-up.  Raises
    UsageError."""
    if not text:
        return text
    from _pytest.mark import expression

    try:
        expression.Expression.compile(text)
    except (SyntaxError, getattr(expression, "ParseError", SyntaxError)) as error:
        reason = getattr(error, "msg", None) or error
        raise UsageError(
            f"-k: {text!r} is not an expression of names, and, or, not and ( ): {reason}"
        ) from None
    return text


def _oracle(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str | Path, ...]:
    """Names as they are, and files as paths.  Raises UsageError for a file that does not exist."""
    found: list[str | Path] = []
    for text in given:
        path = Path(text)
        if text.isidentifier() and not path.is_file():
            found.append(text)
        elif path.is_file():
            found.append(path)
        else:
            raise UsageError(f"--oracle: {text!r} is no file, and no name of `verify oracles`")
    return tuple(found)


def _with(context: click.Context, _: click.Parameter, files: tuple[Path, ...]) -> None:
    """Name the files in the variable that every process of the command reads."""
    if files:
        before = os.environ.get(KIND_FILES)
        os.environ[KIND_FILES] = os.pathsep.join(str(file.resolve()) for file in files)
        context.call_on_close(lambda: _restore(before))


def _restore(before: str | None) -> None:
    os.environ.pop(KIND_FILES)
    if before is not None:
        os.environ[KIND_FILES] = before


def load_kinds() -> None:
    """Load the files of --with in this process.  Raises UsageError."""
    from verify.machine.outside_file import OutsideFileError
    from verify.problem import kind_files

    try:
        kind_files.load()
    except OutsideFileError as error:
        raise UsageError(f"--with: {error}") from None


INPUT_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
"""Those of verify.variant.validation, which imports too much."""
EXISTING = click.Path(path_type=Path, exists=True)  # seen before slow imports
kernels = click.argument("kernels", nargs=-1, type=click.Path(path_type=Path))
oracles = click.option(
    "--oracle",
    "oracles",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Ask the oracles of this file, too.",
)
oracles_and_names = click.option(
    "--oracle",
    "oracles",
    multiple=True,
    metavar="NAME|FILE",
    callback=_oracle,
    help="Ask this oracle alone (repeat it for several), or the oracles of this file, too.",
)
only_dtypes = click.option(
    "--dtype",
    "only_dtypes",
    multiple=True,
    type=click.Choice(INPUT_DTYPES),
    help="Judge this dtype alone; repeat it for several.",
)
time = click.option(
    "--max-time",
    "seconds",
    type=float,
    callback=above_zero_or_none,
    help="Seconds after which no case begins.",
)
with_files = click.option(
    "--with",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    expose_value=False,
    callback=_with,
    help="Use the masks, score mods, storages and quantisations of this file, too.",
)
examples = click.option(
    "--examples",
    type=click.IntRange(min=1),
    help="Problems per variant, config, dtype and group of oracles.",
)
all_configs = click.option(
    "--all-configs",
    is_flag=True,
    help="Judge every config that a variant can have, not only those that it lists.",
)
workers = click.option(
    "--workers",
    "-n",
    default="auto",
    show_default=True,
    callback=_processes,
    help="Processes: auto, or a number; 0 for none.",
)
profile = click.option(
    "--profile",
    type=click.Choice(PROFILES),
    help="How many cases, how random; default: gpu with a GPU, ci if CI is set, else dev.",
)
select = click.option(
    "-k",
    "select",
    default="",
    metavar="EXPRESSION",
    callback=_expression,
    help="Only targets whose id matches, as pytest -k.",
)
seed = click.option("--seed", type=click.IntRange(min=0), help="Seed of the random search.")
run_id = click.option(
    "--run-id", callback=_run_named, help="Name the run, or continue the run of that name."
)
shard = click.option(
    "--shard",
    default="",
    metavar="I/N",
    callback=_shard,
    help="Judge the I-th of N parts; verify report --run A --run B joins them.",
)
exit_first = click.option(
    "--exitfirst", "-x", "exit_first", is_flag=True, help="Stop at the first failing verdict."
)
out = click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path),
    help="Parent of the report's folder; default: .verify/report, with --publish: reports.",
)
publish = click.option("--publish", is_flag=True, help="Also write it to reports/<device>/.")
strict = click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 where a variant is lenient, narrow or unexplained.",
)


def exports(command: Callable[..., Any]) -> Callable[..., Any]:
    """--junit, --sarif and --summary."""
    for name, what in (
        ("summary", "Append a summary below 60 kB, in Markdown, for a pull request, to this file."),
        ("sarif", "Write the failing cases to this file, as SARIF 2.1.0."),
        ("junit", "Write the verdicts to this file, as JUnit XML."),
    ):
        command = click.option(
            f"--{name}", type=click.Path(dir_okay=False, path_type=Path), help=what
        )(command)
    return command


def existing(kernels: tuple[Path, ...]) -> tuple[Path, ...]:
    """The kernel files: of a directory its `*.py` files, as a shell names them.  Raises UsageError
    for a file that does not exist, and for a directory without such files."""
    files: list[Path] = []
    for path in kernels:
        named = _python_files(path) if path.is_dir() else [path]
        for file in named:
            if not file.is_file():
                raise UsageError(f"no such kernel file: {file}")
        files += [file for file in named if file is path or file not in files]
    return tuple(files)


def _python_files(folder: Path) -> list[Path]:
    """What a shell's `folder/*.py` names, apart from folders.  Raises UsageError if that is nothing
    but a package's __init__.py, and for the collection's folder."""
    if folder.resolve() == ROOT / "kernels":
        raise UsageError(f"{folder}: the collection: name a folder in it, or none to have it all")
    found = sorted(path for path in folder.glob("[!.]*.py") if not path.is_dir())
    if all(path.name == "__init__.py" for path in found):
        within = sorted({path.parent.name for path in folder.glob("[!.]*/*.py")})
        named = ", ".join(within[:_MOST_NAMED]) + ", ..." * (len(within) > _MOST_NAMED)
        advice = f"; name one of the folders in it ({named})" if within else ""
        raise UsageError(f"{folder}: this folder holds no kernel files{advice}")
    return found


def case_shaped(case: str | None) -> None:
    """Raise UsageError for a text that is clearly not a case id, before slow imports."""
    if case is not None and case.count(":") < 3:
        raise UsageError(f"{case!r} is not a case id (variant:config:group:problem)")
