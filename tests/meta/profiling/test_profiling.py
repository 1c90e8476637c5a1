"""`verify profile`: ncu's table is read, the second launch is the profiled one, and what is missing
is said in a line.

raw.csv is written by hand in the format of `ncu --csv --page raw --print-units base`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.harness.warm_child import warm
from verify import cli
from verify.campaign.runner import CLEAN, INFRASTRUCTURE, USAGE
from verify.cell.discovery import Roster, roster
from verify.cell.process import PLAIN_CPU, PLAIN_CUDA, Reply
from verify.cell.under_tool import ToolCell
from verify.cli import profile as command
from verify.cli.options import UsageError
from verify.cli.profile import Request
from verify.machine import device
from verify.profiling import child, tool
from verify.profiling.metrics import METRICS, QUANTITIES, parse
from verify.profiling.record import NAME, read
from verify.profiling.tool import ProfileError, Profiler

pytestmark = pytest.mark.for_ci

RAW = Path(__file__).with_name("raw.csv")
TABLE = RAW.read_text(encoding="utf-8")
SHAPE = (1, 2, 32, 64)


class TestTable:
    def test_a_launch_is_its_numbers(self) -> None:
        first, second = parse(f"==PROF== Connected to process 4711\n{TABLE}")
        assert (first.name, first.grid, first.block) == (
            "split_q(Arguments)",
            "(1024, 1, 1)",
            "(128, 1, 1)",
        )
        assert first.values == {
            "duration": pytest.approx(550_912e-9),
            "tensor_pipe": 31.1,  # by the second name: the first one has no value
            "issue_slots": 55.25,
            "sm": 62.0,
            "occupancy": 12.1,
            "occupancy_possible": 12.5,
            "l1": 48.7,
            "l2": 21.4,
            "dram": 3.25,
            "conflicts_ldsm": 0.0,
            "conflicts_ld": 1152.0,
            "conflicts_st": 0.0,
            "local_sectors": 128.0,
            "registers": 210.0,
            "shared": 40960.0,
            "waves": 3.88,
        }
        assert second.name == "_row_sums"
        assert second.values["tensor_pipe"] == 0.0

    def test_reasons_and_limits_are_in_order(self) -> None:
        first = parse(TABLE)[0]
        assert list(first.stalls.items()) == [
            ("math_pipe_throttle", 1.31),
            ("wait", 0.92),
            ("long_scoreboard", 0.40),
        ]
        assert list(first.limits.items())[:2] == [("registers", 2.0), ("shared_mem", 2.0)]

    def test_a_metric_that_ncu_does_not_know_is_not_measured(self) -> None:
        missing = TABLE.replace("sm__inst_issued", "sm__another")
        assert parse(missing)[0].values["issue_slots"] is None

    @pytest.mark.parametrize("text", ["", "==ERROR== ERR_NVGPUCTRPERM", TABLE.splitlines()[0]])
    def test_no_launch_is_an_error(self, text: str) -> None:
        with pytest.raises((ProfileError, ValueError)):
            parse(text)

    def test_each_metric_is_asked_for_once(self) -> None:
        assert len(set(METRICS)) == len(METRICS)
        assert len({quantity.key for quantity in QUANTITIES}) == len(QUANTITIES)


def test_only_a_marked_run_lies_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def event(name: str) -> Any:
        return lambda *args: events.append(name)

    @contextlib.contextmanager
    def device(self: object, message: object) -> Iterator[None]:
        events.append("copy")
        yield
        events.append("copy")

    monkeypatch.setattr(child, "launch", event("launch"))
    monkeypatch.setattr(torch.cuda, "synchronize", event("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", event("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", event("stop"))
    monkeypatch.setattr(child.ProfiledKernelProcess, "_on_device", device)
    process = child.ProfiledKernelProcess(None)  # type: ignore[arg-type]
    process.variants["v"] = None  # type: ignore[assignment]
    process._run({"variant": "v", "device": "cuda", "profile": False})
    assert events == ["copy", "launch", "copy"]
    events.clear()
    process._run({"variant": "v", "device": "cuda", "profile": True})
    assert events == ["copy", "wait", "start", "launch", "wait", "stop", "copy"]


def test_the_command_line_asks_for_one_marked_launch_and_leaves_clocks_alone(
    tmp_path: Path,
) -> None:
    words = Profiler("/opt/ncu", "2025.3").command(tmp_path, ["a.sum", "b.sum"], full=True)
    assert words[:5] == ["/opt/ncu", "--set", "full", "--metrics", "a.sum,b.sum"]
    pairs = set(itertools.pairwise(words))
    assert {("--clock-control", "none"), ("--profile-from-start", "off")} <= pairs
    assert words[-1] == str(tmp_path / tool.REPORT)
    assert "--set" not in Profiler("ncu", "1").command(tmp_path, ["a.sum"], full=False)


# The command, with a program in place of ncu that starts the kernel process and prints raw.csv.

NCU = f"""#!{sys.executable}
import pathlib, subprocess, sys
words = sys.argv[1:]
if "--version" in words:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
elif "--import" in words:
    print(pathlib.Path({str(RAW)!r}).read_text())
else:
    at = words.index("--export")
    pathlib.Path(words[at + 1]).touch()
    sys.exit(subprocess.call(words[at + 2 :]))
"""
KERNEL = """
from verify.variant import Config, Contract, Support, Variant

def forward(args, out, lse, workspace):
    assert args.q.shape == (1, 2, 32, 64), args.q.shape
    assert args.config.block_n == 16
    out.zero_()

VARIANT = Variant(
    name="zeros",
    family="torch",
    forward=forward,
    configs=(Config(block_n=8), Config(block_n=16)),
    support=Support(dtypes=("float32",), head_dims=(64,), masks=("full", "causal")),
    contract=Contract(lse=None),
)
"""


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Roster:
    path = tmp_path_factory.mktemp("kernel") / "zeros.py"
    path.write_text(KERNEL)
    return roster([path])


@pytest.fixture
def kernel(listed: Roster, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the kernel's variant; the file is loaded once for all tests."""
    monkeypatch.setattr(command, "roster", lambda files: listed)
    return listed.declarations[0].ref


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console whose text a test reads; ncu is there, and kernels run on the CPU, in forks."""
    warm(monkeypatch)
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(command, "_tool", lambda: (tool.find(), PLAIN_CPU))
    return Console(record=True, width=200)


def test_a_config_is_profiled_once_after_a_first_run(
    tmp_path: Path, kernel: str, output: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[bool] = []
    run = ToolCell.run

    def watched(self: ToolCell, path: str, request: dict[str, Any], arena: Any) -> Reply:
        marked.append(request["profile"])
        return run(self, path, request, arena)

    monkeypatch.setattr(ToolCell, "run", watched)
    folder = tmp_path / "report"
    name = "n16"
    request = Request(variants=(kernel,), config=name, shape=SHAPE, folder=folder)
    assert command.run(request, output) == CLEAN, output.export_text()
    assert marked == [False, True]
    text = output.export_text()
    for said in (
        "550.9 us",
        "31.1 %",
        "registers, shared_mem: 2 blocks",
        "math_pipe_throttle 1.31",
    ):
        assert said in text
    record = read(folder / NAME)
    (one,) = record["profiles"]
    assert (one["variant"], one["config"]) == (kernel, name)
    assert one["problem"] == "hq=2,hkv=2,sq=32,skv=32,d=64,dtype=float32"
    assert [each["name"] for each in one["kernels"]] == ["split_q(Arguments)", "_row_sums"]
    assert one["kernels"][0]["values"]["registers"] == 210
    (window,) = (path for path in folder.iterdir() if path.is_dir())
    assert (window / tool.REPORT).is_file()
    assert one["ncu"] == "2025.3.1.0"


@pytest.mark.for_ci
def test_profiles_are_added_to_those_of_the_device_and_to_its_report(
    tmp_path: Path, kernel: str, output: Console
) -> None:
    folder, published = tmp_path / "report", tmp_path / "published"
    request = Request(
        variants=(kernel,), config="n16", shape=SHAPE, folder=folder, published=published
    )
    assert command.run(request, output) == CLEAN
    first = read(folder / NAME)
    (old,) = first["profiles"]
    others = [{**old, "config": "n8"}, {**old, "source_hash": "older"}]
    written = {**first, "profiles": others}
    (folder / NAME).write_text(json.dumps(written))
    assert command.run(request, output) == CLEAN
    assert read(folder / NAME)["profiles"] == [old, others[0]]
    assert read(published / NAME) == first
    foreign = {**written, "device": first["device"] | {"slug": "another"}}
    for text in (json.dumps(foreign), "{"):
        (folder / NAME).write_text(text)
        assert command.run(request, output) == CLEAN
        assert read(folder / NAME) == first


def test_a_variant_that_fails_keeps_none_of_the_others_from_being_profiled(
    tmp_path: Path, kernel: str, output: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter((ProfileError("ncu ended with 9"), None))
    measured = command.profile

    def some(*args: Any) -> Any:
        error = next(asked)
        if error is not None:
            raise error
        return measured(*args)

    monkeypatch.setattr(command, "profile", some)
    request = Request(variants=(kernel, kernel), config="n16", shape=SHAPE, folder=tmp_path)
    assert command.run(request, output) == INFRASTRUCTURE
    assert "ncu ended with 9" in output.export_text()
    assert len(read(tmp_path / NAME)["profiles"]) == 1


@pytest.mark.parametrize(
    ("ends", "rendered"),
    [((None, None, KeyboardInterrupt()), 1), ((ProfileError("ncu ended with 9"),), 0)],
)
def test_the_report_is_rendered_once_and_only_with_something_new(
    ends: tuple[BaseException | None, ...],
    rendered: int,
    tmp_path: Path,
    kernel: str,
    output: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, folders = iter(ends), []
    measured = command.profile

    def some(*args: Any) -> Any:
        error = next(asked)
        if error is not None:
            raise error
        return measured(*args)

    monkeypatch.setattr(command, "profile", some)
    monkeypatch.setattr(command.accuracy, "render_again", folders.append)
    request = Request(variants=(kernel,) * len(ends), config="n16", shape=SHAPE, folder=tmp_path)
    with contextlib.suppress(KeyboardInterrupt):
        command.run(request, output)
    assert folders == [tmp_path] * rendered


def test_a_kernel_that_fails_under_ncu_is_said(
    tmp_path: Path, kernel: str, output: Console
) -> None:
    request = Request(
        variants=(kernel,), shape=SHAPE, folder=tmp_path / "report"
    )  # the first config
    assert command.run(request, output) == INFRASTRUCTURE
    assert "raised: AssertionError" in output.export_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"variants": "ones"}, "@ones' (known: "),
        ({"config": "m1"}, "has no config 'm1'"),
        ({"dtype": "float12"}, "--shape, --dtype or --mask: "),
        ({"mask": "spiral"}, "--shape, --dtype or --mask: "),
        ({"shape": (1, 2, 32, 80)}, "does not support this: head_dim: "),
    ],
    ids=["variant", "config", "dtype", "mask", "shape"],
)
def test_what_cannot_be_asked_for_is_a_usage_error(
    tmp_path: Path, kernel: str, output: Console, change: dict[str, Any], said: str
) -> None:
    if "variants" in change:
        change = {"variants": (kernel.replace("@zeros", f"@{change['variants']}"),)}
    known = {"variants": (kernel,), "shape": SHAPE, "folder": tmp_path / "report"}
    assert command.run(Request(**known | change), output) == USAGE
    assert said in output.export_text().replace("\n", "")


def test_without_a_gpu_or_without_ncu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(variants=("any",), shape=SHAPE, folder=tmp_path)
    for where, said in ((PLAIN_CPU, "no CUDA device"), (PLAIN_CUDA, "no ncu on PATH")):
        monkeypatch.setattr(command, "environment", lambda where=where: where)
        monkeypatch.setattr(command, "find", lambda: None)
        output = Console(record=True, width=200)
        assert command.run(request, output) == INFRASTRUCTURE
        text = output.export_text()
        assert text.startswith(f"verify: {said}")
        assert text.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_is_told_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    monkeypatch.setattr(command, "run", lambda request, console: asked.append(request) or CLEAN)
    words = ["profile", "v", "w", "--config", "n16", "--shape", "1,2,32,64", "--dtype", "float16"]
    words += ["--mask", "causal", "--out", str(tmp_path)]
    assert cli.app(words, standalone_mode=False) == CLEAN
    assert asked == [
        Request(
            variants=("v", "w"),
            config="n16",
            shape=SHAPE,
            dtype="float16",
            mask="causal",
            folder=tmp_path / device.slug(),
        )
    ]
    with pytest.raises(UsageError, match=r"^--shape: '1,2' is not BATCH,HEADS,SEQLEN,HEAD_DIM$"):
        cli.app(["profile", "v", "--shape", "1,2"], standalone_mode=False)


def test_an_ncu_that_does_not_answer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "ncu"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(tool, "executables", lambda name: [str(broken)])
    assert tool.find() is None
