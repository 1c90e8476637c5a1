"""Mutants are what their operators say, the record is of today's kernels, every survivor has its
reason, and a sample of the convicted ones is convicted again."""

from __future__ import annotations

import ast
import math
import re
import runpy
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.fault import BACKWARD_KERNELS, TRITON_DECODE, TRITON_DESCRIPTORS
from tests.faults.search import convicts
from tests.faults.stand import Stand
from tests.mutants import document, record, scores
from tests.mutants.crew import Crew
from tests.mutants.cuda.mutant import chosen as cuda_chosen
from tests.mutants.cute.mutant import chosen as cute_chosen
from tests.mutants.languages import LANGUAGES
from tests.mutants.mutant import source
from tests.mutants.queue import Queue
from tests.mutants.record import BROKEN, KILLED, SURVIVED, TRITON, Ledger
from tests.mutants.triton.hunt import _NAMED, TritonHunt
from tests.mutants.triton.mutant import GROUNDS, TritonMutant, chosen
from tests.mutants.triton.operators import functions_of, mutations
from tests.mutants.truths import Memory
from tests.properties import tier
from verify.cell.process import ROOT
from verify.judging.truth import Clock
from verify.oracles import groups
from verify.problem import Problem
from verify.report.mutation_scores import SCORES
from verify.tolerance.backward import OwnForward
from verify.variant import MASK_KINDS, Support

WHOLE = Support(dtypes=("float16",), head_dims=range(1, 257), masks=MASK_KINDS)
MUTANTS = {mutant.id: mutant for mutant in chosen()}
ENTRIES = TRITON.load()
KILLS = [MUTANTS[id_] for id_, entry in ENTRIES.items() if entry.how == KILLED and id_ in MUTANTS]

KERNEL = '''
@triton.jit
def helper(x, n: tl.constexpr):
    """A docstring: 1 < 2."""
    return x + 1


def _kernel(q, k, mask):
    acc = tl.zeros([n], tl.float32)
    for i in range(n):
        x = tl.load(k + i, mask=i < n, other=0.0)
        acc = acc + tl.where(x == float("-inf"), 0.0, x)[:, None]
    if n > 3:
        acc = acc.to(tl.float16)
    tl.store(q, tl.minimum(acc, 2), mask=mask & (i < n))


def on_the_host(n):
    return n // 2


kernel = triton.jit(_kernel)
'''
EXPECTED = (
    ("sign", "return x - 1"),
    ("operand", "return (x)"),
    ("boundary", "return x + 2"),
    ("boundary", "for i in range((n) - 1):"),
    ("comparison", "mask=i <= n"),
    ("mask", "x = tl.load(k + i, mask=None, other=0.0)"),
    ("mask", "other=1.0)"),
    ("mask", "acc + (x)[:, None]"),
    ("index", "[None, :]"),
    ("constant", "tl.where(x == -65504.0, 0.0"),
    ("constant", 'float("-inf"), 1.0, x'),
    ("branch", "if True:"),
    ("dtype", "acc = (acc)"),
    ("function", "tl.maximum(acc, 2)"),
    ("mask", "mask=(mask))"),
    ("statement", "    pass\n    if n > 3"),
)


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


@pytest.mark.parametrize(("operator", "text"), EXPECTED, ids=[text.strip() for _, text in EXPECTED])
def test_an_operator_changes_one_place(operator: str, text: str) -> None:
    made = [each for each in mutations(KERNEL) if text in each.applied(KERNEL)]
    assert operator in {each.operator for each in made}


def test_only_functions_of_the_device_are_mutated() -> None:
    assert list(functions_of(KERNEL)) == ["helper", "_kernel"]
    assert {each.function for each in mutations(KERNEL)} == {"helper", "_kernel"}
    assert "on_the_host" in {each.function for each in mutations(KERNEL, ("on_the_host",))}


def test_every_mutant_is_another_program() -> None:
    texts = [each.applied(KERNEL) for each in mutations(KERNEL)]
    shapes = {ast.dump(ast.parse(text)) for text in (KERNEL, *texts)}
    assert len(shapes) == len(texts) + 1
    assert all("A docstring: 1 < 2." in text for text in texts)


def test_the_record_is_of_the_kernels_as_they_are() -> None:
    assert set(ENTRIES) <= set(MUTANTS), "run python -m tests.mutants --write"
    parts = document.parts(chosen(), cuda_chosen(), cute_chosen())
    assert document.PATH.read_text("utf-8") == document.document(parts)
    hashes = {variant: source for variant, (source, _) in SCORES.items()}
    assert scores.PATH.read_text("utf-8") == scores.module(hashes)


def test_enough_mutants_count_and_every_survivor_has_its_reason() -> None:
    assert record.Score.of(MUTANTS.values(), TRITON).counted >= 100
    survivors = {id_ for id_, entry in ENTRIES.items() if entry.how == SURVIVED}
    assert set(TRITON.reasons()) == survivors


def test_the_document_counts_and_explains_all() -> None:
    parts = document.parts(chosen(), cuda_chosen(), cute_chosen())
    text = document.document(parts)
    counted = sum(record.Score.of(part.mutants, part.ledger).counted for part in parts)
    assert counted >= 300
    assert f"**{counted} of them are neither" in text
    assert "not explained" not in text
    items = [" ".join(each.split()) for each in re.split(r"\n(?=- )|\n\n", text)]
    for part in parts:
        for id_, reason in part.ledger.reasons().items():
            (line,) = (line for line in items if line.startswith(f"- `{id_}`, line "))
            assert line.endswith(f": {reason.why}")
    assert "| `kernels/masks.py` | 15 of 15 | 12 | 0 | 100.0 % | 3 | 0 |" in text


@pytest.mark.parametrize(("group", "text"), _NAMED, ids=[group for group, _ in _NAMED])
def test_a_named_question_is_a_problem_of_its_group(group: str, text: str) -> None:
    problem = Problem.parse(text)
    assert problem.name == text
    adapt = groups()[group].adapt
    assert adapt is None or adapt(problem, WHOLE) == problem


@pytest.mark.parametrize(("group", "text"), _NAMED, ids=[group for group, _ in _NAMED])
def test_a_named_question_has_convicted_a_mutant(group: str, text: str) -> None:
    catches = [entry.catch for entry in ENTRIES.values()]
    assert any(catch and (catch.group, catch.problem) == (group, text) for catch in catches)


def test_a_branch_that_is_never_taken_is_judged_by_a_variant_that_takes_it() -> None:
    (ground,) = (ground for ground in GROUNDS if ground.edited == TRITON_DESCRIPTORS)
    made = [TritonMutant.of(ground, each) for each in mutations(source(ground.edited))]
    branches = {
        m.after: m.variant for m in made if m.before == "HOST" and m.mutation.operator == "branch"
    }
    assert branches == {
        "True": "triton-device-descriptor-forward",
        "False": "triton-host-descriptor-forward",
    }


def test_a_function_of_one_variant_is_judged_by_it() -> None:
    names = {m.variant for m in chosen() if m.mutation.function == "_scaled"}
    assert names == {"triton-flash-backward-prescaled"}


def test_a_truth_is_computed_once_for_the_same_inputs_and_declarations() -> None:
    asked = []
    memory = Memory(lambda *given, **named: asked.append(given) or len(asked))
    q = torch.arange(2000.0).to(torch.float16)
    other = q.clone()
    other[1000] = 0  # which the text of a long tensor leaves out
    for clock in (Clock(), Clock({"run": 1.0})):
        assert memory(q, ["declared"], clock) == 1
    assert memory(other, ["declared"], Clock()) == 2
    assert memory(q, ["else"], Clock()) == 3
    assert memory(q.view(torch.bfloat16), ["declared"], Clock()) == 4
    assert memory(q, ["declared"], Clock(), rows=other) == 5
    assert memory(q.view(2, 1000), ["declared"], Clock()) == 6
    assert memory(q, ["declared"], Clock()) == 1
    assert memory(OwnForward(q, q), Clock()) == 7
    assert memory(OwnForward(q, other), Clock()) == 8


def test_a_mutant_is_judged_by_the_variant_that_reaches_its_line() -> None:
    found = {m.variant for m in MUTANTS.values() if m.edited == BACKWARD_KERNELS}
    assert found == {f"triton-flash-backward{of}" for of in ("", "-atomic", "-prescaled")}
    text = source(BACKWARD_KERNELS)
    for mutant in MUTANTS.values():
        if mutant.variant.endswith("-atomic"):
            lines = text.splitlines()[: mutant.mutation.line]
            assert any("dq_sums is not None" in line for line in lines[-15:])


def spread() -> list[TritonMutant]:
    """Kills of every file, those of the cheapest questions first, and of every operator."""
    found: dict[object, TritonMutant] = {}
    for mutant in sorted(KILLS, key=lambda mutant: ENTRIES[mutant.id].seconds):
        for kind in (mutant.ground.edited, mutant.mutation.operator):
            found.setdefault(kind, mutant)
    return list({mutant.id: mutant for mutant in found.values()}.values())


@pytest.mark.parametrize("mutant", tier.for_ci(spread(), keep=3), ids=lambda mutant: mutant.id)
def test_a_convicted_mutant_is_convicted_again_and_the_kernel_is_not(
    mutant: TritonMutant, stand: Stand
) -> None:
    catch = ENTRIES[mutant.id].catch
    assert catch is not None
    ground = mutant.ground
    assert TritonHunt(stand).again(mutant, catch)
    assert not convicts(stand, stand.load(ROOT / ground.file, mutant.variant), catch)


@pytest.mark.for_ci
def test_the_command_hunts_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cheap mutants again, by a process each, into files of its own."""
    cheapest = {mutant.id for mutant in spread()[:2]}
    ledger = Ledger(tmp_path / "record.json", TRITON.explained)
    for module in (record, document, scores):
        monkeypatch.setattr(module, "TRITON", ledger)
    monkeypatch.setattr(document, "PATH", tmp_path / "mutation.md")
    monkeypatch.setattr(scores, "PATH", tmp_path / "mutation_scores.py")
    monkeypatch.setattr(scores, "sources", lambda: defaultdict(str))
    monkeypatch.setattr(sys, "argv", ["tests.mutants", "--processes", "2", *cheapest])
    runpy.run_path(str(ROOT / "tests/mutants/__main__.py"), run_name="__main__")
    hows = {id_: entry.how for id_, entry in ledger.load().items()}
    assert hows == dict.fromkeys(cheapest, KILLED)
    assert "2 of" in (tmp_path / "mutation.md").read_text("utf-8")


def test_a_hunt_that_is_stopped_keeps_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path / "record.json", TRITON.explained)
    monkeypatch.setattr(record, "TRITON", ledger)
    first, second = KILLS[:2]

    def stopped(crew: Crew) -> None:
        crew._save(first, ENTRIES[first.id])
        signal.raise_signal(signal.SIGTERM)
        crew._save(second, ENTRIES[second.id])

    monkeypatch.setattr(Crew, "_hunt", stopped)
    before = signal.getsignal(signal.SIGTERM)
    Crew(LANGUAGES["triton"], [first, second], 1, math.inf).hunt()
    assert ledger.load() == {first.id: ENTRIES[first.id]}
    assert capsys.readouterr().out.endswith("; 1 left\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_stays_on_a_ground_and_the_dearest_comes_first() -> None:
    grounds = {mutant.id: ground for mutant, ground in zip(KILLS, "aaabbbb", strict=False)}
    left = [mutant for mutant in KILLS if mutant.id in grounds]
    queue = Queue(left, lambda mutant: grounds[mutant.id], 2, {"a": 9.0, "b": 5.0})
    a, b = ([mutant for mutant in left if grounds[mutant.id] == name] for name in "ab")
    assert queue.take(None) == ("a", (a[0], a[1]))
    assert queue.take(None) == ("b", (b[0], b[1]))
    assert queue.take("a") == ("a", (a[2],))
    assert len(queue) == 1
    assert queue.take("a") == ("b", (b[2], b[3]))
    assert queue.take("b") is None


def test_the_command_takes_the_cuda_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without time to hunt one, so that what is on record is written alone, with the hash of a
    kernel's source."""
    file = ROOT / TRITON_DECODE
    hashes = scores.sources([file])
    for module in (record, document, scores):
        for name in ("TRITON", "CUDA", "CUTE"):
            shipped = getattr(record, name)
            copy = Ledger(tmp_path / f"{name}.json", shipped.explained)
            copy.save(shipped.load())
            monkeypatch.setattr(module, name, copy, raising=False)
    monkeypatch.setattr(document, "PATH", tmp_path / "mutation.md")
    monkeypatch.setattr(scores, "PATH", tmp_path / "mutation_scores.py")
    monkeypatch.setattr(scores, "sources", lambda: defaultdict(str, hashes))
    monkeypatch.setattr(sys, "argv", ["tests.mutants", "--cuda", "--seconds", "0"])
    runpy.run_path(str(ROOT / "tests/mutants/__main__.py"), run_name="__main__")
    assert "0 convicted" in capsys.readouterr().out
    assert "of 240" in (tmp_path / "mutation.md").read_text("utf-8")
    written = (tmp_path / "mutation_scores.py").read_text("utf-8")
    assert hashes.keys() & SCORES.keys()
    for variant in hashes.keys() & SCORES.keys():
        assert f'"{variant}": ("{hashes[variant]}", ' in written


@pytest.mark.for_ci
def test_a_mutant_that_raises_whatever_it_is_asked_is_broken(stand: Stand) -> None:
    ground = GROUNDS[0]
    name = "o_tile = acc / denominator[:, None]"
    text = source(ground.edited)
    begin = text.index(name)
    (first, *_) = mutations(text)
    wrong = type(first)("statement", "_flash_forward", 1, begin, begin + len(name), "raise 1")
    assert TritonHunt(stand)(TritonMutant.of(ground, wrong)).how == BROKEN
