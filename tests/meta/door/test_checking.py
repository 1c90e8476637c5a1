"""`verify.check` in somebody else's pytest: a test module's functions, judged elsewhere."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import verify
from verify.adapters import adapter_named
from verify.cell.discovery import roster
from verify.cell.process import ROOT
from verify.door import checking
from verify.door.checking import Choices
from verify.door.stand_in import stand_in
from verify.machine import starter

THEIRS = """
import pytest
import torch
import verify

SHORT = {"max_seqlen": 24}
FEW = dict(layout="bshd", dtypes=["float32"], head_dims=[16], examples=1, within=SHORT)


def right(q, k, v, causal=False, softmax_scale=None):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = (q @ k.mT) * softmax_scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


def wrong(q, k, v, causal=False, softmax_scale=None):
    return right(q, k, v, causal, softmax_scale * 1.1)


class WithoutDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return right(q, k, v, False, scale)

    @staticmethod
    def backward(ctx, dout):
        q, k, v = (x.transpose(1, 2) for x in ctx.saved_tensors)
        dout = dout.transpose(1, 2)
        p = torch.softmax(q @ k.mT * ctx.scale, dim=-1)
        ds = p * (dout @ v.mT) * ctx.scale
        return *(x.transpose(1, 2) for x in (ds @ k, ds.mT @ q, p.mT @ dout)), None


def wrong_backward(q, k, v, softmax_scale=None):
    return WithoutDelta.apply(q, k, v, softmax_scale)


def test_right():
    report = verify.check(right, masks=["full", "causal.square"], **FEW)
    assert report.cases and report.dtypes == ("float32",)
    assert "gradients: judged in float32" in str(report)


def test_wrong():
    verify.check(wrong, masks=["full"], grad=False, **FEW)


def test_wrong_backward():
    verify.check(wrong_backward, masks=["full"], **FEW | {"examples": 8})


@verify.checked(masks=["full"], grad=False, **FEW | {"examples": 8})
def test_decorated(q, k, v, softmax_scale=None):
    return right(q, k, v, False, softmax_scale * 1.1)
"""


_TIMEOUT = 600  # seconds
QUIETLY = ("-q", "-p", "no:cacheprovider", "test_theirs.py")


def run(
    *words: str, cwd: Path, path: Path | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """A program of Python in somebody else's folder.  path: searched for packages, too.

    The suite's starter forks it, if there is one.  fresh: it starts Python itself, as a user does.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = os.pathsep.join(map(str, filter(None, (ROOT, path))))
    own |= {"PYTHONPATH": found, "CUDA_VISIBLE_DEVICES": ""}
    if fresh:
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, cwd=cwd, env=own, capture_output=True, text=True, check=False
        )
    module, *arguments = words
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        program = starter.Program(
            module={"verify": "verify.__main__"}.get(module, module),
            arguments=arguments,
            environment=own,
            output=output.fileno(),
            errors=errors.fileno(),
            directory=str(cwd),
            leashed=True,
        )
        status = starter.launch(starter.JUDGES, program).wait(_TIMEOUT)
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, status, output.read(), errors.read())


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Their module, imported in their folder: its tests can be called here."""
    (tmp_path / "theirs_of_checking.py").write_text(THEIRS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield importlib.import_module("theirs_of_checking")
    del sys.modules["theirs_of_checking"]


def test_a_wrong_function_fails_with_its_replay(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS, encoding="utf-8")
    done = run("pytest", *QUIETLY, "-k", "test_wrong and not backward", cwd=tmp_path)
    assert "1 failed, 3 deselected" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_theirs.py::test_wrong - AssertionError" in done.stdout
    assert re.search(r"bound +\d", done.stdout)
    assert "LAYOUT" not in done.stdout  # theirs is said
    replay = re.search(r"replay +python -m (verify replay \S+)", done.stdout)
    assert replay is not None
    again = run(*replay[1].split(), cwd=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "FAILED" in again.stdout


@pytest.fixture
def bounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns ask for nothing but the bounds: other tests ask what is convicted how."""
    narrowed = functools.partial(checking.request_of, select="bounds")
    monkeypatch.setattr(checking, "request_of", narrowed)


@pytest.mark.for_ci
def test_a_right_function_passes(theirs: ModuleType) -> None:
    theirs.test_right()


@pytest.mark.for_ci
@pytest.mark.usefixtures("bounds_alone")
def test_a_wrong_backward_fails(theirs: ModuleType) -> None:
    with pytest.raises(AssertionError, match=r"gradient_bound: d[qk] is off by"):
        theirs.test_wrong_backward()


@pytest.mark.for_ci
@pytest.mark.usefixtures("bounds_alone")
def test_a_decorated_function_is_judged(theirs: ModuleType) -> None:
    with pytest.raises(AssertionError, match="out is off by"):
        theirs.test_decorated()


class _Callable:
    def __call__(self, q: object) -> object:
        return q


def _original(q: object) -> object:
    return q


@functools.wraps(_original)
def _wrapped(q: object) -> object:
    return _hidden(q)


_wrapped.__qualname__ = "_wrapped"
_hidden = _original
del _original


def test_a_function_without_an_importable_name_is_refused_in_one_line(tmp_path: Path) -> None:
    def nested(q: object) -> object:
        return q

    bare = [lambda q: q, nested, _Callable(), functools.partial(_hidden), _hidden]
    for each in bare:
        with pytest.raises(TypeError, match=r"top level of a file, or pass the path") as caught:
            verify.check(each)
        assert "\n" not in str(caught.value)


def test_a_decorated_function_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = stand_in(_wrapped, {"LAYOUT": "bshd"}).read_text(encoding="utf-8")
    assert "'_wrapped'" in text
    assert "{'LAYOUT': 'bshd'}" in text
    assert stand_in(_wrapped, {}) != stand_in(_wrapped, {"LAYOUT": "bshd"})


def test_a_modules_own_signature_is_that_of_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_signature.py").write_text(
        'LIKE = "parallel_attn"\n\n\ndef mine(q, k, v, g=None, scale=None):\n    return q\n',
        encoding="utf-8",
    )
    module = importlib.import_module("own_signature")
    found = roster([stand_in(module.mine, {})])
    assert not found.failures, found.failures
    like = adapter_named("parallel_attn")
    assert {d.support.masks for d in found.declarations} == {like.support.masks}
    assert {d.support.head_dims for d in found.declarations} == {like.support.head_dims}


def test_illegal_arguments_are_refused_before_a_campaign(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="examples: 0 is not a number of problems above 0"):
        verify.check(_wrapped, examples=0)
    with pytest.raises(ValueError, match="time: -1 is not a number of seconds above 0"):
        Choices(time=-1)
    for field, value, words in (
        ("layout", "sbhd", "layout: 'sbhd' is none of None, bhsd, bshd"),
        ("dtypes", "float16", "dtypes: 'float16' is no tuple of names out of float16, "),
        ("dtypes", ["float64"], "dtypes: 'float64' is none of float16, bfloat16, "),
        ("head_dims", 64, "head_dims: 64 is no tuple of whole numbers"),
        ("masks", ["diagonal"], "masks: 'diagonal' is none of full, causal, "),
        ("grad", 1, "grad: 1 is neither True nor False"),
        ("like", "flash", "like: 'flash' is none of flash_attn_func, flex"),
        ("within", ["longer_q"], "within: ['longer_q'] is no mapping of min_seqlen, max_seqlen, "),
        ("within", {"lengths": 64}, "within: 'lengths' is none of min_seqlen, max_seqlen, "),
        ("within", {"scales": "all"}, "within: scales: 'all' is none of any, nonzero, positive"),
        ("within", {"seqlen_q_multiple": "64"}, "within: seqlen_q_multiple: '64' is no whole "),
        ("examples", 2.5, "examples: 2.5 is no whole number"),
        ("time", "10", "time: '10' is no number of seconds"),
        ("time", True, "time: True is no number of seconds"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            verify.check(_wrapped, **{field: value})
    with pytest.raises(ValueError, match="layout: like='flash_attn_func' says it"):
        verify.check(_wrapped, layout="bhsd", like="flash_attn_func")
    assert Choices(layout="bshd", like="sageattn").settings["LAYOUT"] == "bshd"
    with pytest.raises(ValueError, match="write LAYOUT into the file"):
        verify.check(tmp_path / "k.py", layout="bshd")
    with pytest.raises(ValueError, match="write GRADIENTS into the file"):
        verify.check(tmp_path / "k.py", grad=False)
    assert verify.__all__ == ["__version__", "check", "checked"]
