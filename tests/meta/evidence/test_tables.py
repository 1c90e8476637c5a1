"""Verdicts in tables: they come out as they went in, and are joined as objects are."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pytest

from tests.harness.fake_campaign import evidence, failing, verdict
from verify.evidence import Begin, Evidence, Finding, Recorder, Verdict, Verdicts, load, reading
from verify.evidence.joining import joined
from verify.evidence.records import Passed
from verify.evidence.tables import Packer, packed
from verify.problem import Problem

ORACLES = ("bound", "execution", "graph")


def of_case(case: str, draw: random.Random) -> list[Verdict]:
    """The verdicts of some oracles on a case."""
    outcome = draw.choice(["pass", "pass", "fail", "inapplicable"])
    first = Verdict(
        case=f"v:m64:accuracy:sq=1,seed={case}",
        variant="v",
        config="m64",
        dtype="float16",
        oracle="",
        group="accuracy",
        outcome="pass",
        phase=draw.choice(["generate", "shrink", "witness"]),
        problem=f"sq=1,seed={case}",
        seconds={"run": draw.random()},
        time=float(draw.randrange(4)),
    )
    found = [replace(first, oracle=oracle) for oracle in ORACLES[: draw.randint(1, 3)]]
    found[0] = replace(
        found[0],
        outcome=outcome,
        measures={"r_lse": draw.choice([0.5, math.nan]), "rows_out": draw.random()},
        bins=("decode", "gqa")[: draw.randrange(3)],
        observed={"inapplicable": "a mask"} if outcome == "inapplicable" else {},
        finding=Finding(oracle="bound", message="off", got=2.0) if outcome == "fail" else None,
    )
    return found


def recorded(draw: random.Random) -> list[list[Verdict]]:
    """What one run records, of few cases: they come again and again."""
    return [of_case(str(draw.randrange(5)), draw) for _ in range(12)]


def as_tables(records: Iterable[list[Verdict]]) -> Packer:
    """One row for each case that none convicts, as it is read from a file."""
    packer = Packer()
    for verdicts in records:
        passed = Passed.of([replace(each, time=0.0) for each in verdicts])
        if passed is None:
            for each in verdicts:
                packer.add(each)
        else:
            packer.add_passed(replace(passed, time=verdicts[0].time))
    return packer


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=attrgetter("case", "oracle"))


def join_objects(verdicts: Iterable[Verdict]) -> tuple[list[Verdict], list[tuple[str, str]]]:
    """The rule for one verdict per case and oracle, as it is said in docs/report-schema.md."""
    kept = []
    unstable = []
    ordered = in_order(sorted(verdicts, key=attrgetter("time")))
    for key, group in groupby(ordered, attrgetter("case", "oracle")):
        found = list(group)
        failed = [each for each in found if each.outcome == "fail"]
        last = (failed or found)[-1]
        counted = [each.phase for each in found if each.counted]
        kept.append(last if last.counted or not counted else replace(last, phase=counted[0]))
        if failed and any(each.outcome == "pass" for each in found):
            unstable.append(key)
    return kept, unstable


@pytest.mark.parametrize("seed", range(40))
def test_several_records_of_a_case_are_joined(seed: int) -> None:
    draw = random.Random(seed)
    runs = [recorded(draw) for _ in range(draw.randint(1, 3))]
    found, unstable = joined([as_tables(run).tables for run in runs])
    wanted, both = join_objects(each for run in runs for verdicts in run for each in verdicts)
    assert [*map(repr, found)] == [*map(repr, wanted)]
    assert [*unstable] == both
    assert len(found) == len(wanted)


def test_a_row_that_is_passed_again_stays_a_row() -> None:
    """Two runs of the same cases take no more than one."""
    once = [of_case("7", random.Random(4))]
    assert {each.outcome for each in once[0]} == {"pass"}
    again = [[replace(each, time=9.0) for each in once[0]]]
    found, _ = joined([as_tables(once).tables, as_tables(again).tables])
    (table,) = found.tables
    assert (len(table.cases), table.time(0)) == (1, 9.0)


def test_a_case_that_is_shrunk_to_later_stays_counted() -> None:
    once = [replace(each, phase="generate", time=1.0) for each in of_case("7", random.Random(4))]
    again = [replace(each, phase="shrink", time=9.0) for each in once]
    found, _ = joined([as_tables([once, again]).tables])
    assert {(each.time, each.phase) for each in found} == {(9.0, "generate")}


def test_what_goes_in_comes_out() -> None:
    odd = [
        replace(verdict("v", "float16", 1), problem="-", case="v:-:campaign:float16.out"),
        replace(verdict("v", "float16", 2), case="(file)", problem=""),
        failing("v", "float16", 3, Problem(seqlen_q=3, seqlen_kv=2, head_dim=16, dtype="float16")),
    ]
    all_of = [*evidence(9).verdicts, *odd]
    found = Verdicts.of(all_of)
    assert found == tuple(in_order(all_of))
    assert found != tuple(in_order(all_of[1:]))
    assert len(found) == len(all_of)
    assert all(each in found for each in all_of)
    assert replace(odd[0], dtype="bfloat16") not in found
    assert found.failing == tuple(in_order(each for each in all_of if each.outcome == "fail"))


def test_parts() -> None:
    found = evidence(9).verdicts
    mine = found.by_dtype()["torch-flash", "float16"]
    assert [*mine] == [v for v in found if (v.variant, v.dtype) == ("torch-flash", "float16")]
    exact = mine.where(lambda shape, said: said.oracle == "gather")
    assert [*exact] == [v for v in mine if v.oracle == "gather"] != []
    assert exact.cases == {v.case for v in exact}
    assert Verdicts.together([exact, Verdicts()]) == exact
    assert not Verdicts()


def test_cases_of_several_rows() -> None:
    one, two, three = (verdict("v", "float16", index) for index in range(3))
    assert Verdicts.of([one, two]).repeated == frozenset()
    same = replace(one, oracle="another")
    assert Verdicts.of([one, same, two, three]).repeated == {one.case}
    assert Verdicts.of([one, one, two]).repeated == {one.case}


MEASURES = {f"{name}_out": 0.1 + 1e-9 * place for place, name in enumerate("abcdefghijklmnop")}


def case_of(index: int) -> list[Verdict]:
    """Eleven verdicts, one of which tells something."""
    case = "v:m64n64w4:accuracy:b=2,hq=4,hkv=2,sq=100,skv=130,d=64,dtype=bfloat16,mask=causal"
    first = verdict("v", "bfloat16", 3 * index, case=f"{case},seed={index}", time=0.0)
    problem = first.case.split(":")[3]
    first = replace(first, config="m64n64w4", group="accuracy", problem=problem, phase="generate")
    quiet = replace(first, measures={}, bins=())
    told = replace(first, measures={name: r + index for name, r in MEASURES.items()})
    return [told, *(replace(quiet, oracle=f"oracle {place}") for place in range(10))]


def test_a_case_takes_less_than_its_line(tmp_path: Path) -> None:
    """A million cases fit into memory: each takes a row of numbers and its name."""
    count = 1000
    with Recorder(tmp_path, "gw0") as recorder:
        for index in range(count):
            verdicts = case_of(index)
            recorder.begin(verdicts[0].case, "generate", "v")
            recorder.write_case(verdicts)
    size = (tmp_path / "gw0.jsonl").stat().st_size
    load(tmp_path)
    tracemalloc.start()
    try:
        found = load(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.verdicts) == 11 * count
    assert len(found.verdicts.tables) == 1
    assert most < 0.8 * size


def test_a_begin_of_another_variant_stays(tmp_path: Path) -> None:
    one = verdict("v", "float16", 0)
    with Recorder(tmp_path, "gw0") as recorder:
        for index, variant in enumerate(("v", "w")):
            recorder.write(Begin(case="x", phase="generate", time=1.0 + index, variant=variant))
        recorder.begin(one.case, "generate", "v")
        recorder.write(one)
    found = load(tmp_path)
    assert [(begin.case, begin.variant) for begin in found.lost] == [("x", "w")]


class TestKept:
    """The evidence that was read last, if it is large."""

    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "_LARGE", 1)

    def written(self, folder: Path, index: int) -> Evidence:
        with Recorder(folder, "gw0") as recorder:
            recorder.write(verdict("v", "float16", index))
        return load(folder)

    def test_it_is_read_once(self, tmp_path: Path) -> None:
        assert self.written(tmp_path, 0) is load(tmp_path)

    def test_what_is_written_later_is_read(self, tmp_path: Path) -> None:
        before = self.written(tmp_path, 0)
        after = self.written(tmp_path, 1)
        assert [len(each.verdicts) for each in (before, after)] == [1, 2]
        (tmp_path / "gw0.jsonl").unlink()
        assert not load(tmp_path).verdicts

    def test_a_file_in_its_place_is_read(self, tmp_path: Path) -> None:
        before = self.written(tmp_path, 0)
        path = tmp_path / "gw0.jsonl"
        (tmp_path / "new").write_bytes(path.read_bytes().replace(b"m128n64", b"m256n64"))
        (tmp_path / "new").replace(path)
        assert load(tmp_path).verdicts[0].config != before.verdicts[0].config

    def test_each_folder_is_itself(self, tmp_path: Path) -> None:
        self.written(tmp_path / "one", 0)
        with pytest.raises(reading.EvidenceError, match="is no run directory"):
            load(tmp_path / "one", tmp_path / "two")


def test_tables_without_some_rows() -> None:
    (table,) = packed(replace(verdict("v", "float16", 0), case=f"v:m:g:{i}") for i in range(4))
    kept = table.without({1, 3})
    assert kept.cases == ["v:m:g:0", "v:m:g:2"]
    assert [kept.number(row) for row in range(2)] == [0, 2]
    assert [kept.verdict(row, 0) for row in range(2)] == [table.verdict(row, 0) for row in (0, 2)]
