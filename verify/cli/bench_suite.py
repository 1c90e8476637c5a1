"""`verify bench suite`: measures the suite itself: builds, judged cases per second, the time of
their steps, the fp64 reference's rate, and what bounds and a long sequence cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from references.attention import forward
from references.definition import Attention
from references.masks import Causal, Full, Lengths, Window
from verify.campaign.gpus.placement import place_workers
from verify.campaign.runner import RunRequest, evidence_of, execute
from verify.campaign.targets import excludes_here
from verify.cell.arena import Arena
from verify.cell.discovery import environment, roster
from verify.cell.process import Cell, ForkServer
from verify.cli import bench_judge
from verify.evidence import Evidence
from verify.judging.trial import Trial
from verify.problem import Layout, Problem
from verify.variant import Config, Declaration

HEAD_DIM = 128  # of the reference that is timed
_MASKS = (Full(), Causal(), Window(16, 0), Lengths((20,), (20,)))


def bench_suite(console: Console, seconds: float, workers: str, select: str = "") -> int:
    """Measure and print builds, the judge on fixed problems, and a campaign of `seconds`.

    select: limits the campaign's targets, like pytest -k.  Returns an exit code.
    """
    variants = [
        declaration for declaration in roster().declarations if excludes_here(declaration) is None
    ]
    count = place_workers()
    _print_reference(console)
    for line in bench_judge.lines(variants):
        console.print(line, highlight=False)
    if environment().device == "cuda":
        _print_builds(console, variants, count)
    request = RunRequest(
        profile="gpu" if environment().device == "cuda" else "dev", workers=workers, select=select
    )
    status = execute(request, console, time.monotonic() + seconds)
    evidence = evidence_of(request)
    if evidence is not None and evidence.verdicts:
        console.print(breakdown(evidence))
    return status


def builds(declaration: Declaration) -> Iterator[tuple[Config, Problem]]:
    """(config, small problem) for every build of a variant: each config, dtype, head-dim bucket,
    mask kind and alignment."""
    for config in declaration.configs:
        for dtype in declaration.support.dtypes:
            for bucket in declaration.head_dim_buckets:
                for mask in _MASKS:
                    problem = Problem(
                        seqlen_q=20, seqlen_kv=20, head_dim=bucket, dtype=dtype, mask=mask
                    )
                    yield config, problem
                    yield config, problem.but(layout_q=Layout(pitch=1))  # not aligned


def warm(declaration: Declaration, count: int) -> tuple[int, float]:
    """Compile all builds of a variant in `count` parallel cells; returns (builds, seconds)."""
    fork_server = ForkServer(environment())
    probe = Cell(fork_server)
    arch = probe.arch()
    probe.close()
    benches: SimpleQueue[tuple[Cell, Arena]] = SimpleQueue()
    pairs = [(Cell(fork_server), Arena()) for _ in range(count)]
    for cell, _ in pairs:
        cell.load(
            declaration.path
        )  # one after the other: a fork server serves one caller at a time
    for pair in pairs:
        benches.put(pair)

    def build(item: tuple[Config, Problem]) -> str:
        cell, arena = benches.get()
        try:
            return Trial(
                declaration, item[0], item[1], cell, arena, arch, entry=declaration.entries[0]
            ).first.reply.status
        finally:
            benches.put((cell, arena))

    items = list(builds(declaration))
    begun = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        statuses = list(pool.map(build, items))
    elapsed = time.perf_counter() - begun
    for cell, arena in pairs:
        cell.close()
        arena.close()
    fork_server.close()
    return statuses.count("ok"), elapsed


def _print_builds(console: Console, variants: list[Declaration], count: int) -> None:
    table = Table("variant", "builds", "seconds", f"workers ({count})", title="builds, cold cache")
    for declaration in variants:
        if declaration.head_dim_buckets:
            built, elapsed = warm(declaration, count)
            table.add_row(declaration.ref, str(built), f"{elapsed:.1f}", str(count))
    console.print(table)


def breakdown(evidence: Evidence) -> Table:
    """A table of each variant's mean milliseconds per step; its title gives the judged cases per
    second between the first and the last verdict."""
    steps = ("generate", "run", "reference", "bound", "record")
    cases: dict[str, tuple[str, dict[str, float]]] = {}
    for judged in evidence.verdicts.counted.tables:
        for row, case in enumerate(judged.cases):
            before = cases.get(case, ("", {}))[1]
            seconds = judged.seconds(row)
            cases[case] = (
                judged.shape.variant,
                {step: max(before.get(step, 0), seconds.get(step, 0)) for step in steps},
            )
    times = [
        judged.time(row) for judged in evidence.verdicts.tables for row in range(len(judged.cases))
    ]
    span = max(times) - min(times) or 1.0
    title = f"{len(cases)} judged cases in {span:.1f} s: {len(cases) / span:.0f} cases/s"
    table = Table("variant", "cases", *(f"{step} (ms)" for step in steps), title=title)
    for variant in sorted({name for name, _ in cases.values()}):
        of_variant = [seconds for name, seconds in cases.values() if name == variant]
        means = (
            1e3 * sum(seconds[step] for seconds in of_variant) / len(of_variant) for step in steps
        )
        table.add_row(variant, str(len(of_variant)), *(f"{mean:.2f}" for mean in means))
    return table


def _print_reference(console: Console) -> None:
    """Print the rate of the reference's matrix products, and its share of the device's fp64
    rate."""
    cuda = torch.cuda.is_available()
    device, seqlen, side = ("cuda", 32768, 8192) if cuda else ("cpu", 2048, 1024)
    rate_product, rate = product_rate(side, device), reference_rate(seqlen, device)
    console.print(
        f"fp64 reference, seqlen {seqlen}, head_dim {HEAD_DIM}: {rate:.3f} TFLOP/s,"
        f" {100 * rate / rate_product:.0f} % of this device's fp64 product"
        f" ({rate_product:.3f} TFLOP/s)",
        highlight=False,
    )


def product_rate(side: int, device: str) -> float:
    """TFLOP/s of an fp64 product of two square matrices."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.float64) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: a @ b) / 1e12


def reference_rate(
    seqlen: int, device: str, block_q: int | None = None, block_kv: int | None = None
) -> float:
    """TFLOP/s of the matrix products of the fp64 reference; block_q, block_kv: its tiles, by
    default its own choice."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, seqlen, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    attention = Attention(Full(), HEAD_DIM**-0.5)
    taken = _seconds(lambda: forward(q, k, v, attention, block_q=block_q, block_kv=block_kv))
    return 4 * seqlen**2 * HEAD_DIM / taken / 1e12


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    def once() -> float:
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    once()
    return median(once() for _ in range(repeats))
