"""Mutants of the CuTe forward: its words are known to the operators, the record is of today's
sources, every survivor has its reason, and a convicted one is convicted again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.harness.cute_host import file_of_all, has_headers, has_host
from tests.harness.ptx_host import Choice
from tests.mutants.cuda.host_hunt import Question
from tests.mutants.cuda.mutant import CudaMutant
from tests.mutants.cuda.operators import mutations
from tests.mutants.cute.hunt import Built, CuteHunt, compiled_together, questions
from tests.mutants.cute.mutant import BUILDS, GROUNDS, chosen
from tests.mutants.record import BROKEN, CUTE, KILLED, SURVIVORS
from tests.properties import tier

MUTANTS = {mutant.id: mutant for mutant in chosen()}
ENTRIES = CUTE.load()
KILLS = [MUTANTS[id_] for id_, entry in ENTRIES.items() if entry.how == KILLED and id_ in MUTANTS]

KERNEL = """CUTE_DEVICE void step(Arguments const& a, int batch) {
  int64_t place = int64_t(batch) * a.heads_q;
  cp_async_wait<1>();
  cp_async_fence();
  finish(place, batch);
}
"""
EXPECTED = (
    ("dtype", "int place ="),
    ("dtype", "= (batch) *"),
    ("wait", "cp_async_wait<1 + 1>"),
    ("wait", "  ;\n  finish"),
    ("order", "finish(batch, place)"),
)


@pytest.mark.parametrize(("operator", "text"), EXPECTED, ids=[text for _, text in EXPECTED])
def test_an_operator_changes_one_place(operator: str, text: str) -> None:
    made = [each for each in mutations(KERNEL) if text in each.applied(KERNEL)]
    assert operator in {each.operator for each in made}
    assert {each.function for each in made} == {"step"}


def test_parameters_do_not_change_places() -> None:
    assert not any("(int batch" in each.applied(KERNEL) for each in mutations(KERNEL))


def test_the_record_is_of_the_sources_as_they_are() -> None:
    assert set(ENTRIES) <= set(MUTANTS), "run python -m tests.mutants --cute --write"
    assert len(MUTANTS) == len(chosen()) == sum(GROUNDS.values())
    assert {id_ for id_, entry in ENTRIES.items() if entry.how in SURVIVORS} == set(CUTE.reasons())
    assert {mutant.edited for mutant in KILLS} <= set(GROUNDS)


def test_a_write_to_where_a_copy_is_on_its_way_is_seen() -> None:
    assert [mutant.mutation.operator for mutant in ON_WAY] == ["wait"]


def test_a_question_parses_back() -> None:
    for question in questions(BUILDS[0]):
        assert Question.parse(question.id) == question


def question_of(mutant: CudaMutant) -> Question:
    """The one that has convicted it."""
    return Question.parse(ENTRIES[mutant.id].by.partition(":")[2])


# The first three that one build convicts by what they compute, and one that writes O where Q is
# still on its way.  One that ends at a limit of CPU time would take all of it.
ANSWERED = [mutant for mutant in KILLS if not ENTRIES[mutant.id].by.startswith("execution:")]
BUILD = question_of(ANSWERED[0]).build
OF_BUILD = [mutant for mutant in ANSWERED if question_of(mutant).build == BUILD]
WAY = "a write to where a copy is on its way"
ON_WAY = [mutant for mutant in OF_BUILD if ENTRIES[mutant.id].by.startswith(WAY)]
JUDGED = [*ON_WAY[:1], *[mutant for mutant in OF_BUILD if mutant not in ON_WAY][:3]]


@pytest.fixture(scope="module")
def hunt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CuteHunt]:
    library = file_of_all(
        tmp_path_factory, "cute-mutants", lambda folder: compiled_together(folder, BUILD, JUDGED)
    )
    with CuteHunt() as hunt:
        hunt.take(library, BUILD, JUDGED)
        yield hunt


@has_headers
@has_host
@pytest.mark.for_ci
@pytest.mark.parametrize("mutant", tier.for_ci(JUDGED, keep=1), ids=lambda mutant: mutant.id)
def test_a_convicted_mutant_is_convicted_again_and_the_kernel_is_not(
    mutant: CudaMutant, hunt: CuteHunt
) -> None:
    question = question_of(mutant)
    assert hunt.verdict(hunt.library(question.build, None), question) is None
    assert hunt.again(mutant, ENTRIES[mutant.id])


def test_mutants_are_compiled_together_but_for_those_that_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, bad, last = list(MUTANTS.values())[:3]
    asked = []

    def compiled(
        hunt: CuteHunt, build: Choice, several: Sequence[CudaMutant | None]
    ) -> dict[Built, Path]:
        asked.append(tuple(several))
        hunt._count += 1
        if bad in several:
            said = f"in /folder/{hunt._place(several.index(bad))}/tiles.cuh:1: error"
            raise subprocess.CalledProcessError(1, "g++", stderr=said)
        return {(build, each): tmp_path / str(n) for n, each in enumerate(several)}

    monkeypatch.setattr(CuteHunt, "_compiled", compiled)
    monkeypatch.setattr(CuteHunt, "answer", lambda *_: (0, "O"))
    monkeypatch.setattr(CuteHunt, "verdict", lambda *_: None)
    hunt = CuteHunt()
    hunt.prepare([first, bad, last])
    assert [hunt(mutant).how for mutant in (first, bad, last)] == [KILLED, BROKEN, KILLED]
    assert asked == [(None, first, bad, last), (None, first, last), (bad,)]
