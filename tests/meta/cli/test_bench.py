"""`verify bench kernels` for real, on the CPU with small shapes and few calls."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_bench import record, row
from tests.harness.fake_campaign import entry, evidence, verdict
from tests.harness.shared_fork_server import SharedForkServer
from verify import cli
from verify.campaign.judged import Judged, judged
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, Cell, Reply
from verify.cli import bench_kernels
from verify.cli.bench_selection import Request, select
from verify.evidence import RunInfo
from verify.evidence.store import Recorder
from verify.machine import device
from verify.probes.worker import Answer, Job
from verify.report import build, write
from verify.timing.record import read, shape_of
from verify.timing.session import TRIAL
from verify.timing.trials import ordered
from verify.timing.workloads import SUITES, Suite, of_shapes
from verify.variant import Declaration

pytestmark = pytest.mark.for_ci

KERNEL = """
from dataclasses import replace

import torch

from verify.variant import Config, Numerics, Softmax, Support, Variant


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    if args.config.name == "m32":
        {slow}
    scores = (args.q.float() @ args.k.float().mT) * args.softmax_scale
    if args.mask.name != "full":
        rows = torch.arange(args.seqlen_q)
        scores = scores.masked_fill(rows[:, None] < rows[None, :], float("-inf"))
    out.copy_(scores.softmax(-1) @ args.v.float())
    lse.copy_(scores.logsumexp(-1))
    {after}


SUPPORT = Support(dtypes=("float32", "float16"), head_dims=(8,), masks=("full", "causal"))
VARIANT = Variant(
    name="{name}",
    family="mine",
    forward=forward,
    support=SUPPORT,
    numerics=Numerics(softmax=Softmax(block_n=None)),
    configs=(Config(block_m=16), Config(block_m=32), Config(block_m=64)),
)
"""
FEW = ("--shapes", "1,2,32,8", "--calls", "4")


def in_place(jobs: Sequence[Job[Any]], processes: int, patience: float) -> Iterator[Answer[Any]]:
    """The answers of `verify.probes.worker.do_all`, without a process: test_probes tests it."""
    for job in jobs:
        yield Answer(job.function(*job.arguments))


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("verify.cli.bench_kernels.do_all", in_place)
    monkeypatch.setattr("verify.cli.bench_kernels.ForkServer", SharedForkServer)
    monkeypatch.setattr("verify.cli.bench_kernels.environment", lambda: PLAIN_CPU)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def command(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["verify", "bench", "kernels", *map(str, words)])
        return cli.main()

    return command


def kernel(name: str, slow: str = "pass", after: str = "pass") -> Path:
    path = Path(f"{name}.py").absolute()
    path.write_text(KERNEL.format(name=name, slow=slow, after=after), encoding="utf-8")
    return path


def judge(*paths: Path, configs: Sequence[str] = ("m16", "m32")) -> None:
    """Put passing verdicts of these files on record, as a campaign does."""
    with Recorder(Path(".verify/runs/planted"), "main") as recorder:
        here = device.fingerprint()
        recorder.write(RunInfo(run="planted", started="2025", profile="dev", device=here))
        for one in roster(list(paths)).declarations:
            recorder.write(entry(one.ref, source_hash=one.source_hash))
            for config in configs:
                case = f"{one.ref}:{config}:accuracy:x"
                recorder.write(verdict(one.ref, "float16", 1, config=config, case=case))


def raise_at(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, calls: int, after: int = 0
) -> None:
    """Raise it, or be sent SIGTERM, when a kernel is to be timed by that many calls, after so many
    of these: 1 where it compiles, TRIAL.calls in a trial, 4 in a row of FEW."""
    met, time = [], Cell.time

    def raising(cell: Cell, path: str, request: dict[str, Any]) -> Reply:
        if request["timing"]["calls"] == calls:
            met.append(request)
            if len(met) > after:
                if error is not None:
                    raise error
                signal.raise_signal(signal.SIGTERM)
        return time(cell, path, request)

    monkeypatch.setattr(Cell, "time", raising)


def folder() -> Path:
    return Path(".verify/report") / device.slug()


def test_configs_with_passing_verdicts_are_timed(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = kernel("one", slow="import time; time.sleep(0.02)"), kernel("other")
    judge(one, other)
    assert bench(one, other, *FEW, "--direction", "forward") == 0
    record = read(folder())
    assert len(record["rows"]) == 2 * 2 * 2  # variants, configs, masks
    assert {row["outcome"] for row in record["rows"]} == {"timed"}
    assert {row["config"] for row in record["rows"]} == {"m16", "m32"}
    assert {row["calls"] for row in record["rows"]} == {4}
    assert {row["differs"] for row in record["rows"]} == {""}
    refused = [(left["config"], left["reason"]) for left in record["left"]]
    assert refused == [("m64", "not judged: no passing verdict of this source")] * 2
    assert {(one["variant"], one["workload"]["mask"]) for one in record["trials"]} == {
        (f"{path}@{path.stem}", mask) for path in (one, other) for mask in ("full", "causal")
    }
    assert {tuple(one["seconds"]) for one in record["trials"]} == {("m16", "m32")}
    assert [peak["name"] for peak in record["peaks"]] == ["copy", "matmul float32"]
    out = capsys.readouterr().out
    for said in ("TFLOP/s", "(1, 2, 32, 8)", "not judged", "bench.md"):
        assert said in out
    assert "matmul float32" in (folder() / "bench.md").read_text(encoding="utf-8")
    assert (folder() / "bench.svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_trial_finds_the_config_that_is_timed_first_or_alone(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """m16 is slow here: the first config that is listed is not the first one that is timed."""
    path = Path("one.py").absolute()
    slow = KERNEL.replace('"m32":\n', '"m16":\n')
    path.write_text(slow.format(name="one", slow="import time; time.sleep(0.02)", after="pass"))
    judge(path)
    asked = path, *FEW, "--direction", "forward"
    assert bench(*asked) == 0
    record = read(folder())
    # m64, as fast as m32, has no verdict: no candidate, and never chosen.
    assert [row["config"] for row in record["rows"]] == ["m32", "m32", "m16", "m16"]
    for one in record["trials"]:
        assert one["seconds"]["m16"] > 0.02 > one["seconds"]["m32"]
    shapes = ("--shapes", "1,2,32,8", "--shapes", "2,1,16,8", "--shapes", "1,4,32,8")
    assert bench(*asked, *shapes, "--best", "--mask", "full") == 0
    record = read(folder())
    assert [row["config"] for row in record["rows"]] == ["m32"] * 3
    # 2 heads in all at the length nearest to 4096, and 4
    assert [one["workload"]["heads"] for one in record["trials"]] == [2, 4]
    # What was tried of this source is not tried again; of another source it is.
    monkeypatch.setattr("verify.timing.session.Session.trial", lambda self, candidate: 1 / 0)
    assert bench(*asked, "--best", "--mask", "full") == 0
    (folder() / "bench.json").unlink()
    with pytest.raises(ZeroDivisionError):
        bench(*asked, "--best")


def test_a_cut_run_goes_on(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    path = kernel("one")
    judge(path)
    asked = path, *FEW, "--direction", "forward"
    assert bench(*asked, "-k", "m32", "--mask", "full") == 0
    (first,) = read(folder())["rows"]
    path_of_first = folder() / "bench.json"
    kept = path_of_first.read_text(encoding="utf-8")
    assert bench(*asked, "--continue") == 0
    rows = read(folder())["rows"]
    assert rows[0] == first, "what was timed is not timed again"
    assert len(rows) == 4
    assert {row["outcome"] for row in rows} == {"timed"}
    # The config that a trial found fastest comes first on each workload, and the other last.
    best = min(read(folder())["trials"][0]["seconds"].items(), key=lambda item: item[1])[0]
    assert best in ("m16", "m32")
    assert sorted(row["config"] for row in rows) == ["m16", "m16", "m32", "m32"]
    # Nothing is kept of another source, or of another count of calls.
    path_of_first.write_text(kept.replace(first["source_hash"], "0" * 16), encoding="utf-8")
    assert bench(*asked, "-k", "m32", "--mask", "full", "--continue") == 0
    assert read(folder())["rows"][0]["seconds"] != first["seconds"]
    path_of_first.unlink()
    assert bench(*asked, "--continue") == 2
    assert "bench.json: No such file" in capsys.readouterr().out


def test_a_variant_whose_rows_are_all_kept_is_not_tried(bench: Callable[..., int]) -> None:
    """Records of an earlier version have no trials."""
    one, other = kernel("one"), kernel("other")
    judge(one, other)
    asked = *FEW, "--direction", "forward", "--mask", "full"
    assert bench(one, *asked) == 0
    path = folder() / "bench.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["trials"]
    path.write_text(json.dumps(record), encoding="utf-8")
    assert bench(one, other, *asked, "--continue") == 0
    again = read(folder())
    assert len(again["rows"]) == 4
    assert {trial["variant"] for trial in again["trials"]} == {f"{other}@other"}


def test_a_variant_that_is_not_asked_keeps_its_rows(bench: Callable[..., int]) -> None:
    one, other = kernel("one"), kernel("other")
    judge(one, other)
    asked = *FEW, "--direction", "forward", "--mask", "full"
    assert bench(one, *asked) == 0
    before = read(folder())
    assert bench(other, *asked, "--continue") == 0
    both = read(folder())
    assert both["rows"][: len(before["rows"])] == before["rows"]
    assert {row["variant"] for row in both["rows"]} == {f"{one}@one", f"{other}@other"}
    assert {trial["variant"] for trial in both["trials"]} == {f"{one}@one", f"{other}@other"}
    # Nor does it tell of this call, however its rows ended.
    record = json.loads((folder() / "bench.json").read_text(encoding="utf-8"))
    record["rows"][0] |= {"outcome": "failed", "reason": "crashed: SIGSEGV"}
    (folder() / "bench.json").write_text(json.dumps(record), encoding="utf-8")
    assert bench(other, *asked, "--continue") == 0
    assert bench(one, *asked) == 0
    assert {row["variant"] for row in read(folder())["rows"]} == {f"{one}@one"}


def test_rows_are_timed_in_the_order_in_which_they_matter() -> None:
    paths = [kernel(name) for name in ("aaa", "torch-math", "torch-flash")]
    judge(*paths)
    declarations = [replaced_ref(one) for one in roster(paths).declarations]
    shapes = of_shapes([(1, 2, 32, 8), (1, 2, 64, 8)], ("forward",), ("full",))
    known = Judged(
        frozenset((d.ref, c.name, "float16") for d in declarations for c in d.configs), {}
    )
    asked = Request(kernels=(), suite=Suite(shapes), named="own", folder=Path("nowhere"))
    last = record(
        row("aaa", 2e-3, config="m16", workload=shape_of(shapes[1])),
        row("aaa", 1e-3, config="m64", workload=shape_of(shapes[1])),
    )
    found, left = select(asked, declarations, known)
    assert left == []
    found = ordered(found, last)
    told = [(one.workload.seqlen, one.declaration.ref, one.config.name) for one in found]
    assert told[:6] == [
        *((32, ref, "m16") for ref in ("torch-flash", "torch-math", "aaa")),
        *((64, ref, "m16") for ref in ("torch-flash", "torch-math")),
        (64, "aaa", "m64"),
    ]
    assert [length for length, _, _ in told[6:]] == [32] * 6 + [64] * 6
    assert len(set(told)) == 18
    alone = ordered(found, last, only_best=True)
    assert [(one.workload.seqlen, one.declaration.ref, one.config.name) for one in alone] == told[
        :6
    ]


def replaced_ref(declaration: Declaration) -> Declaration:
    return dataclasses.replace(declaration, ref=declaration.name)


def test_a_changed_source_is_not_judged(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = kernel("one")
    judge(path)
    path.write_text(path.read_text() + "\nCHANGED = True\n")
    assert bench(path, *FEW) == 3
    assert "nothing was timed" in capsys.readouterr().out
    assert not folder().exists(), "an empty record replaces none"


def test_a_wrong_or_crashing_kernel_shows(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        kernel("one"),
        kernel("other"),
        kernel("wrong", after="out[0, 0, 0, 2] = 7.0"),
        kernel("crashes", after="import os; os._exit(9)"),
    ]
    judge(*paths, configs=("m16",))
    assert bench(*paths, *FEW, "--mask", "full") == 1
    rows = {row["variant"].partition("@")[2]: row for row in read(folder())["rows"]}
    assert rows["wrong"]["differs"].startswith("first row, column 2: 7, others ")
    assert rows["crashes"]["outcome"] == "failed"
    assert "exited with status 9" in rows["crashes"]["reason"]
    assert (rows["one"]["differs"], rows["other"]["differs"]) == ("", "")
    # A narrow terminal breaks lines inside a cell.
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "first row, column 2" in words


def test_select_dtype_and_time(bench: Callable[..., int]) -> None:
    path = kernel("one")
    judge(path)
    words = (path, *FEW, "--mask", "full", "-k", "m32", "--seconds", "5", "--suite", "all")
    assert bench(*words) == 0
    assert [row["config"] for row in read(folder())["rows"]] == ["m32"]
    assert bench(path, *FEW, "--dtype", "float32") == 3  # judged in float16 alone
    assert bench(path, *FEW, "--dtype", "float64") == 3


def test_what_the_suite_does_not_time_is_listed() -> None:
    path = kernel("one")
    (one,) = roster([path]).declarations
    judge(path)
    found = judged([one], device.fingerprint())
    interpreted = dataclasses.replace(one, ref="interpreted", interpreted=True)
    library = dataclasses.replace(one, ref="torch-other", family="torch")
    request = Request(kernels=(), suite=SUITES["quick"], named="quick", folder=folder())
    candidates, left = select(request, [interpreted, library, one], found)
    assert candidates == []
    assert [entry["reason"] for entry in left] == [
        "runs in Triton's interpreter here, whose time says nothing of the kernel",
        "not in the suite quick",
        "supports no workload of the suite",  # whose head dims are 64, 128 and 512
    ]


def test_a_config_with_the_binary_of_another_is_listed_and_not_timed() -> None:
    (one,) = roster([kernel("one")]).declarations
    passing = frozenset((one.ref, config.name, "float16") for config in one.configs)
    same = {(one.ref, "m64"): "sm_90a gets the binary of m16"}
    shapes = of_shapes([(1, 2, 32, 8)], ("forward",), ("full",))
    request = Request(kernels=(), suite=Suite(shapes), named="own", folder=folder())
    candidates, left = select(request, [one], Judged(passing, {}, same))
    assert [candidate.config.name for candidate in candidates] == ["m16", "m32"]
    told = [(entry["config"], entry["reason"]) for entry in left]
    assert told == [("m64", "no config of its own: sm_90a gets the binary of m16")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None], ids=["SIGINT", "SIGTERM"])
def test_what_was_timed_before_an_interruption_is_kept(
    error: BaseException | None, bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kernel("one")
    judge(path)
    raise_at(monkeypatch, error, calls=4, after=1)
    assert bench(path, *FEW, "--direction", "forward") == 3
    record = read(folder())
    assert [row["outcome"] for row in record["rows"]] == ["timed"]
    assert record["left"][-1]["reason"] == "3 rows of 2 configs: interrupted"


@pytest.mark.parametrize("calls", [1, TRIAL.calls])
def test_an_interruption_before_the_first_row_keeps_the_rows_of_before(
    calls: int, bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while kernels compile, or while their configs are tried."""
    one, two = kernel("one"), kernel("two")
    judge(one, two)
    assert bench(one, *FEW, "--direction", "forward") == 0
    before = read(folder())["rows"]
    raise_at(monkeypatch, KeyboardInterrupt(), calls)
    assert bench(one, two, *FEW, "--direction", "forward", "--continue") == 3
    record = read(folder())
    assert record["rows"] == before
    assert record["left"][-1]["reason"].endswith("interrupted")


def test_rows_are_written_while_others_are_timed(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is taken away costs the last row alone."""
    path = kernel("one")
    judge(path)
    monkeypatch.setattr(bench_kernels, "_KEPT_EVERY", 0.0)
    raise_at(monkeypatch, SystemExit(137), calls=4, after=2)
    with pytest.raises(SystemExit):
        bench(path, *FEW, "--direction", "forward")
    assert [row["outcome"] for row in read(folder())["rows"]] == ["timed"] * 2


def test_clocks_that_cannot_be_locked_are_a_usage_error(
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = kernel("one")
    judge(path)
    monkeypatch.setattr("verify.machine.device.uuid", lambda: None)
    assert bench(path, *FEW, "--lock-clocks", "1500") == 2
    assert "--lock-clocks: there is no GPU" in capsys.readouterr().out


def test_a_report_there_gets_the_section_and_publishing_copies_all(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kernel("one")
    judge(path)
    found = roster([path])
    monkeypatch.setattr("verify.cli.bench_kernels.roster", lambda files: found)
    write(build(evidence(6)), folder())
    report = json.loads((folder() / "report.json").read_text())
    report["device"] |= {"slug": device.slug()}
    (folder() / "report.json").write_text(json.dumps(report))
    assert bench(*FEW, "--mask", "full", "--publish") == 0
    assert "Speed" in (folder() / "report.md").read_text(encoding="utf-8")
    published = Path("reports") / device.slug()
    assert read(published)["rows"] == read(folder())["rows"]
    assert (published / "bench.svg").exists()
