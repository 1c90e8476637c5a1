"""What `verify bench kernels` times: configs with passing verdicts, on the workloads that they
support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verify.campaign.judged import Judged
from verify.campaign.targets import excludes_here
from verify.problem import Problem
from verify.timing.record import Benchmark, Left, RecordError, read
from verify.timing.session import CALLS, Candidate
from verify.timing.workloads import Suite, Workload
from verify.variant import Config, Declaration

_PREFERRED = ("float16", "bfloat16")
_REFERENCES = ("torch-flash", "torch-cudnn", "torch-efficient", "torch-math")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of `verify bench kernels`.

    kernels: files (none: the collection).
    suite, named: the workloads, and what they are called.
    folder: of the device's report, which gets bench.json; published: a second one.
    expression: as pytest -k, over "variant-config-dtype".
    dtype: of the inputs; None: float16, or what the variant has.
    total: seconds for all rows; None: the suite's.
    only_best: of each variant and workload only the fastest config.
    resume: keep the rows that the folder's bench.json timed of the same sources.
    """

    kernels: tuple[Path, ...]
    suite: Suite
    named: str
    folder: Path
    published: Path | None = None
    expression: str = ""
    dtype: str | None = None
    calls: int = CALLS
    total: float | None = None
    lock_mhz: int | None = None
    only_best: bool = False
    resume: bool = False


def last_record(request: Request) -> Benchmark | None:
    """The record in the request's folder, or None.  Raises RecordError where resume needs one."""
    try:
        return read(request.folder)
    except RecordError:
        if request.resume:
            raise
        return None


def select(
    request: Request,
    declarations: Sequence[Declaration],
    known: Judged,
) -> tuple[list[Candidate], list[Left]]:
    """What is timed, in the order in which it matters, and what is not and why.

    Workload by workload come torch's references, and of every other variant its first config; then,
    workload by workload, all other configs.
    """
    ranked: list[tuple[tuple[bool, int, int, int], Candidate]] = []
    left: list[Left] = []
    for declaration in declarations:
        dtype, reason = _dtype(request, declaration)
        if reason:
            left.append(_left(declaration, reason))
            continue
        workloads = list(_workloads(request, declaration, dtype))
        if not workloads:
            left.append(_left(declaration, "supports no workload of the suite", dtype=dtype))
            continue
        configs = []
        for config in _selected(request.expression, declaration, dtype, known):
            refused = known.refusal(declaration, config, dtype)
            if refused is None:
                configs.append(config)
            else:
                left.append(_left(declaration, refused, config.name, dtype))
        place = request.suite.workloads.index
        for workload, problem in workloads:
            for rank, config in enumerate(configs):
                key = rank > 0, place(workload), _reference(declaration.ref), rank
                ranked.append((key, Candidate(declaration, config, dtype, workload, problem)))
    return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])], left


def _reference(ref: str) -> int:
    """The place of a variant among torch's references, which all others follow."""
    name = ref.removesuffix("-backward")
    return _REFERENCES.index(name) if name in _REFERENCES else len(_REFERENCES)


def _dtype(request: Request, declaration: Declaration) -> tuple[str, str]:
    """The dtype of the inputs, and why the variant is not timed, or ""."""
    named, offered = request.suite.torch_variants, declaration.support.dtypes
    absent = excludes_here(declaration)
    if absent:
        return "", absent
    if declaration.interpreted:
        return "", "runs in Triton's interpreter here, whose time says nothing of the kernel"
    if named is not None and declaration.family == "torch" and declaration.ref not in named:
        return "", f"not in the suite {request.named}"
    if request.dtype is not None:
        taken = request.dtype in offered
        return request.dtype, "" if taken else f"does not take {request.dtype}"
    return next((dtype for dtype in _PREFERRED if dtype in offered), offered[0]), ""


def _workloads(
    request: Request, declaration: Declaration, dtype: str
) -> Iterator[tuple[Workload, Problem]]:
    for workload in request.suite.workloads:
        problem = workload.problem_for(declaration, dtype)
        if not isinstance(problem, str):
            yield workload, problem


def _selected(expression: str, declaration: Declaration, dtype: str, known: Judged) -> list[Config]:
    """The configs whose id an expression of pytest's -k matches, and of further ones those that
    pass."""
    passing = (
        name
        for name in declaration.further_configs
        if (declaration.ref, name, dtype) in known.passing
    )
    configs = [*declaration.configs, *map(Config.parse, passing)]
    if not expression:
        return configs
    from _pytest.mark.expression import Expression

    def selected(config: Config) -> bool:
        identity = f"{declaration.ref}-{config.name}-{dtype}".lower()

        def holds(name: str, /, **_: object) -> bool:
            return name.lower() in identity

        return Expression.compile(expression).evaluate(holds)

    return [config for config in configs if selected(config)]


def _left(declaration: Declaration, reason: str, config: str = "", dtype: str = "") -> Left:
    return {"variant": declaration.ref, "config": config, "dtype": dtype, "reason": reason}
