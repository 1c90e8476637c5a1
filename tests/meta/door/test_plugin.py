"""The pytest plugin in somebody else's session: items, selection, JUnit, and no trace without its
option."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from tests.meta.door.test_checking import run
from verify.bundle import ROOT
from verify.door import checking
from verify.door.plugin import PROPERTIES
from verify.machine.defaults import Defaults

WRONG = """
import torch

LAYOUT = "bhsd"
DTYPES = ("float32",)
HEAD_DIMS = (16,)
WITHIN = {"max_seqlen": 24}


def attention(q, k, v):
    out = torch.softmax(q @ k.mT * (q.shape[-1] ** -0.5), -1) @ v
    out[:, :, 12:] *= 1.01
    return out
"""
# Instead of a campaign: one property fails, whatever is asked; and a line for each campaign.
ACCURACY_FAILS = """
from verify.door import plugin


def judged(kernel, names, examples):
    with open("asked.txt", "a") as asked:
        print(*names, file=asked)
    return plugin.Conclusion({"accuracy": ["out is off by 1"]}, frozenset(names))


plugin._judged = judged
"""
PLUGIN = ("-p", "verify.door.plugin", "-p", "no:cacheprovider", "-p", "no:attention-verify")


def test_every_property_test_has_an_item() -> None:
    tree = ast.parse((ROOT / "tests/properties/test_attention.py").read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    asked = {test for tests_of in PROPERTIES.values() for test in tests_of}
    own = {"test_loads", "test_holds_where_it_was_worst", "_hold_each", "_hold_first_of_each"}
    assert asked == tests - own


def test_one_item_for_each_property(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG, encoding="utf-8")
    right = WRONG.replace("1.01", "1.0")
    (tmp_path / "right.py").write_text(right, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.verify]\nworkers = 0\n", encoding="utf-8")
    options = ("--kernel", "mine.py", "--kernel", "right.py", "--kernel-examples", "1")
    options += ("--junitxml", "out.xml", "-v")
    done = run("pytest", *PLUGIN, *options, "-k", "accuracy or counting or refusal", cwd=tmp_path)
    assert re.search(r"mine.py::accuracy FAILED", done.stdout), done.stdout + done.stderr
    assert "mine.py::refusal SKIPPED" in done.stdout
    assert "right.py::accuracy PASSED" in done.stdout
    assert "right.py::counting PASSED" in done.stdout
    assert "24 deselected" in done.stdout
    assert re.search(r"replay +python -m verify replay mine.py@mine:", done.stdout)
    assert "Traceback" not in done.stdout
    assert 'name="accuracy"' in (tmp_path / "out.xml").read_text(encoding="utf-8")


def test_the_first_failure_ends_it_and_runs_again_alone(tmp_path: Path) -> None:
    """-x and --lf are pytest's own, and see one test for each property."""
    (tmp_path / "mine.py").write_text(WRONG, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(ACCURACY_FAILS, encoding="utf-8")
    options = ("-p", "verify.door.plugin", "-p", "no:attention-verify", "--kernel", "mine.py", "-v")
    done = run("pytest", *options, "-x", "-k", "accuracy or counting", cwd=tmp_path)
    assert "stopping after 1 failures" in done.stdout, done.stdout + done.stderr
    assert "mine.py::counting" not in done.stdout
    again = run("pytest", *options, "--lf", cwd=tmp_path)
    assert "mine.py::accuracy FAILED" in again.stdout
    assert "1 failed" in again.stdout
    assert "passed" not in again.stdout
    asked = (tmp_path / "asked.txt").read_text(encoding="utf-8").splitlines()
    assert asked == ["accuracy counting", "accuracy"]


@pytest.mark.thorough
def test_workers_judge_properties_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG, encoding="utf-8")
    options = ("--kernel", "mine.py", "--kernel-examples", "1", "-n", "2", "--junitxml", "out.xml")
    done = run("pytest", *PLUGIN, *options, "-k", "accuracy or gradient_refusal", cwd=tmp_path)
    assert "1 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert 'failures="1" skipped="1"' in (tmp_path / "out.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("worker", "mask", "given"),
    [
        ("gw0", "0,1,2", "0,1,2"),
        ("gw1", "0,1,2", "1,0,2"),
        ("gw4", "0,1,2", "1,0,2"),
        ("gw1", "2", "2"),
        ("gw1", "", ""),
        (None, "0,1", "0,1"),
    ],
)
def test_the_campaigns_of_workers_have_different_gpus(
    worker: str | None, mask: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    seen: list[str | None] = []

    def execute(*_: object) -> int:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        assert "PYTEST_XDIST_WORKER" not in os.environ
        return 0

    monkeypatch.setattr(checking, "execute", execute)
    checking.campaign(checking.request_of(Path("mine.py"), Defaults()), None)
    assert seen == [given]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert os.environ.get("PYTEST_XDIST_WORKER") == worker


def test_the_campaigns_of_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number of threads each campaign computes from the count of workers."""
    count = "PYTEST_XDIST_WORKER_COUNT"
    monkeypatch.setenv(count, "16")
    seen: list[str | None] = []

    def execute(*_: object) -> int:
        seen.append(os.environ.get(count))
        return 0

    monkeypatch.setattr(checking, "execute", execute)
    checking.campaign(checking.request_of(Path("mine.py"), Defaults()), None)
    assert seen == [os.environ[count]] == ["16"]


def test_usage_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG, encoding="utf-8")
    for options, words in (
        (("--kernel", "none.py"), "ERROR: --kernel: no such file: none.py"),
        (("--kernel-examples", "0"), "ERROR: --kernel-examples: 0 is not a number above 0"),
    ):
        done = run("pytest", *PLUGIN, *options, cwd=tmp_path)
        assert (done.returncode, words in done.stderr) == (4, True), done.stderr


def test_without_its_option_nothing_is_imported(tmp_path: Path) -> None:
    text = f"import sys\ndef test_mine():\n    assert 'torch' not in sys.modules, {sys.version!r}\n"
    text += "    assert not [name for name in sys.modules if name.startswith('verify.campaign')]\n"
    (tmp_path / "test_mine.py").write_text(text, encoding="utf-8")
    done = run("pytest", *PLUGIN, "-q", cwd=tmp_path, fresh=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_plugin_leaves_this_suite_alone(tmp_path: Path) -> None:
    """Installed as an entry point: conftest.py has options of the same names."""
    info = tmp_path / "attention_verify-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: attention-verify\nVersion: 0\n", encoding="utf-8")
    points = "[pytest11]\nattention-verify = verify.door.plugin\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    right = WRONG.replace("1.01", "1.0")
    (tmp_path / "right.py").write_text(right, encoding="utf-8")
    words = ("verify", "run", "right.py", "-n", "1", "--examples", "1", "-k", "counts_the_visible")
    done = run(*words, cwd=tmp_path, path=tmp_path)
    assert "1 judged cases, 0 failing" in done.stdout, done.stdout + done.stderr
    (tmp_path / "test_mine.py").write_text("def test_mine(verify_check): pass\n", encoding="utf-8")
    done = run(
        "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", cwd=tmp_path, path=tmp_path
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
