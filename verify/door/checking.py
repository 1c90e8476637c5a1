"""`verify.check`: a campaign of one function, as an assertion."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from references.masks import mask_words
from verify.adapters import adapter_named, signature
from verify.campaign.runner import CLEAN, FAILED, RunnerError, RunRequest, evidence_of, execute
from verify.cell.layout_twins import LAYOUTS
from verify.door.stand_in import stand_in
from verify.evidence import Evidence, Verdicts
from verify.evidence.errors import read as errors_of
from verify.evidence.explanation import explain, smallest
from verify.evidence.known_failures import xfails_in
from verify.machine import device
from verify.machine.cores import of_its_pytest
from verify.machine.defaults import Defaults, defaults
from verify.variant.checks import Check, flag, one_of, some_of, wholes
from verify.variant.validation import INPUT_DTYPES, MOST_HEAD_DIM, within

EXAMPLES = 10  # per dtype and group of oracles, if nothing is said
_FAILURES = 4  # kinds of failures that the message tells in full
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Report:
    """What a check that held has judged.

    run: the id of its evidence, below .verify/runs.  kernel: the file that was judged.  cases:
    number of judged problems.  dtypes: those with a judged case.  gradients: in words, whether they
    were judged.
    """

    run: str
    kernel: Path
    cases: int
    dtypes: tuple[str, ...]
    gradients: str

    def __str__(self) -> str:
        judged = f"{self.cases} cases in {', '.join(self.dtypes)}"
        return f"{self.kernel.name} holds: {judged}; gradients: {self.gradients} (run {self.run})"


@dataclass(frozen=True)
class Choices:
    """The arguments of `verify.check`, beside the function."""

    layout: str | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    masks: tuple[str, ...] | None = None
    grad: bool = True
    like: str | None = None
    within: Mapping[str, Any] | None = None
    examples: int | None = None
    time: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        legal: dict[str, Check] = {
            "layout": one_of(None, *LAYOUTS),
            "dtypes": _optional(some_of(*INPUT_DTYPES, least=1)),
            "head_dims": _optional(wholes(1, MOST_HEAD_DIM)),
            "masks": _optional(some_of(*mask_words(), least=1)),
            "grad": flag,
            "like": _optional(signature),
            "within": _optional(within),
        }
        for name, rule in legal.items():
            try:
                rule(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if self.like is not None and self.layout not in (None, *adapter_named(self.like).layouts):
            raise ValueError(f"layout: like={self.like!r} says it")
        if self.examples is not None and (
            isinstance(self.examples, bool) or not isinstance(self.examples, int)
        ):
            raise ValueError(f"examples: {self.examples!r} is no whole number")
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"examples: {self.examples} is not a number of problems above 0")
        if self.time is not None and (
            isinstance(self.time, bool) or not isinstance(self.time, int | float)
        ):
            raise ValueError(f"time: {self.time!r} is no number of seconds")
        if self.time is not None and not 0 < self.time < float("inf"):
            raise ValueError(f"time: {self.time:g} is not a number of seconds above 0")

    @property
    def settings(self) -> dict[str, Any]:
        """Those that a kernel file has by the same names in capitals."""
        given = {
            "LAYOUT": self.layout,
            "DTYPES": self.dtypes,
            "HEAD_DIMS": self.head_dims,
            "MASKS": self.masks,
            "LIKE": self.like,
            "WITHIN": None if self.within is None else dict(self.within),
        }
        return {name: value for name, value in given.items() if value is not None}


def _optional(rule: Check) -> Check:
    return lambda value: None if value is None else rule(value)


def check(kernel: Callable[..., Any] | str | Path, choices: Choices) -> Report:
    """Judge a function or a kernel file; see `verify.check`."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("verify.check: call it in the main thread, which gets the signals")
    if isinstance(kernel, str | Path):
        settings = {**choices.settings, **({} if choices.grad else {"GRADIENTS": False})}
        if settings:
            said = ", ".join(settings)
            raise ValueError(f"verify.check: write {said} into the file {kernel}")
        file = Path(kernel)
    else:
        file = stand_in(kernel, {**choices.settings, "GRADIENTS": choices.grad})
    table = defaults()
    request = request_of(file, table, examples=choices.examples, seed=choices.seed)
    seconds = _first(choices.time, table.time)
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        status, printed = campaign(request, deadline)
    except RunnerError as error:
        raise RuntimeError(f"verify.check: {error}") from None
    return _concluded(request, status, file, printed)


def request_of(
    file: Path,
    table: Defaults,
    *,
    examples: int | None = None,
    seed: int | None = None,
    select: str = "",
) -> RunRequest:
    """A campaign on one file from inside somebody's pytest.  table: what holds where an argument is
    None."""
    within_xdist = "PYTEST_XDIST_WORKER" in os.environ  # the cores have their workers already
    return RunRequest(
        kernels=(file,),
        examples=_first(examples, table.examples, EXAMPLES),
        profile=table.profile,
        seed=_first(seed, table.seed),
        workers="0" if within_xdist else table.workers or "auto",
        quiet=True,
        select=select,
    )


def _first(*values: Any) -> Any:
    """The first one that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)


def campaign(request: RunRequest, deadline: float | None) -> tuple[int, str]:
    """Run a campaign from inside somebody's pytest: its exit code, and what it printed.

    deadline: as in `execute`, which says what is raised.
    """
    printed = io.StringIO()
    with _without_pytest():
        status = execute(request, Console(file=printed, width=100), deadline)
    return status, printed.getvalue().strip()


@contextlib.contextmanager
def _without_pytest() -> Iterator[None]:
    """Hide the variables of a surrounding pytest from the campaign's own.  The campaigns of
    different workers of pytest-xdist get different GPUs, and each its share of the cores."""
    mask = device.gpus_for(os.environ.get("PYTEST_XDIST_WORKER", ""))
    changed = [name for name in os.environ if of_its_pytest(name)]
    changed += [] if mask is None else [_GPUS]
    before = {name: os.environ.pop(name) for name in changed if name in os.environ}
    if mask is not None:
        os.environ[_GPUS] = mask
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(before)


def _concluded(request: RunRequest, status: int, file: Path, printed: str) -> Report:
    """The report of a campaign that has ended.  Raises AssertionError, RuntimeError."""
    evidence = evidence_of(request)
    verdicts = Verdicts() if evidence is None else evidence.verdicts
    if evidence is not None and status == FAILED:
        failures = smallest(xfails_in(evidence).unexpected(verdicts))
        more = len(failures) - _FAILURES
        told = [explain(verdict) for verdict in failures[:_FAILURES]]
        told += [f"... and {more} more kinds of failures"] if more > 0 else []
        raise AssertionError("\n\n".join(told))
    counted = verdicts.counted
    if status != CLEAN or not counted:
        reasons = [error.message for error in errors_of(request.directory)] or [printed]
        raise RuntimeError(f"verify.check: nothing is known of {file}: {'; '.join(reasons)}")
    return Report(
        run=request.run_id,
        kernel=file,
        cases=len(counted.cases),
        dtypes=tuple(sorted({table.shape.dtype for table in counted.tables})),
        gradients=_gradients(evidence, counted),
    )


def _gradients(evidence: Evidence | None, counted: Verdicts) -> str:
    """In words, in which dtypes gradients were judged, and why not in the others."""
    by_gradient = counted.where(
        lambda shape, said: not {"r_dq", "r_dk", "r_dv"}.isdisjoint(said.measures)
    )
    judged = sorted({table.shape.dtype for table in by_gradient.tables})
    others = sorted({table.shape.dtype for table in counted.tables} - set(judged))
    if judged:
        whys = {} if evidence is None else {each.dtype: each.reason for each in evidence.not_run}
        told = [f"{name} ({whys[name]})" if name in whys else name for name in others]
        return f"judged in {', '.join(judged)}" + (f", not in {', '.join(told)}" if told else "")
    reasons = [] if evidence is None else [each.reason for each in evidence.not_run]
    return f"not judged ({'; '.join(dict.fromkeys(reasons)) or 'no declared backward'})"
