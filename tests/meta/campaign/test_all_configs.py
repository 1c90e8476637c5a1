"""`verify run --all-configs`: further configs are judged with it, and only named without it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.commands import verify
from tests.harness.property_cases import SAMPLES
from verify import report as accuracy
from verify.campaign.judged import of_evidence
from verify.campaign.run import CampaignRun
from verify.cli import main
from verify.cli.bench_selection import Request, select
from verify.evidence import load
from verify.evidence.known_failures import Xfails
from verify.timing.workloads import Suite, of_shapes
from verify.variant import Config

RIGHT, WRONG = ("n16", "n32"), "n64"


@pytest.mark.for_ci
def test_a_kernel_that_is_wrong_in_a_further_config_is_convicted_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Path(shutil.copy(SAMPLES / "wrong_further.py", tmp_path))
    chosen = "-k", "within_its_bounds", "--examples", "2", "--workers", "0", "--run-id", "all"
    done = verify("run", kernel, "--all-configs", *chosen, cwd=tmp_path)
    assert done.returncode == 1, done.stdout

    monkeypatch.chdir(tmp_path)
    all_ = load(tmp_path / ".verify" / "runs" / "all")
    assert {verdict.config for verdict in all_.verdicts} == {*RIGHT, WRONG}
    failed = {verdict.config for verdict in all_.verdicts if verdict.outcome == "fail"}
    assert failed == {WRONG}

    # A report names the configs that were judged, and counts the others.
    few = replace(all_, verdicts=[one for one in all_.verdicts if one.config == "n16"])
    (before,), (after,) = (accuracy.build(each)["variants"] for each in (few, all_))
    assert (before["configs"], before["further_configs"]) == (["n16"], 2)
    assert after["configs"] == [*RIGHT, WRONG]
    assert "further_configs" not in after

    # A case of a further config needs no flag.
    case = next(verdict.case for verdict in all_.verdicts if verdict.outcome == "fail")
    monkeypatch.setattr(sys, "argv", ["verify", "replay", case])
    assert main() == 1

    # A benchmark times those that pass.
    run = CampaignRun(tmp_path / "again", "dev", (kernel,))
    (declared,) = run.roster.declarations
    known = of_evidence(all_, {declared.ref: declared.source_hash}, Xfails(()))
    suite = Suite(of_shapes([(1, 1, 64, 16)], ("forward",), ("full",)))
    request = Request(kernels=(kernel,), suite=suite, named="own", folder=tmp_path)
    candidates, left = select(request, [declared], known)
    assert {candidate.config for candidate in candidates} == {Config(block_n=n) for n in (16, 32)}
    assert left == []


def test_targets_of_further_configs_are_those_of_the_flag(tmp_path: Path) -> None:
    kernel = SAMPLES / "wrong_further.py"
    few = CampaignRun(tmp_path / "run", "dev", (kernel,))
    (declared,) = few.roster.declarations
    assert declared.further_configs == ("n32", "n64")
    assert [target.config.name for target in few.targets("accuracy")] == ["n16"]
    all_ = CampaignRun(few.directory, "dev", (kernel,), all_configs=True)
    assert [target.config.name for target in all_.targets("accuracy")] == [*RIGHT, WRONG]
    with pytest.raises(KeyError, match=r"no config 'n48' \(configs: n16 and 2 more\)"):
        declared.config("n48")
