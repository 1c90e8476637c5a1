"""Large evidence, read by several processes: it is what one process reads."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.fake_campaign import evidence
from tests.meta.evidence.test_tables import recorded
from verify.evidence import Begin, Evidence, EvidenceError, Recorder, apart, load


def written(folder: Path, seed: int = 3) -> Path:
    """A run of four workers, whose cases come again and again in all of them; a line of each is cut
    short, and one case has no verdict."""
    draw = random.Random(seed)
    known = evidence(2)
    for worker in range(4):
        with Recorder(folder, f"gw{worker}") as recorder:
            for each in (*known.runs, *known.variants, *known.drawn, *known.builds):
                recorder.write(each)
            for verdicts in recorded(draw):
                recorder.begin(verdicts[0].case, "generate", "v")
                recorder.write_case(verdicts)
            recorder.write(Begin(case=f"lost {worker}", phase="generate", time=9.0, variant="v"))
        with (folder / f"gw{worker}.jsonl").open("a") as file:
            file.write('{"kind":"begin","ca\n')
    return folder


@pytest.fixture(name="apart_or_not")
def _apart_or_not(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two cores, and evidence of any size is large."""
    monkeypatch.setattr(apart, "_LARGE", 1)
    monkeypatch.setattr(apart, "cores", lambda: 2)
    return monkeypatch


def everything(found: Evidence) -> str:
    return repr((replace(found, verdicts=()), tuple(found.verdicts)))


def ties(found: Evidence) -> list[list[float]]:
    """The places of all rows in the order of reading, which decides where times are equal."""
    return [[t.number(row) for row in range(len(t.cases))] for t in found.verdicts.tables]


@pytest.mark.parametrize("seed", range(3))
def test_two_processes_read_what_one_does(
    tmp_path: Path, apart_or_not: pytest.MonkeyPatch, seed: int
) -> None:
    folder = written(tmp_path / "run", seed)
    several = load(folder)
    apart_or_not.setattr(apart, "cores", lambda: 1)
    one = load(folder)
    assert several.torn == tuple(
        f"gw{worker}.jsonl:{one.torn[worker].rpartition(':')[2]}" for worker in range(4)
    )
    assert len(several.lost) == 4
    assert several.verdicts.failing
    assert everything(several) == everything(one)
    assert ties(several) == ties(one)
    assert several.verdicts.first_with_words == one.verdicts.first_with_words


def test_each_process_reads_some_of_the_files(
    tmp_path: Path, apart_or_not: pytest.MonkeyPatch
) -> None:
    """None of them is read here."""
    folder = written(tmp_path / "run")

    def here(*arguments: object) -> None:
        pytest.fail("this process reads")

    expected = everything(load(folder))
    apart_or_not.setattr(apart, "read_file", here)
    assert everything(load(folder)) == expected


@pytest.mark.parametrize("kept", [None, 0, 5000])
def test_what_a_lost_process_does_not_read_is_read_here(
    tmp_path: Path, apart_or_not: pytest.MonkeyPatch, kept: int | None
) -> None:
    """It wrote so many bytes before it was lost; None: it cannot be started."""
    folder = written(tmp_path / "run")
    expected = everything(load(folder))
    dying = tmp_path / "python"
    if kept is not None:
        dying.write_text(f"#!/bin/sh\n'{sys.executable}' \"$@\" | head -c {kept}\n")
        dying.chmod(0o755)
    apart_or_not.setattr(sys, "executable", str(dying))
    assert everything(load(folder)) == expected


def test_a_line_that_is_no_record_is_named(
    tmp_path: Path, apart_or_not: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "run")
    (folder / "gw2.jsonl").write_text('\n{"kind":"gossip"}\n')
    with pytest.raises(EvidenceError, match=r"^gw2\.jsonl:2: kind 'gossip' is none of "):
        load(folder)


def test_shares_are_as_equal_as_files_are() -> None:
    sizes = {Path(name): size for name, size in zip("abcdefg", (9, 1, 5, 4, 0, 0, 8), strict=True)}
    shares = apart._shares(sizes, 3)
    assert sorted(path for share in shares for path in share) == sorted(sizes)
    assert sorted(sum(map(sizes.__getitem__, share)) for share in shares) == [9, 9, 9]
    assert all(apart._shares(dict.fromkeys(sizes, 0), 7))
