"""The parts of the sanitizer lane: the tool's command, planted faults, problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from references.masks import Causal
from verify.cell.process import PLAIN_CPU
from verify.evidence import Recorder, load
from verify.machine.cores import cores
from verify.machine.settings import COMPUTE_SANITIZER
from verify.problem import Problem
from verify.problem.case import Case
from verify.problem.coverage import coverage_bins
from verify.sanitizers import exports, page
from verify.sanitizers.course import worker_count
from verify.sanitizers.facts import CaseResult, Facts, Judgement
from verify.sanitizers.fault import PlantedFault
from verify.sanitizers.lane import Lane
from verify.sanitizers.planted import FAULTS
from verify.sanitizers.records import Record
from verify.sanitizers.report import LaneRun, told
from verify.sanitizers.results import PlantedSession, Rehearsed
from verify.sanitizers.selection import MAX_PROBLEMS, covering, deep, select
from verify.sanitizers.session import Booth, Session, Subject
from verify.sanitizers.tool import SHARED_SPACE, TOOLS, Sanitizer, find
from verify.sanitizers.turns import repeated
from verify.variant import Config, Contract, Declaration, Numerics, Support

torch.set_num_threads(1)

# The tool.


def test_the_command_asks_for_records_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    words = Sanitizer("/opt/compute-sanitizer", "2025.3.1").command("racecheck", tmp_path, 3)
    assert words[:3] == ["/opt/compute-sanitizer", "--tool", "racecheck"]
    assert {"--xml", "--save", "--log-file", "--error-exitcode", "--print-limit"} <= set(words)
    assert "--require-cuda-init" not in words  # a program without CUDA must fail
    assert "--kernel-name" not in words  # nothing is filtered out, so no filter can match nothing
    ports = [Sanitizer("x", "1").command("memcheck", tmp_path, lane) for lane in range(8)]
    assert len({words[words.index("--port") + 1] for words in ports}) == len(ports)


def test_a_tool_is_found_on_the_path_only_if_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    broken = tmp_path / "compute-sanitizer"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert find() is None
    broken.write_text("#!/bin/sh\necho 'Version 2025.3.1.0 (build 1)'\n")
    assert find() == Sanitizer(str(broken), "2025.3.1.0")
    newer = tmp_path / "newer"
    newer.write_text(
        f"#!/bin/sh\necho 'Version 2026.4.0.0'\necho '  {SHARED_SPACE} arg (=global)'\n"
    )
    newer.chmod(0o755)
    monkeypatch.setenv(COMPUTE_SANITIZER, str(newer))
    assert find() == Sanitizer(str(newer), "2026.4.0.0", frozenset({SHARED_SPACE}))
    newer.write_text("#!/bin/sh\nexit 1\n")
    assert find() is None  # and not the machine's own


def test_a_newer_tool_looks_at_shared_memory_and_must_catch_its_fault(tmp_path: Path) -> None:
    newer = Sanitizer("x", "2026.4", frozenset({SHARED_SPACE}))
    older = Sanitizer("x", "2025.3")
    (fault,) = (fault for fault in FAULTS if fault.needs)
    for tool in TOOLS:
        looks = SHARED_SPACE in newer.command(tool, tmp_path, 0)
        assert looks == (tool == "initcheck")
        assert SHARED_SPACE not in older.command(tool, tmp_path, 0)
        assert fault.under(newer).wanted(tool) == ("caught" if looks else "any")
        assert fault.under(older).wanted(tool) == "any"
    assert "needs --initcheck-address-space" in fault.under(older).blind("initcheck")


def test_workers_are_at_least_one() -> None:
    assert (worker_count("0"), worker_count("5")) == (1, 5)
    assert 1 <= worker_count("auto") <= cores()


# Problems.


def declared(support: Support, configs: tuple[Config, ...]) -> Declaration:
    return Declaration(
        ref="kernel",
        path="kernel.py",
        source_hash="",
        name="kernel",
        family="triton",
        configs=configs,
        support=support,
        numerics=Numerics(),
        contract=Contract(),
        head_dim_buckets=(32, 64, 128),
    )


WIDE = declared(
    Support(
        dtypes=("float16", "float32"),
        head_dims=range(8, 129),
        masks=("full", "causal", "window", "lengths"),
        grouped_heads=True,
        min_seqlen=0,
    ),
    (Config(block_m=64, block_n=32, num_stages=3), Config(block_m=128, block_n=64, num_stages=2)),
)


@pytest.mark.parametrize("config", WIDE.configs, ids=lambda config: config.name)
def test_a_handful_of_small_problems_fills_the_edges(config: Config) -> None:
    chosen = select(WIDE, config, "float16")
    assert 4 <= len(chosen) <= MAX_PROBLEMS
    assert chosen == select(WIDE, config, "float16")
    assert all(
        WIDE.support.refusal(problem) is None and problem.dtype == "float16" for problem in chosen
    )
    assert all(
        0 < max(problem.seqlen_q, problem.seqlen_kv) <= 400 and problem.seqlen_q
        for problem in chosen
    )
    filled = set().union(*(coverage_bins(problem, config) for problem in chosen))
    edges = {
        "ragged_tail",
        "empty_row",
        "grouped_heads",
        "strided",
        "seqlen_q<seqlen_kv",
        "seqlen_q>seqlen_kv",
        "misaligned",
    }
    assert edges <= filled
    tiles = [
        problem
        for problem in chosen
        if -(-problem.seqlen_kv // (config.block_n or 0)) >= (config.num_stages or 0) + 2
    ]
    masks = set().union(*(coverage_bins(problem, config) for problem in tiles))
    assert {"mask:full", "mask:causal", "mask:window", "mask:lengths"} <= masks
    for low, high in ((8, 32), (33, 64), (65, 128)):
        assert any(low <= problem.head_dim <= high for problem in tiles)


def test_depth_is_two_tiles_more_than_stages() -> None:
    assert deep(Config(block_n=64, num_stages=3)) == 4 * 64 + 1


def test_quick_means_fewer() -> None:
    assert len(select(WIDE, WIDE.configs[0], "float32", quick=True)) <= 4


def test_quick_has_a_config_for_each_set_of_options() -> None:
    blocks = Config(block_m=64), Config(block_m=128)
    fast = [replace(block, options=(("overlap", 1),)) for block in blocks]
    both = replace(blocks[1], options=(("persistent", 1), ("overlap", 1)))
    assert covering((*blocks, *fast, both)) == (blocks[0], fast[0], both)
    assert covering(blocks) == blocks[:1]


def test_a_square_support_without_masks_is_served_too() -> None:
    narrow = declared(
        Support(
            dtypes=("float16",), head_dims=(64,), masks=("causal.square",), layouts="contiguous"
        ),
        (Config(),),
    )
    chosen = select(narrow, narrow.configs[0], "float16")
    assert chosen
    assert all(isinstance(problem.mask, Causal) for problem in chosen)


# Whose record it was.

CASES = tuple(
    Case(
        "kernel",
        WIDE.configs[0].name,
        "sanitizer",
        Problem(seqlen_q=n, seqlen_kv=n, head_dim=8, dtype="float16"),
    )
    for n in (1, 2, 3)
)
SUBJECT = Subject(WIDE, WIDE.configs[0], "float16", CASES)


class Oracle:
    """A fake `Booth`: gives the outcome that a test sets, by the number of cases and of the first
    case's keys."""

    def __init__(self, outcomes: dict[tuple[int, int], str]) -> None:
        self.outcomes = outcomes

    def sanitize(self, tool: str, subject: Subject, lane: int, name: str) -> Session:
        outcome = self.outcomes.get(
            (len(subject.cases), subject.cases[0].problem.seqlen_kv), "clean"
        )
        records = (
            (Record(tool=tool, kind="Precise", text="Invalid write"),)
            if outcome == "faulty"
            else ()
        )
        results = (CaseResult(subject.cases[0].id, "ok"),)  # the process stopped at the second case
        facts = Facts(
            tool=tool,
            exit_code=0,
            summary=None,
            records=records,
            results=results,
            expected_cases=len(subject.cases),
        )
        return Session(
            tool, subject, Judgement(outcome, records=records, total=len(records)), 1.0, facts
        )


@pytest.mark.parametrize(
    ("outcomes", "expected", "processes"),
    [
        ({}, ["clean", "clean", "clean"], 1),
        # whose it is shows alone
        ({(3, 1): "faulty", (1, 3): "faulty"}, ["clean", "clean", "faulty"], 4),
        # No case shows it alone: it counts against the one at which the process stopped.
        ({(3, 1): "faulty"}, ["clean", "faulty", "clean"], 4),
        # Each is proved clean by a separate process.
        ({(3, 1): "inconclusive"}, ["clean", "clean", "clean"], 4),
        ({(3, 1): "inconclusive", (1, 2): "inconclusive"}, ["clean", "inconclusive", "clean"], 4),
    ],
)
def test_a_record_is_held_against_the_case_that_shows_it(
    tmp_path: Path, outcomes: dict[tuple[int, int], str], expected: list[str], processes: int
) -> None:
    with Recorder(tmp_path) as recorder:
        lane = Lane(cast(Booth, Oracle(outcomes)), recorder, ("memcheck",), 1)
        tried = lane._under("memcheck", "0", SUBJECT, Rehearsed(0, SUBJECT, {}))
    assert [tried.outcomes[case.id] for case in CASES] == expected
    assert len(tried.sessions) == processes
    verdicts = {verdict.case: verdict for verdict in load(tmp_path).verdicts}
    assert [verdicts[case.id].outcome for case in CASES] == [
        "pass" if word == "clean" else "fail" for word in expected
    ]
    shared = outcomes == {(3, 1): "faulty"}
    for verdict in verdicts.values():
        if verdict.finding is not None:
            assert ("only where 3 cases" in verdict.finding.message) == shared
            assert ("--variant kernel" in verdict.finding.replay) == shared


@pytest.mark.parametrize(
    ("under_tool", "with_delays", "processes", "uncaught"),
    [
        ("faulty", "faulty", ["memcheck"], []),
        ("clean", "faulty", ["memcheck", "skew"], []),
        ("clean", "clean", ["memcheck", "skew"], ["copy"]),
    ],
)
def test_a_copy_that_its_tool_misses_is_tried_with_delays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    under_tool: str,
    with_delays: str,
    processes: list[str],
    uncaught: list[str],
) -> None:
    copy = PlantedFault(
        variant="copy",
        file=tmp_path,
        about="a copy",
        caught_by=("memcheck",),
        copy_of="kernel",
        spare=True,
    )
    under = cast(Booth, Oracle({(3, 1): under_tool}))
    under.environment, under.folder = PLAIN_CPU, tmp_path
    monkeypatch.setattr(
        "verify.sanitizers.lane.race",
        lambda environment, subject, **_: Oracle({(3, 1): with_delays}).sanitize(
            "skew", subject, 0, ""
        ),
    )
    monkeypatch.setattr(
        "verify.sanitizers.lane._planted_subjects", lambda faults: {copy.variant: SUBJECT}
    )
    with Recorder(tmp_path) as recorder:
        lane = Lane(under, recorder, ("memcheck",), 1)
        lane.plant((copy,))
        planted = lane.delay()
    run = LaneRun(
        run="run",
        device={},
        sanitizer="1",
        tools=("memcheck",),
        whole=True,
        planted=tuple(planted),
    )
    assert [each.session.tool for each in planted] == processes
    assert run.alive_tools == ("memcheck",)  # a spare copy proves nothing about a tool
    assert (run.uncaught, run.alive) == (uncaught, not uncaught)
    caught = "**nothing**" if uncaught else processes[-1]
    assert f"| **copy** | a copy | {caught} |" in page.markdown(told(run))
    assert ("nothing caught this known-bad copy" in exports.junit(told(run))) == bool(uncaught)


@pytest.mark.parametrize(("tool", "uncaught"), [("memcheck", ["copy"]), ("racecheck", [])])
def test_a_run_without_the_tool_that_sees_a_copy_need_not_catch_it(
    tool: str, uncaught: list[str], tmp_path: Path
) -> None:
    copy = PlantedFault(
        variant="copy", file=tmp_path, about="a copy", caught_by=("memcheck",), copy_of="kernel"
    )
    session = Oracle({(3, 1): "clean"}).sanitize(tool, SUBJECT, 0, "")
    run = LaneRun(
        run="run",
        device={},
        sanitizer="1",
        tools=(tool,),
        whole=True,
        planted=(PlantedSession(copy, session),),
    )
    assert (run.uncaught, run.alive) == (uncaught, not uncaught)
    caught = "**nothing**" if uncaught else "no tool of this run sees it"
    assert f"| **copy** | a copy | {caught} |" in page.markdown(told(run))


def test_a_repeated_fault_tells_in_how_many_runs_it_was_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tool="memcheck", kind="Precise", text="a write", words="a write")

    class Forgetful:
        """A tool that misses every fault in its third run."""

        def sanitize(self, tool: str, subject: Subject, lane: int, name: str) -> Session:
            missed = name.endswith("-again2") or "right" in name
            judgement = Judgement("clean") if missed else Judgement("faulty", (), (record,), 1)
            return Session(tool, subject, judgement, 0.0, cast(Facts, None))

    right = PlantedFault(variant="right", file=tmp_path, about="right", twin=True)
    wrong = PlantedFault(variant="wrong", file=tmp_path, about="w", caught_by=("memcheck",))
    monkeypatch.setattr(
        "verify.sanitizers.lane._planted_subjects",
        lambda faults: {fault.variant: SUBJECT.alone(CASES[0]) for fault in faults},
    )
    for repeat, said, clean in (
        (1, "caught", "clean"),
        (3, "caught in 2 of 3", "clean in 3 of 3"),
    ):
        with Recorder(tmp_path) as recorder:
            lane = Lane(cast(Booth, Forgetful()), recorder, ("memcheck",), 1, repeat=repeat)
            planted = tuple(lane.plant((right, wrong)))
        # The twin has one process for all its tries: a clean one is clean in each.
        assert [(each.fault.variant, each.tries) for each in planted] == [
            ("right", repeat),
            *[("wrong", 1)] * repeat,
        ]
        tools = ("memcheck",)
        run = LaneRun(run="run", device={}, sanitizer="1", tools=tools, whole=True, planted=planted)
        assert run.alive == (repeat == 1)
        text = page.markdown(told(run))
        assert said in text
        assert clean in text
        failing = exports.junit(told(run))
        assert ("wrong under memcheck, run 3" in failing) == (repeat == 3)
        assert failing.count("<failure") == (repeat == 3)


@pytest.mark.parametrize(
    ("records", "outcome", "held"),
    [(3, "faulty", 3), (2, "faulty", 2), (0, "clean", 0), (3, "inconclusive", 0)],
)
def test_each_try_of_a_process_that_compares_bits_is_counted(
    records: int, outcome: str, held: int
) -> None:
    fault = PlantedFault(
        variant="wrong", file=Path("wrong.py"), about="w", caught_by=("skew", "memcheck")
    )
    assert fault.repeats_within("skew")
    assert not fault.repeats_within("memcheck")
    record = Record(tool="skew", kind="Race", text="a race")
    judgement = Judgement(outcome, (), (record,) * records, records)
    session = Session("skew", SUBJECT.alone(CASES[0]).times(3), judgement, 0.0, cast(Facts, None))
    planted = PlantedSession(fault, session)
    assert (planted.tries, planted.held, planted.holds) == (3, held, held == 3)


def test_what_is_required_is_repeated_before_the_rest_is_tried() -> None:
    twin = PlantedFault(variant="right", file=Path("k.py"), about="", twin=True)
    wrong = PlantedFault(variant="wrong", file=Path("k.py"), about="", caught_by=("memcheck",))
    copy = replace(wrong, variant="copy", copy_of="shipped")
    turns = [
        *((copy, tool) for tool in ("memcheck", "racecheck")),
        *((fault, tool) for fault in (wrong, twin) for tool in ("memcheck", "racecheck")),
    ]
    order = [
        (number, fault.variant, tool, tries) for number, fault, tool, tries in repeated(turns, 3)
    ]
    assert order == [
        (0, "copy", "memcheck", 1),
        (0, "wrong", "memcheck", 1),
        (0, "right", "memcheck", 3),
        (0, "right", "racecheck", 3),
        (1, "wrong", "memcheck", 1),
        (2, "wrong", "memcheck", 1),
        (1, "copy", "memcheck", 1),  # its build has been made meanwhile
        (2, "copy", "memcheck", 1),
        (0, "copy", "racecheck", 1),
        (0, "wrong", "racecheck", 1),
    ]
    assert repeated(turns, 1) == [(0, fault, tool, 1) for fault, tool in turns]
