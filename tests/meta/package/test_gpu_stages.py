"""`.ci/gpu`: stages in their order and their time, evidence that travels, a second GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from verify.bundle import ROOT

SCRIPT = ROOT / ".ci" / "gpu"
# In place of python3: it notes what it is asked, and leaves evidence as the judge does.
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && exit "${NO_DEVICE:-0}"
echo "gpu ${CUDA_VISIBLE_DEVICES:-all}: $*" >>asked
while [ $# != 0 ]; do
    if [ "$1" = --run-id ]; then
        mkdir -p ".verify/runs/$2" && echo "${EVIDENCE:-new}" >>".verify/runs/$2/gw0.jsonl"
    fi
    shift
done
exec sleep "${LASTS:-0}"
"""

pytestmark = pytest.mark.skipif(
    not SCRIPT.is_file() or shutil.which("xz") is None, reason="no checkout, or no xz"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A tree with two kernel files of a family, and `python3` before the real one on PATH."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "gpu")
    family = tmp_path / "kernels" / "ptx"
    family.mkdir(parents=True)
    for name, text in {"a": "VARIANT = 1", "b": "VARIANTS = []", "tiling": "x = 1"}.items():
        (family / f"{name}.py").write_text(f"{text}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    return tmp_path


def stages(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [place / ".ci" / "gpu", place / "kept", *words],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def asked(place: Path) -> list[str]:
    return (place / "asked").read_text().splitlines()


def test_without_a_device_it_says_so(place: Path) -> None:
    done = stages(place, "60", "ptx", NO_DEVICE="1")
    assert (done.returncode, done.stdout) == (3, "verify: no CUDA device\n")
    assert not (place / "kept").exists()


def test_a_family_is_judged_and_its_evidence_goes_on_on_the_next_runner(place: Path) -> None:
    assert stages(place, "60", "ptx", "more:ptx").returncode == 0
    run = "-m verify run kernels/ptx/a.py kernels/ptx/b.py --profile gpu --run-id"
    assert asked(place) == [
        f"gpu all: {run} ptx --examples 8 --seed 77",
        f"gpu all: {run} more-ptx --examples 12 --seed 78 -k not long",
    ]
    shutil.rmtree(place / ".verify")
    assert stages(place, "60", "ptx", EVIDENCE="newer").returncode == 0
    with tarfile.open(place / "kept" / "evidence.tar.xz") as kept:
        kept.extractall(place / "seen", filter="data")
    runs = place / "seen" / "runs"
    assert (runs / "ptx" / "gw0.jsonl").read_text() == "new\nnewer\n"
    assert (runs / "more-ptx" / "gw0.jsonl").read_text() == "new\n"


def test_a_stage_ends_in_its_time_and_the_next_one_follows(place: Path) -> None:
    done = stages(place, "60", "ptx@11", "conflicts@11", LASTS="0.1")
    assert re.search(r"== ptx: exit 0 after \d s of 11", done.stdout)
    assert "== conflicts: exit 0" in done.stdout
    assert [line.split()[3] for line in asked(place)] == ["verify", "pytest"]
    late = stages(place, "20", "ptx", LASTS="0")
    assert "ptx: no time left" in late.stdout
    assert len(asked(place)) == 2


def test_stages_run_beside_others_on_a_second_gpu(place: Path) -> None:
    done = stages(place, "60", "+conflicts,probe", "ptx", "wait", "sanitizer")
    assert done.returncode == 0, done.stderr
    gpus = {line.split()[3:5][-1]: line.split(":")[0] for line in asked(place)}
    assert gpus == {"-n": "gpu 1", "probe": "gpu 1", "run": "gpu 0", "sanitize": "gpu all"}


def test_a_word_that_is_no_stage_ends_it(place: Path) -> None:
    done = stages(place, "60", "pxt")
    assert (done.returncode, done.stdout) == (2, "pxt is no stage\n")
