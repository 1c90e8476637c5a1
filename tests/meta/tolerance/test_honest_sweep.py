"""The sweep over honest elements: it goes on where it stopped, counts an element once, climbs head
by head, makes its tensors where it is told to, and refuses what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests import honest_sweep
from tests.harness import honest_climbs
from tests.harness.backward_inputs import Inputs
from tests.harness.cancelling import ones, what_is_saved
from tests.harness.emulation import Emulation, Luck, Result
from tests.harness.emulation_backward import NAMES, Backward, BackwardKernel
from tests.harness.honest_backwards import HALF
from tests.harness.honest_climbs import Climbed, Declared, Judged, climb, declared, moved
from tests.harness.ordered_forwards import HONEST as ORDERED
from verify.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")
ASCENDING = "forward: ascending, sm_90, bfloat16"
BACKWARD = "backward: one accumulator, sm_90, bfloat16"
SMALL = "hq=8,hkv=4,sq=64,skv=9,d=8,dv=3"
ROWS = 8 * 64


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Climbs of few elements."""
    monkeypatch.setattr(honest_climbs, "FORWARD_SHAPES", (SMALL,))
    monkeypatch.setattr(honest_climbs, "BACKWARD_SHAPES", ("hq=4,hkv=2,sq=6,skv=5,d=8",))
    monkeypatch.setattr(honest_climbs, "_DISTRIBUTIONS", ("normal",))


@pytest.mark.usefixtures("small")
def test_a_sweep_goes_on_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "journal"), "--only", ASCENDING, "--elements", "1000"]
    assert honest_sweep.main(words) == 0
    lines = (tmp_path / "journal").read_text().splitlines()
    assert len(lines) == 1  # one climb has more
    assert json.loads(lines[0])["declared"] == ASCENDING
    said = capsys.readouterr().out
    assert "0 refused; 2 of 2 pairs of a tensor and a declaration have 1,000" in said
    words[-1] = "4000"
    assert honest_sweep.main(words) == 0
    assert len((tmp_path / "journal").read_text().splitlines()) == 2
    assert honest_sweep.main([*words[:3], "--show", "--share", "1/2"]) == 0
    assert honest_sweep.main([*words[:3], "--show"]) == 0
    assert "0 of 2 pairs" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_the_journals_of_shares_are_one_journal_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each share climbs its own declarations; lines of another way to count are not read."""
    asked = ["--only", "forward: ascending, sm_90", "--elements", "1000"]
    for share in ("0/2", "1/2"):
        own = str(tmp_path / share.replace("/", "of"))
        assert honest_sweep.main([own, *asked, "--share", share, "--device", "cpu"]) == 0
    lines = [line for file in sorted(tmp_path.iterdir()) for line in file.open(encoding="utf-8")]
    old = {key: value for key, value in json.loads(lines[0]).items() if key != "counting"}
    whole = tmp_path / "whole"
    whole.write_text("".join([*lines, json.dumps(old | {"refused": {"out": 7}}) + "\n"]))
    capsys.readouterr()
    assert honest_sweep.main([str(whole), *asked, "--show"]) == 0
    said = capsys.readouterr().out.splitlines()
    first, second = (json.loads(line)["counted"] for line in lines)
    assert said[2].startswith(f"out: {first['out'] + second['out']:,} elements of 2 declarations")
    assert said[3].startswith(f"lse: {first['lse'] + second['lse']:,} elements of 2 declarations")
    assert "4 of 4 pairs" in said[4]


def test_a_gpu_that_is_not_there_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        honest_sweep.main([str(tmp_path / "journal"), "--device", "cuda"])
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (ASCENDING, ORDERED[0].but(fault="O truncated")),
        (BACKWARD, HALF.but(fault="P truncated")),
    ],
)
def test_what_is_wrong_is_refused(name: str, wrong: object) -> None:
    right = declared()[name]
    assert not any(climb(right, 1).refused.values())
    planted = replace(right, kernel=wrong)
    assert any(climb(planted, 1).refused.values())


def test_every_declaration_has_its_own_name_and_problems() -> None:
    found = declared()
    assert len(found) > 200
    drawn = set()
    for number, (name, one) in enumerate(found.items()):
        assert one.name == name
        problem = one.problem(number, 3)
        assert problem.dtype == one.dtype
        assert problem.batch == 3
        assert problem.heads_kv > 1
        drawn |= {one.problem(turn).distribution for turn in (0, 2, 4)}
    assert drawn == set(honest_climbs._DISTRIBUTIONS)


# What counts


def test_an_element_counts_if_it_is_asked_and_its_exact_value_is_another() -> None:
    ratio = torch.tensor([0.5, 0.25, 1.5, 0.0])
    exact = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    asked = torch.tensor([True, True, True, False])
    found, one = Climbed(), Judged(ratio, exact, asked)
    found.add("out", one, None)
    assert found == Climbed({"out": 3}, {"out": 1}, {"out": 1.5})
    found.add("out", one, exact * (1 + 2.0**-50))
    assert found == Climbed({"out": 3}, {"out": 2}, {"out": 1.5})
    found.add("out", one, torch.tensor([1.0, 2.5, 3.0, 5.0], dtype=torch.float64))
    assert found.counted == {"out": 4}


@pytest.mark.usefixtures("small")
def test_a_generation_that_changes_nothing_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = declared()[ASCENDING]
    assert climb(one, 0).counted["lse"] > 3 * ROWS
    monkeypatch.setattr(honest_climbs, "moved", lambda given, seed: given)
    for each in (one, declared()[BACKWARD]):
        problem = each.problem(0)
        first = each.judged(problem, Luck.NEAREST, Inputs.of(problem), "dq", 0)
        assert climb(each, 0).counted == {t: int(first[t].asked.sum()) for t in each.tensors}


@pytest.mark.usefixtures("small")
def test_rows_without_a_key_and_infinite_bounds_do_not_count() -> None:
    one = declared()[ASCENDING]
    problem = Problem.parse("hq=2,hkv=2,sq=8,skv=3,d=4,mask=causal,dtype=bfloat16")
    given = Inputs.of(problem)
    found = one.judged(problem, Luck.NEAREST, given, "out", 0)
    assert found["lse"].asked.sum(-1).tolist() == [[3, 3]]
    assert found["out"].asked.sum((2, 3)).tolist() == [[12, 12]]
    given.v[0, 1, 2, 1] = torch.inf
    found = one.judged(problem, Luck.NEAREST, given, "out", 0)
    assert found["out"].asked[0, 0].sum() == 12
    assert not found["out"].asked[0, 1, 7, 1]


# How it climbs


def test_one_of_every_twenty_elements_is_changed() -> None:
    given = Inputs.of(Problem.parse("hq=2,hkv=1,sq=33,skv=17,d=8,dtype=float16"))
    first, again, other = moved(given, 1), moved(given, 1), moved(given, 2)
    for name in ("q", "k", "v", "dout"):
        old, new = getattr(given, name), getattr(first, name)
        assert torch.equal(new, getattr(again, name))
        assert not torch.equal(new, getattr(other, name))
        changes = (new != old).flatten().nonzero()[:, 0] // honest_climbs.EVERY
        assert len(changes) == len(changes.unique())  # at most one of each twenty
        assert 0.9 * old.numel() / 20 < len(changes) <= old.numel() / 20 + 1
        assert bool(new.isfinite().all())


@pytest.mark.usefixtures("small")
def test_each_head_keeps_what_comes_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two heads of K the first comes nearer with every generation, the second never; in the
    second batch it is the other way round.  An element counts if it is another than in what its
    head has kept."""
    tried: list[Inputs] = []

    def judged(
        self: Declared, problem: Problem, luck: Luck, given: Inputs, aim: str, turn: int
    ) -> dict[str, Judged]:
        step = len(tried)
        tried.append(given)
        up, down = 0.1 + 0.1 * step, 0.9 - 0.1 * step
        ratio = torch.tensor([[up, up, down, down], [down, down, up, up]]).double()
        ratio = ratio[:, :, None, None].expand(problem.shape_q)
        return {name: Judged(ratio, given.q.double(), ratio > -1) for name in self.tensors}

    monkeypatch.setattr(Declared, "judged", judged)
    found = climb(declared()[BACKWARD], 0, batch=2)
    assert len(tried) == honest_climbs.GENERATIONS
    counted = tried[0].q.numel() + int((tried[1].q != tried[0].q).sum())
    for step in range(2, len(tried)):

        def kept(name: str, step: int = step) -> Tensor:
            last, first = getattr(tried[step - 1], name), getattr(tried[0], name)
            half = last.shape[1] // 2
            rows = (last[0, :half], first[0, half:]), (first[1, :half], last[1, half:])
            return torch.stack([torch.cat(row) for row in rows])

        counted += int((tried[step].q != kept("q")).sum())
        want = moved(Inputs(*map(kept, ("q", "k", "v", "dout"))), step)
        for name in ("q", "k", "v", "dout"):
            assert torch.equal(getattr(tried[step], name), getattr(want, name)), (step, name)
    assert found.counted == dict.fromkeys(NAMES, counted)


# Where it computes

TINY_SHAPE = "b=2,hq=4,hkv=2,sq=6,skv=8,d=4,mask=causal"
PLACED = (
    "forward: online, sm_90, float16",
    "forward: fused as FlashAttention-2, bfloat16",
    "forward: torch's math, float16",
    "forward: prescaled q, float16",
    "forward: whole blocks first, sm_90, bfloat16",
    "forward: errors at random, float16",
    "forward: sums in fp16, float16",
    "forward: merged halves, float16",
    "forward: 8-bit P, float8_e4m3fn",
    "forward: maximum of a tile, float16",
    "backward: fp32 by FMA, float32",
    BACKWARD,
    "backward: memory of 16 bits, float16",
    "backward: Q and K prescaled by roots, float16",
    "backward: prescaled K, as Triton's tutorial, float16",
    "backward: a composite, CUDA, bfloat16",
    "backward: a scale inside the products, times ds, float32",
    "backward: tf32, ascending, float32",
)


@pytest.mark.first_look(1)
@pytest.mark.parametrize("name", PLACED)
def test_emulations_compute_where_their_inputs_are(name: str) -> None:
    """On the device without memory, which no other tensor may meet and whose values nobody reads:
    what passes there makes nothing on the CPU by the way, and waits for no GPU."""
    one = declared()[name]
    text = f"{TINY_SHAPE},dtype={one.dtype}" + (",out=bfloat16" if "float8" in one.dtype else "")
    problem = Problem.parse(text)

    def made(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=problem.format.torch, device="meta")

    given = Inputs(*map(made, (problem.shape_q, problem.shape_k, problem.shape_v)), made((0,)))
    given = replace(given, dout=made(problem.shape_out))
    kernel, luck = one.kernel, Luck.AGAINST
    if isinstance(kernel, BackwardKernel):
        saved = Result(given.dout.double(), given.dout[..., 0].double())
        if kernel.numerics.softmax.source != "own":
            saved = what_is_saved(problem, kernel, luck, given)
        results = Backward(problem, kernel, luck, "dv", device="meta").run(given, saved)
        assert {name: x.device.type for name, x in results.items()} == dict.fromkeys(NAMES, "meta")
    else:
        run = Emulation(problem, kernel, luck, ones(problem, "meta"), device="meta")
        result = run.run(given.q, given.k, given.v)
        assert (result.out.device.type, result.lse.device.type) == ("meta", "meta")


class Placeless(TorchFunctionMode):
    """Records where in the harness a tensor is made on the default device."""

    MAKE = (torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange)
    DRAW = (torch.rand, torch.randn, torch.randint)
    # what is drawn on the CPU, and read there or sent to the device afterwards
    DRAWN = ("cancelling", "signs", "rand", "turned", "sign")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (*self.MAKE, *self.DRAW) and kwargs.get("device") is None:
            frame = sys._getframe(1)
            code = frame.f_code
            if "harness" in code.co_filename and code.co_name not in self.DRAWN:
                self.found.append(f"{code.co_filename}:{frame.f_lineno}")
        return func(*args, **kwargs)


def test_the_record_of_tensors_without_a_device_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("def make(): return torch.ones(3)", "tests/harness/planted.py", "exec")
    space: dict[str, Any] = {"torch": torch}
    exec(code, space)
    with Placeless() as record:
        space["make"]()
    assert record.found == ["tests/harness/planted.py:1"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [ASCENDING, BACKWARD, "forward: parts, descending, float16"])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_climb_makes_no_tensor_without_saying_where(name: str, turn: int) -> None:
    with Placeless() as record:
        climb(declared()[name], turn)
    assert record.found == []
