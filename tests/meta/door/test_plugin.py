"""The pytest plugin in somebody else's session: items, selection, JUnit, and no trace without its
option."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from tests.meta.door.test_checking import run
from verify.bundle import ROOT
from verify.door.plugin import PROPERTIES

WRONG = """
import torch

LAYOUT = "bhsd"
DTYPES = ("float32",)
HEAD_DIMS = (32,)


def attention(q, k, v):
    out = torch.softmax(q @ k.mT * (q.shape[-1] ** -0.5), -1) @ v
    out[:, :, 20:] *= 1.01
    return out
"""
PLUGIN = ("-p", "verify.door.plugin", "-p", "no:cacheprovider", "-p", "no:attention-verify")


def test_every_property_test_has_an_item() -> None:
    tree = ast.parse((ROOT / "tests/properties/test_attention.py").read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    asked = {test for tests_of in PROPERTIES.values() for test in tests_of}
    own = {"test_loads", "test_holds_where_it_was_worst", "_hold_each"}
    assert asked == tests - own


def test_one_item_for_each_property(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG, encoding="utf-8")
    right = WRONG.replace("1.01", "1.0")
    (tmp_path / "right.py").write_text(right, encoding="utf-8")
    options = ("--kernel", "mine.py", "--kernel", "right.py", "--kernel-examples", "2")
    options += ("--junitxml", "out.xml", "-v")
    done = run("pytest", *PLUGIN, *options, "-k", "accuracy or counting or refusal", cwd=tmp_path)
    assert re.search(r"mine.py::accuracy FAILED", done.stdout), done.stdout + done.stderr
    assert "mine.py::refusal SKIPPED" in done.stdout
    assert "right.py::accuracy PASSED" in done.stdout
    assert "right.py::counting PASSED" in done.stdout
    assert "20 deselected" in done.stdout
    assert re.search(r"replay +python -m verify replay mine.py@mine:", done.stdout)
    assert "Traceback" not in done.stdout
    assert 'name="accuracy"' in (tmp_path / "out.xml").read_text(encoding="utf-8")


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
    done = run("pytest", *PLUGIN, "-q", cwd=tmp_path)
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
