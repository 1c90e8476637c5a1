"""A session times real kernels on the CPU, in processes of their own: what a kernel does to its
process costs its row, and wrong values show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.fake_bench import row
from tests.harness.kernel_files import Writer
from verify.cell.discovery import roster
from verify.cell.process import ForkServer
from verify.timing.record import Row
from verify.timing.session import (
    LEAST,
    Candidate,
    Rules,
    Session,
    build_name,
    flagged,
    summary,
)
from verify.timing.workloads import Workload

HONEST = """
scores = (args.q @ args.k.mT) * args.softmax_scale
out.copy_(scores.softmax(-1) @ args.v)
lse.copy_(scores.logsumexp(-1))
"""
WRONG = f"{HONEST}\nout[0, 0, 0, 1] += 0.1"
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "time.sleep(60)"
RAISES = "raise ValueError('planted')"
REFUSES = "raise Unsupported('seqlen_q', 'too long')"
WORKLOAD = Workload(batch=1, heads=2, seqlen=16, head_dim=8)
RULES = Rules(calls=8, row_seconds=5.0)


@pytest.fixture
def session(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("VERIFY_DEADLINE", "2")
    made = Session(fork_server, RULES, {"float32": 0.1})
    yield made
    made.close()


def candidate(path: Path, fork_server: ForkServer, **changes: object) -> Candidate:
    (declaration,) = roster([path], fork_server).declarations
    problem = WORKLOAD.problem_for(declaration, "float32")
    assert not isinstance(problem, str)
    made = Candidate(declaration, declaration.configs[0], "float32", WORKLOAD, problem)
    return made if not changes else Candidate(**(vars(made) | changes))


def timed(session: Session, candidates: list[Candidate]) -> list[Row]:
    session.prepare(candidates, 2)
    return flagged(list(session.rows(candidates)))


def test_what_a_kernel_does_to_its_process_costs_its_row_alone(
    session: Session, fork_server: ForkServer, write: Writer
) -> None:
    bodies = (HONEST, CRASH, HONEST, HANG, RAISES, REFUSES, HONEST)
    rows = timed(session, [candidate(write(body), fork_server) for body in bodies])
    assert [one["outcome"] for one in rows] == [
        *("timed", "failed", "timed", "failed", "failed", "left", "timed")
    ]
    said = [one["reason"].partition(":")[0] for one in rows]
    assert said == ["", "crash", "", "hang", "raised", "refuses seqlen_q", ""]
    assert "SIGSEGV" in rows[1]["reason"]
    assert "planted" in rows[4]["reason"]
    first = rows[0]
    assert (first["calls"], first["warmups"]) == (8, 2)
    seconds = first["seconds"]
    assert 0 < seconds["minimum"] <= seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert first["tflops"] == WORKLOAD.flops / seconds["median"] / 1e12
    assert first["share"] == first["tflops"] / 0.1
    assert [one["differs"] for one in rows if one["outcome"] == "timed"] == ["", "", ""]
    assert first["first"] == rows[2]["first"], "every kernel gets the same inputs"


def test_wrong_values_show(session: Session, fork_server: ForkServer, write: Writer) -> None:
    bodies = (HONEST, WRONG, HONEST)
    rows = timed(session, [candidate(write(body), fork_server) for body in bodies])
    assert [bool(one["differs"]) for one in rows] == [False, True, False]
    assert rows[1]["differs"].startswith("first row, column 1: ")


COLUMNS = """
v = args.stored["v"].tensors[""].mT
scores = (args.q @ args.k.mT) * args.softmax_scale
out.copy_(scores.softmax(-1) @ v)
lse.copy_(scores.logsumexp(-1))
"""


def test_a_kernel_without_strided_storage_gets_the_same_values(
    session: Session, fork_server: ForkServer, write: Writer
) -> None:
    """Laid out as it takes them; rows as they lie would be another V."""
    rows_as_they_lie = COLUMNS.replace(".mT\nscores", ".reshape(args.v.shape)\nscores")
    assert rows_as_they_lie != COLUMNS
    paths = [write(HONEST)]
    paths += [write(body) for body in (COLUMNS, rows_as_they_lie)]
    for path in paths[1:]:
        text = path.read_text()
        assert "head_dims=(8,)" in text
        own = 'head_dims=(8,), storages=("transposedv",)'
        path.write_text(text.replace("head_dims=(8,)", own))
    rows = timed(session, [candidate(path, fork_server) for path in paths])
    assert [one["reason"] for one in rows] == [""] * 3
    # The product with another layout adds up in another order: some places of fp32, near 1.
    assert rows[1]["first"] == pytest.approx(rows[0]["first"], abs=2**-20)
    assert [bool(one["differs"]) for one in rows] == [False, False, True]


def test_elements_that_nothing_writes_show(
    session: Session, fork_server: ForkServer, write: Writer
) -> None:
    bodies = (HONEST, f"{HONEST}\nout[-1, -1, -1, 3] = float('nan')", HONEST)
    rows = timed(session, [candidate(write(body), fork_server) for body in bodies])
    assert rows[1]["differs"].startswith("last row, column 3: nan")


def test_long_calls_are_fewer(fork_server: ForkServer, write: Writer) -> None:
    session = Session(fork_server, Rules(calls=64, row_seconds=0.0))
    (found,) = timed(session, [candidate(write(HONEST), fork_server)])
    session.close()
    assert (found["calls"], found["warmups"], found["share"]) == (LEAST, 1, None)


def test_without_time_a_row_is_left(fork_server: ForkServer, write: Writer) -> None:
    path = write(HONEST)
    both = [candidate(path, fork_server) for _ in range(2)]
    session = Session(fork_server, RULES)
    assert [one["outcome"] for one in timed(session, both)] == ["timed", "timed"]
    session.rules = Rules(calls=8, total=-1.0)
    rows = list(session.rows(both))
    session.close()
    assert {one["outcome"] for one in rows} == {"left"}
    assert "were over" in rows[0]["reason"]


def test_percentiles_of_times() -> None:
    found = summary([0.01 * n for n in range(1, 12)])
    assert found["median"] == pytest.approx(0.06)
    assert found["p10"] == pytest.approx(0.02)
    assert found["p90"] == pytest.approx(0.10)
    for wrong in ([], [0.0], [1.0, -1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="above 0"):
            summary(wrong)


def test_formats_compare_by_the_coarser_one() -> None:
    """fp8 is 1/16 of the rms off, which in fp16 is a fault."""
    near = {"first": [0.25, -0.53, 0.125, 0.0]}
    group = [row("a"), row("b"), row("c"), row("d", dtype="float8_e4m3fn", **near)]
    assert [one["differs"] for one in flagged(group)] == [""] * 4
    group[3] = row("d", **near)
    assert [bool(one["differs"]) for one in flagged(group)] == [False, False, False, True]


def test_subnormals_are_as_coarse_as_they_are() -> None:
    """A row of 1e-5, which fp16 rounds to multiples of 6e-8: a step is no fault, and twenty are."""
    small = {"rms": [6e-6, 6e-6], "last": [0.0] * 4}
    group = [row(name, first=[1.53184e-5, 0.0, 0.0, 0.0], **small) for name in "abc"]
    step = 2.0**-24
    near, far = ([1.53184e-5 + n * step, 0.0, 0.0, 0.0] for n in (1, 20))
    assert [bool(one["differs"]) for one in flagged([*group, row("d", first=near, **small)])] == [
        False
    ] * 4
    assert flagged([*group, row("d", first=far, **small)])[3]["differs"]
    # In bf16, whose subnormals are far finer, the same step is a fault of this row.
    bf16 = [{**one, "dtype": "bfloat16"} for one in [*group, row("d", first=far, **small)]]
    assert flagged(bf16)[3]["differs"]  # type: ignore[arg-type]


def test_rows_of_another_workload_do_not_compare() -> None:
    other = {**row()["workload"], "heads": 48}
    apart = row("b", workload=other, first=[9.0, 9.0, 9.0, 9.0])
    assert [one["differs"] for one in flagged([row("a"), apart])] == ["", ""]


def test_the_build_of_a_row(fork_server: ForkServer, write: Writer) -> None:
    one = candidate(write(HONEST), fork_server)
    names = ["default-float32-d8-causal", "default-float32-d8-full", "default-float16-d8-full"]
    assert build_name(names, one) == "default-float32-d8-full"
    assert build_name(["default, float32, d 8, full, unaligned"], one) == ""
    assert build_name(["default, float32, d 8, full"], one) == "default, float32, d 8, full"
    assert build_name(["default-float32-d8"], one) == "default-float32-d8"
    assert build_name(["other-float32-d8"], one) == ""
