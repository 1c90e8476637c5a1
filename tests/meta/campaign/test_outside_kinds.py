"""Masks, score mods, storages and quantisations of files outside the tree: the option `--with`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from references.masks import mask_words
from references.score_mods import mod_words
from tests.harness.commands import verify
from tests.harness.outside_mask import CHUNKED
from tests.harness.outside_score_mod import ALIBI, KERNEL
from tests.harness.outside_storage import STORAGES
from verify import cli
from verify.campaign.run import CampaignRun, ContinuedError
from verify.campaign.runner import FAILED, USAGE
from verify.cell.process import ROOT
from verify.evidence import load
from verify.machine.outside_file import OutsideFileError
from verify.machine.settings import KIND_FILES
from verify.problem import Problem, ProblemError, kind_files
from verify.problem.inputs import stored_factors
from verify.problem.storage import storage_words
from verify.tolerance.forward import resolve
from verify.variant import Config, Numerics

HEAD, _, _ = dedent(KERNEL).partition("VARIANTS = [")
KERNELS = HEAD.replace('masks=("full", "causal", "lengths")', 'masks=("chunked",)') + (
    'VARIANTS = [variant("right", right), variant("steeper", steeper)]\n'
)
SEES_ALL = KERNELS.replace(
    "seen = args.mask.dense(args.batch, args.heads_q, *lengths)",
    "seen = torch.ones_like(args.mask.dense(args.batch, args.heads_q, *lengths))",
).replace(', variant("steeper", steeper)', "")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A folder with files of kinds, none of which this process knows when the test is over."""
    (tmp_path / "chunked_mask.py").write_text(CHUNKED, encoding="utf-8")
    (tmp_path / "alibi_mod.py").write_text(dedent(ALIBI), encoding="utf-8")
    (tmp_path / "tiled.py").write_text(STORAGES, encoding="utf-8")
    (tmp_path / "nothing.py").write_text("WIDTH = 3\n", encoding="utf-8")
    yield tmp_path
    kind_files.forget()


def named(patch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    patch.setenv(KIND_FILES, os.pathsep.join(str(folder / name) for name in names))


@pytest.mark.long(30)
@pytest.mark.for_ci
def test_a_campaign_draws_and_judges_kinds_of_files(files: Path) -> None:
    """In workers and cells; replay commands name the files."""
    (files / "kernels.py").write_text(KERNELS, encoding="utf-8")
    (files / "sees_all.py").write_text(SEES_ALL, encoding="utf-8")
    words = ["run", "kernels.py", "sees_all.py", "--with", "chunked_mask.py", "--with"]
    words += ["alibi_mod.py", "-n", "0", "--seed", "1", "--examples", "4", "--run-id", "one"]
    words += ["-k", "is_within_its_bounds and float32"]
    done = verify(*words, cwd=files, variables={"VERIFY_SHRINK_SECONDS": "0"})
    assert done.returncode == FAILED, done.stdout

    evidence = load(files / ".verify" / "runs" / "one")
    kinds = evidence.runs[-1].versions["kinds"].split(", ")
    assert [kind.split()[0] for kind in kinds] == ["chunked_mask.py", "alibi_mod.py"]
    drawn = {verdict.problem for verdict in evidence.verdicts}
    assert all("mask=chunked" in problem for problem in drawn)
    assert any("alibi" in problem for problem in drawn)
    failing = [verdict for verdict in evidence.verdicts if verdict.outcome == "fail"]
    assert {verdict.variant for verdict in failing} == {
        "kernels.py@steeper",
        "sees_all.py@right",
    }
    by_variant = {verdict.variant: verdict for verdict in failing}
    convicted = by_variant["sees_all.py@right"]
    assert convicted.finding is not None
    replayed = shlex.split(convicted.finding.replay)  # python -m verify ...
    assert replayed[-4:] == ["--with", "chunked_mask.py", "--with", "alibi_mod.py"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        again = CliRunner().invoke(cli.app, replayed[3:], standalone_mode=False)
        assert again.return_value == FAILED, again.output
        kind_files.forget()
        alone = CliRunner().invoke(cli.app, replayed[3:-4])
    assert alone.exit_code == USAGE
    assert "chunked" in alone.output
    run = CampaignRun(files / ".verify" / "runs" / "one", "dev", (files / "kernels.py",))
    with pytest.raises(ContinuedError, match=r"run one used other files of kinds \(--with\)"):
        run.resume()
    (report,) = (files / ".verify" / "report").glob("*/report.json")
    assert json.loads(report.read_text(encoding="utf-8"))["variants"]


def test_kinds_of_files_are_known_until_they_are_forgotten(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mask_words(), mod_words(), storage_words()
    named(monkeypatch, files, "chunked_mask.py", "alibi_mod.py", "tiled.py")
    kind_files.load()
    kind_files.load()  # a file is loaded once
    assert {"chunked", "chunked.square"} <= set(mask_words())
    assert "alibi" in mod_words()
    assert {"paged", "tiles"} <= set(storage_words())
    assert [path.name for path in kind_files.used_files()] == [
        "chunked_mask.py",
        "alibi_mod.py",
        "tiled.py",
    ]
    kind_files.forget()
    assert (mask_words(), mod_words(), storage_words()) == before


def test_other_sizes_of_blocks_are_one_file(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/adding-a-kernel.md, whose bound and inputs need nothing else."""
    page = (ROOT / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
    (text,) = (part for part in page.split("```") if part.startswith("py\n# sage.py"))
    (files / "sage.py").write_text(text.removeprefix("py\n"), encoding="utf-8")
    named(monkeypatch, files, "sage.py")
    kind_files.load()
    name = "hq=4,hkv=2,sq=200,skv=200,d=16,dtype=float8_e4m3fn,descale=sage"
    problem = Problem.parse(name)
    assert problem.name == name
    shapes = {name: tuple(factor.shape) for name, factor in stored_factors(problem).items()}
    assert shapes == {
        "descale_q": (1, 4, 2),
        "descale_k": (1, 2, 4),
        "descale_v": (1, 2, 4),
    }
    assert resolve(Numerics(), Config(), problem, "sm_90").parts == 4
    kind_files.forget()
    with pytest.raises(ProblemError, match="sage"):
        Problem.parse(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("WIDTH = 3\n", r"kinds\.py defines no mask, score mod, storage or quant"),
        ("import nowhere_at_all\n", r"kinds\.py does not load: ModuleNotFoundError: No module"),
        (CHUNKED + "\nraise ValueError('late')\n", r"kinds\.py does not load: ValueError: late"),
        (CHUNKED.replace('"chunked"', '"causal"'), r"does not load: TypeError: mask kind: "),
    ],
    ids=["nothing", "import", "late", "taken"],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(
    text: str, said: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no kind behind."""
    before = mask_words()
    (files / "kinds.py").write_text(text, encoding="utf-8")
    named(monkeypatch, files, "kinds.py")
    with pytest.raises(OutsideFileError, match=said) as refusal:
        kind_files.load()
    assert "\n" not in str(refusal.value)
    assert mask_words() == before
    assert kind_files.used_files() == ()


def test_a_file_cannot_hide_another_module(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "json.py").write_text(CHUNKED, encoding="utf-8")
    named(monkeypatch, files, "json.py")
    with pytest.raises(
        OutsideFileError, match=r"another module has the name json: rename the file"
    ):
        kind_files.load()


def test_the_option_names_the_file_that_it_refuses(files: Path) -> None:
    case = "x:default:accuracy:b=1,hq=1,hkv=1,sq=1,skv=1,d=8,dtype=float32"
    for name, said in (
        ("missing.py", "does not exist"),
        ("nothing.py", "--with: "),
    ):
        words = ["replay", case, "--with", str(files / name)]
        done = CliRunner().invoke(cli.app, words)
        assert done.exit_code == USAGE
        assert said in done.output
        assert name in done.output
    assert KIND_FILES not in os.environ
