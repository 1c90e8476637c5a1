"""An oracle from outside the tree is one file: drawn, judged, shown, and asked by default about no
feature that it has never heard of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from references.premises import EVERY_PREMISE
from tests.harness.commands import verify
from tests.harness.fake_trials import PLAIN, right_run, tried
from tests.meta.problem.test_premises import Unheard, with_feature
from verify import cli
from verify.bundle import ROOT
from verify.campaign.run import CampaignRun, ContinuedError
from verify.campaign.runner import FAILED
from verify.evidence import load
from verify.machine.outside_file import OutsideFileError
from verify.oracles import files_of, groups, of_group, oracles, use_files

# The file that docs/adding-an-oracle.md shows.
PAGE = (ROOT / "docs" / "adding-an-oracle.md").read_text(encoding="utf-8")
ORACLE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
KERNEL = '''
"""A plain kernel."""
import torch


def attention(q, k, v, *, softmax_scale):
    scores = q.float() @ k.float().mT * softmax_scale
    out = torch.softmax(scores, dim=-1) @ v.float()
    return out.to(q.dtype)
'''
# An ulp towards 0, of negative numbers alone: within every bound, and scaled by powers of two.
FAULT = "    out = torch.where(out < 0, torch.nextafter(out, torch.zeros_like(out)), out)\n"


@pytest.fixture
def sign(tmp_path: Path) -> Iterator[Path]:
    """The oracle's file, of which this process has no oracle when the test is over."""
    path = tmp_path / "sign.py"
    path.write_text(ORACLE, encoding="utf-8")
    yield path
    use_files([])


@pytest.mark.for_ci
@pytest.mark.long(20)
def test_a_campaign_asks_an_oracle_of_one_file(sign: Path, tmp_path: Path) -> None:
    """In the workers of a campaign; a replay asks it, too."""
    (tmp_path / "right.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(KERNEL.replace("    return", FAULT + "    return"))
    words = ["run", "right.py", "wrong.py", "--oracle", "sign.py", "-n", "2", "--seed", "1"]
    words += ["--examples", "14", "--run-id", "one", "-k", "answers_exactly and float32"]
    done = verify(*words, cwd=tmp_path)
    assert done.returncode == FAILED, done.stdout

    evidence = load(tmp_path / ".verify" / "runs" / "one")
    assert re.fullmatch(r"sign\.py \w{12}", evidence.runs[-1].versions["oracles"])
    asked = [verdict for verdict in evidence.verdicts if verdict.oracle == "sign"]
    right = {verdict.outcome for verdict in asked if verdict.variant.startswith("right")}
    assert right == {"pass"}
    failed = [verdict for verdict in evidence.verdicts if verdict.outcome == "fail"]
    assert {(verdict.variant.partition("@")[0], verdict.oracle) for verdict in failed} == {
        ("wrong.py", "sign")
    }
    assert failed[0].finding is not None
    assert failed[0].finding.message.startswith("with V negated: out should keep its bits")
    assert failed[0].finding.replay.endswith(" --oracle sign.py")

    (report,) = (tmp_path / ".verify" / "report").glob("*/report.json")
    variants = json.loads(report.read_text(encoding="utf-8"))["variants"]
    shown = {
        (
            variant["ref"].partition("@")[0],
            oracle["oracle"],
            oracle["group"],
            oracle["failures"] > 0,
        )
        for variant in variants
        for dtype in variant["dtypes"]
        for oracle in dtype["oracles"]
        if oracle["oracle"] == "sign"
    }
    assert shown == {("right.py", "sign", "sign", False), ("wrong.py", "sign", "sign", True)}

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        words = ["replay", failed[0].case, "--oracle", str(sign)]
        again = CliRunner().invoke(cli.app, words, standalone_mode=False)
    assert again.return_value == FAILED, again.output
    run = CampaignRun(tmp_path / ".verify" / "runs" / "one", "dev", (tmp_path / "right.py",))
    use_files([])
    with pytest.raises(ContinuedError, match=r"run one used other files of oracles \(--oracle\)"):
        run.resume()


def test_an_oracle_is_not_asked_about_what_it_has_never_heard_of(sign: Path) -> None:
    use_files([sign])
    (oracle,) = of_group("sign")
    trial = tried(PLAIN)
    other = trial.beside("negated", PLAIN)
    other.launches["first"] = right_run(other)
    other.launches["first"].outputs["out"].neg_()
    assert oracle.rule(trial).finding is None
    assert oracle.rule(trial).inapplicable is None
    with with_feature(Unheard(breaks=EVERY_PREMISE)):
        words = "needs exact_output and linear_in_values, which telepathy breaks"
        assert oracle.rule(trial).inapplicable == words


def test_a_file_of_oracles_is_checked_when_it_is_named(sign: Path, tmp_path: Path) -> None:
    before = oracles()
    use_files([sign])
    assert "sign" in groups()
    assert files_of("sign") == (sign,)
    assert files_of("accuracy") == ()
    for text, words in {
        "GROUP = 1": "defines neither ORACLE nor ORACLES",
        "import nowhere": r"does not load: ModuleNotFoundError: .*nowhere",
        ORACLE.replace('name="sign", about', 'name="accuracy", about'): "two oracles define",
        ORACLE.replace('group="sign"', 'group="signs"'): "group: 'signs' is none of accuracy",
    }.items():
        other = tmp_path / "other.py"
        other.write_text(text, encoding="utf-8")
        with pytest.raises(OutsideFileError, match=rf"other\.py.*{words}"):
            use_files([other])
        assert "sign" in groups(), "what was used before stays"
    with pytest.raises(OutsideFileError, match=r"none\.py: no such Python file"):
        use_files([tmp_path / "none.py"])
    use_files([])
    assert oracles() == before
