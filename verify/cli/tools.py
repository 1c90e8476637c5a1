"""The commands `verify list`, `oracles`, `probe`, `profile`, `sanitize` and `test`."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import click

from verify.bundle import INSTALLED, ROOT
from verify.campaign.runner import CLEAN, FAILED, RunnerError, say
from verify.cli import options
from verify.cli.options import UsageError, console, existing
from verify.machine.device import workers_for_all
from verify.machine.places import published_parent, report_parent
from verify.machine.starter import JUDGES, Program, launch

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck", "skew")
_NAMED = ("consan", "fpsan")  # only tried if they are named


@click.command(name="list")
@options.kernels
def list_variants(kernels: tuple[Path, ...]) -> int:
    """List the variants, what they support, and whether they can run here."""
    files = existing(kernels)
    from rich.table import Table

    from verify.campaign.targets import excludes_here
    from verify.cell.discovery import roster

    listed = roster(list(files) or None)
    if files and listed.unusable:
        raise UsageError(listed.unusable)
    if listed.lacking:
        raise RunnerError(listed.lacking)
    table = Table("variant", "family", "dtypes", "head dims", "masks", "configs", "here")
    for declaration in listed.declarations:
        support = declaration.support
        dims = f"{min(support.head_dims)}..{max(support.head_dims)}"
        further = len(declaration.further_configs)
        configs = [config.name for config in declaration.configs]
        names = ", ".join([*configs, *([f"and {further} with --all-configs"] if further else [])])
        reason = excludes_here(declaration) or "yes"
        masks = ", ".join(support.masks) + (" and intersections" if support.intersections else "")
        table.add_row(
            declaration.ref,
            declaration.family,
            ", ".join(support.dtypes),
            dims,
            masks,
            names,
            reason,
        )
    console.print(table)
    for failure in listed.failures:
        say(console, f"{failure.ref} does not load: {failure.message}")
    for line in (*listed.needs, *listed.beside):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return FAILED if listed.failures else CLEAN


@click.command()
@click.option(
    "--table",
    "write",
    is_flag=True,
    help=(
        "Write docs/applicability.md (which features and variants each oracle judges) and"
        " docs/oracles.md (what each oracle asks, and why)."
    ),
)
def oracles(write: bool) -> int:
    """List the oracles: the faults that each catches, and its group."""
    from verify.campaign.applicability import list_oracles

    return list_oracles(write)


@click.command()
@options.kernels
@options.out
@options.publish
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(("conformance", "matrix", "functions", "orders", "gradients")),
    help="Run this stage alone, or these; default: all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, not as tables.")
def probe(
    kernels: tuple[Path, ...],
    directory: Path | None,
    publish: bool,
    only: tuple[str, ...],
    as_json: bool,
) -> int:
    """Measure the device: matrix units, approximations, the order in which KERNELS (by default the
    collection) add P V, and whether their backwards keep the orders that they declare.

    Writes .verify/report/<device>/probes.{json,md}; --publish also writes them to
    reports/<device>/. Exits 1 if a result disagrees with the tables that the bounds use, or with a
    declared order.
    """
    from verify.cli.probe import Request
    from verify.cli.probe import probe as run_probes
    from verify.machine import device

    files = existing(kernels)
    if publish and kernels:
        raise UsageError("--publish: publishes the collection's probes; name no KERNELS")
    if publish and only:
        raise UsageError("--publish: publishes all probes; name no stage with --only")
    folder = report_parent(directory, publish) / device.slug()
    published = published_parent(directory) / device.slug() if publish else None
    return run_probes(Request(files, folder, published, only), as_json)


@click.command()
@options.kernels
@click.option(
    "--tool",
    "tools",
    multiple=True,
    type=click.Choice((*_TOOLS, *_NAMED)),
    default=_TOOLS,
    show_default=True,
    help="Only this tool; repeat it for several.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    help="Only this variant; it can be a library's kernel.",
)
@click.option("--case", metavar="ID", help="Only this case; failing verdicts print its id.")
@click.option(
    "--quick",
    "extent",
    flag_value="quick",
    help="One dtype of each variant, one config for each set of options, at most four problems.",
)
@click.option(
    "--planted-only",
    "extent",
    flag_value="planted",
    help="Only planted faults: whether each tool catches its own. No kernel is tried.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Try each planted fault so many times; the report says in how many runs it was caught.",
)
@click.option(
    "--add",
    "earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="The sanitizer.json of an earlier run, whose counts of planted faults are added, and which"
    " is shown too if its tools, or their versions, are others.",
)
@click.option(
    "--render",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Run nothing: write that sanitizer.json, with those of --add, and its pages again, to"
    " --report-dir.",
)
@click.option(
    "--require", is_flag=True, help="Exit 3 without a CUDA device or without compute-sanitizer."
)
@click.option(
    "--report-dir",
    type=click.Path(path_type=Path),
    help="A second folder for sanitizer.{json,sarif,junit.xml,md}.",
)
@click.option(
    "--time",
    "seconds",
    type=float,
    callback=options.above_zero_or_none,
    metavar="SECONDS",
    help="End the run after so long; what was not tried is listed as not run, and the exit code is"
    " 3.",
)
@options.workers
def sanitize(
    kernels: tuple[Path, ...],
    tools: tuple[str, ...],
    variants: tuple[str, ...],
    case: str | None,
    extent: str | None,
    seconds: float | None,
    render: Path | None,
    **choices: Any,
) -> int:
    """Run KERNELS (by default the collection) under compute-sanitizer, after planted faults.

    The tool "skew" is the suite's own: delays at barriers, which must change no bit. "consan" and
    "fpsan" are Triton's sanitizers of concurrency and of algebra; they are tried if they are named.
    Without a CUDA
    device or without compute-sanitizer nothing is run: it says so, and exits 0, or 3 with
    --require. Exits 1 if a kernel is faulty, and 3 if the run proves nothing.
    """
    files = existing(kernels)
    options.case_shaped(case)
    if render is not None:
        if kernels or choices["report_dir"] is None:
            raise UsageError("--render: needs --report-dir, and runs no KERNELS")
        from verify.cli.sanitizer_pages import render_again

        return render_again(render, choices["earlier"], choices["report_dir"], console)
    from verify.cli.sanitize import sanitize as run_sanitizers
    from verify.cli.sanitize_choice import Request
    from verify.problem.case import Case

    try:
        parsed = Case.parse(case) if case is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    request = Request(
        kernels=files,
        tools=tools,
        variants=variants,
        case=parsed,
        quick=extent == "quick",
        planted_only=extent == "planted",
        time=math.inf if seconds is None else seconds,
        **choices,
    )
    return run_sanitizers(request, console)


def _shape(
    context: click.Context, parameter: click.Parameter, text: str
) -> tuple[int, int, int, int]:
    if not re.fullmatch(r"\d+,\d+,\d+,\d+", text, re.ASCII):
        raise UsageError(f"--shape: {text!r} is not BATCH,HEADS,SEQLEN,HEAD_DIM")
    batch, heads, seqlen, head_dim = map(int, text.split(","))
    return batch, heads, seqlen, head_dim


@click.command()
@click.argument("variants", metavar="VARIANT...", nargs=-1, required=True)
@click.option("--config", default="", metavar="NAME", help="Default: a variant's first config.")
@click.option(
    "--shape",
    default="1,8,8192,64",
    show_default=True,
    callback=_shape,
    metavar="B,H,N,D",
    help="Batch, heads, sequence length and head dim of Q, K and V.",
)
@click.option("--dtype", default="", help="Default: the first dtype that the variant supports.")
@click.option("--mask", default="full", show_default=True, help="A mask's name, such as causal.")
@options.out
@options.publish
def profile(
    variants: tuple[str, ...],
    config: str,
    shape: tuple[int, int, int, int],
    dtype: str,
    mask: str,
    directory: Path | None,
    publish: bool,
) -> int:
    """Run one config of each VARIANT under ncu: what its hardware counters say of its speed.

    Prints a table and adds to .verify/report/<device>/profiles.json, a section of the report there,
    with ncu's own reports beside it. VARIANT can be FILE@NAME. Exits 3 without a GPU or without
    ncu.
    """
    from verify.cli.profile import Request, run
    from verify.machine import device

    slug = device.slug()
    request = Request(
        variants=variants,
        config=config,
        shape=shape,
        dtype=dtype,
        mask=mask,
        folder=report_parent(directory, publish) / slug,
        published=published_parent(directory) / slug if publish else None,
    )
    return run(request, console)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test(arguments: tuple[str, ...]) -> int:
    """Run the complete test suite, several tests at a time; further arguments go to pytest.

    `pytest --help` lists them.
    """
    if INSTALLED:
        raise UsageError(
            "test: an installed wheel has no test suite; run this command in a checkout or an"
            " unpacked sdist"
        )
    session = Program(
        module="verify.campaign.session",
        arguments=["-n", workers_for_all(), "--dist", "worksteal", *arguments],
        environment=os.environ,
        given=0,
        output=1,
        errors=2,
        directory=str(ROOT),
        leashed=True,
    )
    return launch(JUDGES, session).wait()
