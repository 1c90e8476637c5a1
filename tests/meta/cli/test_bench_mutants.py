"""`verify bench mutants`: what is judged, what is printed and kept, and where nothing can be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.cuda.mutant import chosen as cuda_chosen
from tests.mutants.mutant import Mutant
from tests.mutants.rate import rate, rates, sample
from tests.mutants.record import CUDA, KILLED, TRITON, Ledger
from tests.mutants.triton.mutant import chosen
from verify import cli
from verify.timing.mutants import NAME, MutantRate, parse, per_minute


def one(language: str, judged: int, convicted: int, seconds: float, reason: str = "") -> MutantRate:
    return {
        "language": language,
        "sample": 20,
        "judged": judged,
        "convicted": convicted,
        "seconds": seconds,
        "reason": reason,
    }


@pytest.mark.parametrize(("mutants", "ledger"), [(chosen(), TRITON), (cuda_chosen(), CUDA)])
def test_the_sample_is_two_convicted_mutants_of_each_file(
    mutants: list[Mutant], ledger: Ledger
) -> None:
    picked = sample(mutants, ledger)
    entries = ledger.load()
    assert {entries[mutant.id].how for mutant in picked} == {KILLED}
    assert set(Counter(mutant.edited for mutant in picked).values()) == {2}
    assert {mutant.edited for mutant in picked} == {mutant.edited for mutant in mutants}


def test_a_rate_counts_what_was_judged_in_its_time() -> None:
    some = chosen()[:4]
    found = rate("Triton", some, lambda mutant: mutant is not some[1], 60)
    assert (found["sample"], found["judged"], found["convicted"]) == (4, 4, 3)
    assert rate("Triton", some, lambda mutant: True, -1)["judged"] == 0


def test_the_rate_of_all_is_of_their_sum() -> None:
    given = [one("Triton", 10, 10, 20.0), one("CUDA", 5, 5, 10.0), one("CuTe", 0, 0, 0.0, "none")]
    assert per_minute(given) == 30
    assert per_minute(given[2:]) == 0


def asked(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    lines: list[MutantRate] | None = None,
    error: str = "",
) -> int:
    if lines is not None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        answer = subprocess.CompletedProcess[str]([], bool(error), text, error)

        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            assert command[1:] == ["-m", "tests.mutants.rate", "3.0"]
            return answer

        monkeypatch.setattr("verify.cli.bench_mutants.subprocess.run", run)
    monkeypatch.setattr("verify.machine.device.slug", lambda: "here")
    monkeypatch.setattr("verify.machine.device.fingerprint", lambda: {"name": "here"})
    monkeypatch.setattr(sys, "argv", ["verify", "bench", "mutants", *words])
    return cli.main()


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([one("Triton", 10, 10, 20.0), one("CUDA", 5, 5, 10.0)], 0),
        ([one("Triton", 10, 9, 20.0), one("CUDA", 5, 5, 10.0)], 1),
        ([one("Triton", 10, 10, 20.0), one("CUDA", 0, 0, 0.0, "no C++ compiler")], 0),
        ([one("Triton", 0, 0, 0.0, "no"), one("CUDA", 0, 0, 0.0, "no")], 3),
    ],
    ids=["all", "one lost", "one language", "none"],
)
def test_it_prints_and_keeps_the_rates(
    given: list[MutantRate],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(["--seconds", "3", "--out", str(tmp_path)], monkeypatch, given) == code
    record = parse((tmp_path / "here" / NAME).read_text(encoding="utf-8"))
    assert record["rates"] == given
    said = " ".join(capsys.readouterr().out.split())
    assert f"{per_minute(given):.1f} mutants killed a minute" in said
    assert all(line["reason"] in said for line in given)


def test_a_failure_of_the_judge_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seconds", "3", "--out", str(tmp_path)]
    assert asked(words, monkeypatch, [], "Traceback\nValueError: no kernel") == 3
    assert capsys.readouterr().out.splitlines() == ["verify bench mutants: ValueError: no kernel"]


def test_a_wheel_has_no_mutants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verify.cli.bench_mutants.ROOT", tmp_path)
    assert asked(["--out", str(tmp_path)], monkeypatch) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert "an installed wheel has no mutants" in line
    assert not (tmp_path / "here").exists()


@pytest.mark.for_ci
def test_a_mutant_of_each_language_is_judged() -> None:
    """With time for one each, or a language that says why it has none."""
    found = list(rates(1e-3))
    assert [one["language"] for one in found] == ["Triton", "CUDA"]
    for one_rate in found:
        assert one_rate["reason"] or one_rate["judged"] == one_rate["convicted"] == 1
