"""Every command that README.md, CONTRIBUTING.md or docs/ names is run: by .ci/run, or by a test.

A command counts as run where RUNS says, and RUNS is held against the file and the function that it
names.  To document a new command or option, run it in a test and add a line.
"""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.documented_commands import Place, ci, documented, of, parts, wheel
from verify import __version__, cli
from verify.campaign.runner import FAILED, RunRequest
from verify.cell.discovery import Roster
from verify.cli.sanitize_choice import Request
from verify.problem.case import Case

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


HERE = "test_documented_commands"
SANITIZE = (HERE, "test_sanitize_reaches_the_lane_with_its_options")
RUN = (HERE, "test_run_is_told_its_options")
OUTSIDE = ("test_outside_oracle", "test_a_campaign_asks_an_oracle_of_one_file")
KILLED = ("test_killed_processes", "start")
LOCAL = ("test_campaign_command", "test_local_workers_convict_a_wrong_kernel_and_stop")
TERMS = ("test_verdict_page", "test_the_terms_are_what_the_command_prints")

RUNS = {
    "verify": wheel('verify, "--version"'),
    "verify --version": wheel('verify, "--version"'),
    "verify --help": of(HERE, "test_help", '"--help"'),
    "verify run": wheel('verify, "run", "right.py"'),
    "verify run FOLDER/": of(
        "test_helper_files", "test_a_folder_means_its_python_files", '"run", "kernels/"'
    ),
    "verify run --examples": wheel('"right.py", "--examples"'),
    "verify run -k": of(
        "test_cli", "test_names_that_match_nothing_are_answered_with_those_that_exist", '"-k"'
    ),
    "verify run -x": wheel('"run", "wrong.py", "-x"'),
    "verify run --seed": of(*RUN, '"--seed"'),
    "verify run -n": of(*RUN, '"-n"'),
    "verify run --oracle": of(*OUTSIDE, '"--oracle", "sign.py"'),
    "verify run --all-configs": of(
        "test_all_configs",
        "test_a_kernel_that_is_wrong_in_a_further_config_is_convicted_there",
        '"--all-configs"',
    ),
    "verify fuzz": wheel('"fuzz", "wrong.py"'),
    "verify fuzz --max-time": wheel('"--max-time"'),
    "verify fuzz --keep-going": of(HERE, "test_fuzz_keeps_going", '"--keep-going"'),
    "verify run --shard": of(
        "test_shards", "test_reports_of_shards_are_the_whole_runs", '"--shard"'
    ),
    "verify campaign": of(*KILLED, '"verify", "campaign"'),
    "verify campaign --local": of(*LOCAL, '"--local"'),
    "verify campaign --seeds": of(*LOCAL, '"--seeds"'),
    "verify campaign --ssh": of(
        "test_campaign_command", "test_hosts_start_their_workers_by_ssh", '"--ssh"'
    ),
    "verify campaign --scheduler": of(*KILLED, '"--scheduler", '),
    "verify campaign --scheduler-file": of(*KILLED, '"--scheduler-file"'),
    "verify campaign --run-id": of(*KILLED, '"--run-id"'),
    "verify campaign --join": of(*KILLED, '"--join"'),
    "verify replay": wheel('verify, "replay", CASE'),
    "verify replay --oracle": of(*OUTSIDE, '"--oracle", str(sign)'),
    "verify report": wheel('verify, "report", "--examples"'),
    "verify report --out": wheel('"--out", "pages"'),
    "verify report --run": wheel('"report", "--run", "right"'),
    "verify report --render": of(
        "test_report_beside", "test_the_command_writes_the_pages_again", '"report", "--render"'
    ),
    "verify report --schema": of(
        "test_json_schema", "test_the_command_writes_them", '"report", "--schema"'
    ),
    "verify compare": wheel('verify, "compare"'),
    "verify recheck": ci("python3 -m verify recheck reports"),
    "verify witness": of("test_witness", "test_the_command_lists_and_writes", '"witness"'),
    "verify witness --write": of("test_witness", "test_the_command_lists_and_writes", '"--write"'),
    "verify list": wheel('"-m", "verify", "list"'),
    "verify oracles": of(HERE, "test_oracles", '"oracles"'),
    "verify oracles --table": of(HERE, "test_oracles", '"--table"'),
    "verify bench": wheel('verify, "bench", "suite", "--seconds"'),
    "verify bench mutants": of("test_bench_mutants", "asked", '"bench", "mutants"'),
    "verify bench --suite": of("test_bench", "test_select_dtype_and_time", '"--suite"'),
    "verify bench --seconds": of("test_bench", "test_select_dtype_and_time", '"--seconds"'),
    "verify bench --continue": of("test_bench", "test_a_cut_run_goes_on", '"--continue"'),
    "verify bench --best": of(
        "test_bench", "test_a_trial_finds_the_config_that_is_timed_first_or_alone", '"--best"'
    ),
    "verify sanitize": ci("tox -e sanitizer"),
    "verify sanitize --quick": of(*SANITIZE, '"--quick"'),
    "verify sanitize --require": of(*SANITIZE, '"--require"'),
    "verify sanitize --case": of(*SANITIZE, '"--case"'),
    "verify sanitize --planted-only": of(*SANITIZE, '"--planted-only"'),
    "verify sanitize --repeat": of(*SANITIZE, '"--repeat"'),
    "verify sanitize --time": of(*SANITIZE, '"--time"'),
    "verify sanitize --add": of(*SANITIZE, '"--add"'),
    "verify sanitize --tool": of(*SANITIZE, '"--tool"'),
    "verify sanitize --report-dir": of(*SANITIZE, '"--report-dir"'),
    "verify sanitize --render": of(*SANITIZE, '"--render"'),
    "verify probe": of(
        "test_probes_report", "test_without_a_gpu_every_probe_is_listed_as_not_run", '"probe"'
    ),
    "verify probe --only": of(
        "test_probes_gradient_order", "said_by_the_command", '"--only", "gradients"'
    ),
    "verify profile": of("test_profiling", "test_the_command_is_told_its_options", '"profile"'),
    "verify setup": of("test_extras", "set_up", '"setup", "cute"'),
    "verify test": ci("python3 -m verify test --profile ci"),
    "verify test --profile": ci("python3 -m verify test --profile ci"),
    "verify test --thorough": of(
        "test_tier",
        "test_what_is_left_out_is_counted_by_a_worker_and_said_by_the_first_process",
        "tier.COMMAND",
    ),
    "references.masks": of(HERE, "test_masks_are_drawn", '"references.masks"'),
    "tests.bound_terms": of(*TERMS, "bound_terms.main(words)"),
    "tests.bound_terms --index": of(*TERMS, "bound_terms.main(words)"),
    "tests.bound_terms --arch": of(*TERMS, "bound_terms.main(words)"),
    "tests.known_roundings_sweep": of(
        "test_known_forward", "test_the_sweep_refuses_what_is_wrong", "known_roundings_sweep.main("
    ),
    "tests.exact_sums_sweep": of(
        "test_oracles_exact_sums", "test_the_sweep_refuses_what_is_wrong", "exact_sums_sweep.main("
    ),
    "tests.log_sum_sweep": of(
        "test_log_sum", "test_the_sweep_refuses_what_is_wrong", "log_sum_sweep.main("
    ),
    "tests.honest_sweep": of(
        "test_honest_sweep", "test_a_sweep_goes_on_and_counts", "honest_sweep.main("
    ),
    "tests.honest_sweep --show": of(
        "test_honest_sweep", "test_a_sweep_goes_on_and_counts", '"--show"'
    ),
    "tests.honest_sweep --share": of(
        "test_honest_sweep", "test_the_journals_of_shares_are_one_journal_together", '"--share"'
    ),
    "tests.honest_sweep --device": of(
        "test_honest_sweep", "test_the_journals_of_shares_are_one_journal_together", '"--device"'
    ),
    "tests.faults": of(HERE, "test_faults_are_searched_for", '"tests/faults/__main__.py"'),
    "tests.mutants": of(
        "test_mutants", "test_the_command_hunts_and_writes", '"tests/mutants/__main__.py"'
    ),
    "tests.mutants --cuda": of(
        "test_mutants", "test_the_command_takes_the_cuda_sources", '"tests.mutants", "--cuda"'
    ),
    "pytest": Place("tox.ini", "-m pytest -n auto"),
    "pytest -n": Place("tox.ini", "-m pytest -n auto"),
    "pytest --kernel": Place("verify/campaign/runner.py", '"--kernel", str(kernel)'),
    "pytest -k": Place("tests/meta/door/test_plugin.py", '"-k", "accuracy or counting'),
    "pytest --oracle": Place("verify/campaign/runner.py", '"--oracle", str(oracle)'),
    "tox": ci("tox -e py"),
    "tox -e py": ci("tox -e py"),
    "tox -e report": ci("tox -e report"),
    "tox -e gpu": ci("without_device tox -e gpu"),
    "tox -e sanitizer": ci("without_device tox -e sanitizer"),
    "tox -e sanitizer-full": ci("without_device tox -e sanitizer-full"),
    "tox -e sanitizer-newer": ci("without_device tox -e sanitizer-newer"),
    "tox -e lint": ci("tox -e lint"),
    "tox -e docs": ci("tox --current-env -e docs"),
    "tox -e gpu --current-env": ci("tox --current-env -e gpu"),
    "tox -e sanitizer --current-env": ci("tox --current-env -e sanitizer"),
    "pip install": wheel('"-m", "pip", "install"'),
    "pip install --no-deps": wheel('"--no-deps"'),
    "pip install -e": Place("verify/bootstrap.py", '"--editable"'),
    "pip install -c": Place("verify/bootstrap.py", '"--constraint"'),
    "pip install --no-index": ci("pip install --no-index"),
    "pip install --find-links": ci("--find-links"),
    "pip download": ci("pip download -d"),
    "pip download -d": ci("pip download -d"),
    "build": wheel('"-m", "build"'),
}


NAMED = {
    part: f"{page.relative_to(ROOT).as_posix()}: {command}"
    for page in PAGES
    for command in documented(page.read_text(encoding="utf-8"))
    for part in parts(command)
}


@pytest.mark.parametrize("part", NAMED)
def test_a_documented_command_is_run(part: str) -> None:
    place = RUNS.get(part)
    where = NAMED[part]
    assert place is not None, (
        f"{where}: no test runs `{part}`; run it in a test, and add it to RUNS"
    )
    assert place.holds(), f"{where}: `{part}` is not run any more where RUNS says: {place}"


def test_commands_are_found_and_taken_apart() -> None:
    page = """
Say `python3 -m verify report --run A` or `verify.problem`, `verify/cell`, `tox -e gpu`.
```sh
FLAG=1 python -m verify run k.py -k "a b" --examples 2   # a comment with `tox`
tox --current-env -e gpu
```
```python
verify = 1
```
Then `python -m references.masks`, `verify run mine/`, `pytest -n auto`,
`.venv/bin/python -m build`.
"""
    assert [parts(command) for command in documented(page)] == [
        ["verify run", "verify run -k", "verify run --examples"],
        ["tox -e gpu", "tox -e gpu --current-env"],
        ["verify report", "verify report --run"],
        ["tox -e gpu"],
        ["references.masks"],
        ["verify run", "verify run FOLDER/"],
        ["pytest", "pytest -n"],
        ["build"],
    ]


def test_what_stands_nowhere_does_not_count() -> None:
    here = f"tests/meta/cli/{HERE}.py"
    assert not Place(here, "never " + "written").holds()
    assert not Place(here, '"--table"', "test_help").holds()
    assert not Place("tests/meta/test_nowhere.py", "").holds()


def test_the_wheel_is_tried_by_ci() -> None:
    assert ci(".venv/bin/python .ci/wheel").holds()


def verify(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verify", *words])
    return cli.main()


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(monkeypatch, "run", "--help") == 0
    assert "KERNELS" in capsys.readouterr().out
    assert verify(monkeypatch, "--version") == 0
    assert __version__ in capsys.readouterr().out


def test_oracles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert verify(monkeypatch, "oracles") == 0
    assert "empty_rows" in capsys.readouterr().out
    monkeypatch.setattr("verify.campaign.applicability.PATH", tmp_path / "table.md")
    monkeypatch.setattr("verify.campaign.derivations.PATH", tmp_path / "oracles.md")
    monkeypatch.setattr("verify.campaign.applicability.roster", lambda: Roster((), ()))
    assert verify(monkeypatch, "oracles", "--table") == 0
    for page in ("table.md", "oracles.md"):
        assert "empty_rows" in (tmp_path / page).read_text(encoding="utf-8")


def test_sanitize_reaches_the_lane_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_sanitizer_run.py tests the lane itself, with a fake tool."""
    asked: list[Request] = []
    monkeypatch.setattr("verify.cli.sanitize.sanitize", lambda it, console: asked.append(it))
    case = "ptx-split-q:m64n64s1-swizzle_qkv-grid_tiles:sanitizer:sq=64,skv=64,d=64,dtype=float16"
    verify(monkeypatch, "sanitize", "--quick", "--require")
    verify(monkeypatch, "sanitize", "--case", case)
    verify(monkeypatch, "sanitize", "--planted-only")
    verify(monkeypatch, "sanitize", "--tool", "skew")
    verify(monkeypatch, "sanitize", "--time", "480")
    earlier = str(ROOT / "reports" / "nvidia-h100-80gb-hbm3" / "sanitizer.json")
    verify(monkeypatch, "sanitize", "--planted-only", "--add", earlier)
    assert [path.name for path in asked.pop().earlier] == ["sanitizer.json"]
    written: list[tuple[object, ...]] = []
    monkeypatch.setattr("verify.cli.sanitizer_pages.render_again", lambda *it: written.append(it))
    verify(monkeypatch, "sanitize", "--render", earlier, "--add", earlier, "--report-dir", "out")
    ((file, more, folder, _),) = written
    assert (file, more, folder) == (Path(earlier), (Path(earlier),), Path("out"))
    verify(monkeypatch, "sanitize", "--planted-only", "--repeat", "10", "--tool", "consan")
    last = asked.pop()
    assert (last.planted_only, last.repeat, last.tools) == (True, 10, ("consan",))
    assert {request.repeat for request in asked} == {1}
    given = [(request.quick, request.planted_only, request.require) for request in asked]
    nothing = (False, False, False)
    assert given == [(True, False, True), nothing, (False, True, False), nothing, nothing]
    assert [request.case for request in asked] == [None, Case.parse(case), None, None, None]
    assert asked[-2].tools == ("skew",)
    assert [request.time for request in asked] == [math.inf] * 4 + [480.0]


def test_run_is_told_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The options reach the campaign unchanged."""
    asked: list[RunRequest] = []
    monkeypatch.setattr("verify.cli.run.execute", lambda order, *_: asked.append(order))
    monkeypatch.setattr("verify.cli.run.conclude", lambda order, search, **how: search())
    kernel = tmp_path / "my_attention.py"
    kernel.touch()
    verify(monkeypatch, "run", str(kernel), "-x", "--seed", "2", "-n", "0")
    (order,) = asked
    assert (order.exit_first, order.seed, order.workers) == (True, 2, "0")


def test_fuzz_keeps_going(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search continues after a conviction until the time is over; without the option it
    stops."""
    rounds: list[int | None] = []

    def judge(order: RunRequest, console: object, deadline: float) -> int:
        rounds.append(order.seed)
        time.sleep(0.05)
        return FAILED

    monkeypatch.setattr("verify.cli.run.execute", judge)
    monkeypatch.setattr("verify.cli.run.conclude", lambda order, search, **how: search())
    assert verify(monkeypatch, "fuzz", "--max-time", "60") == FAILED
    assert len(rounds) == 1
    assert verify(monkeypatch, "fuzz", "--max-time", "0.5", "--keep-going") == FAILED
    assert len(rounds) > 2


def test_masks_are_drawn() -> None:
    command = [sys.executable, "-m", "references.masks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "causal" in done.stdout


def test_faults_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs for no fault, because the search for all takes an hour; test_faults.py replays it."""
    monkeypatch.setattr("tests.faults.catalogue.FAULTS", ())
    monkeypatch.setattr(sys, "argv", ["faults"])
    runpy.run_path(str(ROOT / "tests/faults/__main__.py"), run_name="__main__")
