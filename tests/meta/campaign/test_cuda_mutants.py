"""CUDA mutants are what their operators say, the record is of today's sources, every survivor has
its reason, and a sample of the convicted ones is convicted again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.host_library import runs
from tests.harness.ptx_host import inputs_of
from tests.mutants.cuda.host_hunt import EXECUTION, Question
from tests.mutants.cuda.hunt import CudaHunt, questions
from tests.mutants.cuda.mutant import BUILDS, GROUNDS, CudaMutant, chosen
from tests.mutants.cuda.operators import code_of, mutations
from tests.mutants.mutant import Mutation, source
from tests.mutants.record import BROKEN, CUDA, KILLED, SAME, SURVIVORS, Score
from tests.properties import tier
from verify.problem import Problem

MUTANTS = {mutant.id: mutant for mutant in chosen()}
ENTRIES = CUDA.load()
KILLS = [MUTANTS[id_] for id_, entry in ENTRIES.items() if entry.how == KILLED and id_ in MUTANTS]

KERNEL = """#include "a < b.h"
// A comment: 1 < 2.
__device__ void step(const Arguments& a, int (&b)[4], long long row) {
    const int key = block * a.k.row + 8 * lane % 4;
    if (key >= seen.high && first <= row) {
        s[key] = -infinity();
    }
    l *= alpha;
    advance(slot);
    const float most = fmaxf(weight(m, l), 2.0f);
    x = key < 3 ? most : static_cast<float>(row);
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // all
}
"""
EXPECTED = (
    ("comparison", "key > seen.high"),
    ("comparison", "key <= 3 ?"),
    ("sign", "a.k.row - 8"),
    ("index", "lane / 4"),
    ("boundary", "lane % 5"),
    ("operand", "block + 8"),
    ("stride", "a.k.head"),
    ("stride", "a.v.row"),
    ("order", "weight(l, m)"),
    ("constant", "2.001953125f"),
    ("function", "fminf(weight(m, l), 2.0f)"),
    ("barrier", "    ;  // all"),
    ("wait", "wait_group<0 + 1>"),
    ("branch", "if (false)"),
    ("branch", "if (true || key"),
    ("branch", "3 && false ? most"),
    ("mask", "seen.high || first"),
    ("mask", "seen.low"),
    ("scale", "    ;\n    advance"),
    ("statement", "    ;\n    const float most"),
    ("dtype", ": (row)"),
)


@pytest.fixture(scope="module")
def hunt() -> Iterator[CudaHunt]:
    with CudaHunt() as opened:
        yield opened


@pytest.fixture(scope="module")
def acquitted() -> set[str]:
    """The questions that the kernels as they are have passed."""
    return set()


@pytest.mark.parametrize(("operator", "text"), EXPECTED, ids=[text for _, text in EXPECTED])
def test_an_operator_changes_one_place(operator: str, text: str) -> None:
    made = [each for each in mutations(KERNEL) if text in each.applied(KERNEL)]
    assert operator in {each.operator for each in made}


def test_comments_and_the_preprocessor_stay() -> None:
    assert len(code_of(KERNEL)) == len(KERNEL)
    for made in mutations(KERNEL):
        text = made.applied(KERNEL)
        assert text.startswith('#include "a < b.h"\n// A comment: 1 < 2.\n')
        assert text != KERNEL
        assert "(&b)[4]" in text
        assert made.function == "step"


def test_every_header_has_mutants_of_most_operators() -> None:
    assert {mutant.edited for mutant in MUTANTS.values()} == set(GROUNDS)
    assert len(MUTANTS) == len(chosen()) >= 100
    wanted = "comparison boundary index stride order dtype constant barrier mask scale"
    assert set(wanted.split()) <= {mutant.mutation.operator for mutant in MUTANTS.values()}


def test_the_record_is_of_the_sources_as_they_are() -> None:
    assert set(ENTRIES) <= set(MUTANTS), "run python -m tests.mutants --cuda --write"
    survivors = {id_ for id_, entry in ENTRIES.items() if entry.how in SURVIVORS}
    assert set(CUDA.reasons()) == survivors
    assert Score.of(MUTANTS.values(), CUDA).counted >= 50


def test_a_question_parses_back() -> None:
    for question in questions(BUILDS[-1]):
        assert Question.parse(question.id) == question


def test_spoiled_keys_are_those_of_blocks_that_no_row_reads() -> None:
    problem = Problem.parse("sq=30,skv=210,d=32,dtype=float16,mask=window.20.2")
    lows, highs = problem.mask.row_bounds(1, 30, 210)
    assert int(lows.min()) == 160
    for block, first in ((64, 128), (32, 160)):
        q, k, v = (
            placed.tensor.isnan().all(-1)[0, 0] for placed in inputs_of(problem, spoiled=block)
        )
        assert not q.any()
        for keys in (k, v):
            assert keys[:first].all()
            assert not keys[first : int(highs.max())].any()


def spread() -> list[CudaMutant]:
    """Kills of every header and of every operator, the quickest ones."""
    found: dict[object, CudaMutant] = {}
    for mutant in sorted(KILLS, key=lambda mutant: ENTRIES[mutant.id].seconds):
        for kind in (mutant.edited, mutant.mutation.operator):
            found.setdefault(kind, mutant)
    return list({mutant.id: mutant for mutant in found.values()}.values())


@pytest.mark.for_ci
@runs
@pytest.mark.parametrize("mutant", tier.for_ci(spread(), keep=1), ids=lambda mutant: mutant.id)
def test_a_convicted_mutant_is_convicted_again_and_the_kernel_is_not(
    mutant: CudaMutant, hunt: CudaHunt, acquitted: set[str]
) -> None:
    entry = ENTRIES[mutant.id]
    question = Question.parse(entry.by.partition(":")[2])
    if question.id not in acquitted:
        assert hunt.verdict(hunt.library(question.build, None), question) is None
        acquitted.add(question.id)
    assert hunt.again(mutant, entry)


def planted(before: str, after: str) -> CudaMutant:
    """The kernel's loop over blocks of keys with another text."""
    edited = next(iter(GROUNDS))
    start = source(edited).index(before)
    return CudaMutant(edited, Mutation("planted", "run", 1, start, start + len(before), after))


@runs
@pytest.mark.for_ci
@pytest.mark.parametrize(
    ("after", "how"),
    [
        ("raise_maxima(); no_name();", BROKEN),
        ("raise_maxima(); ;", SAME),
        ("while (a.seqlen_q > 0) {}", KILLED),
        ("*reinterpret_cast<volatile int*>(64) = 1;", KILLED),
        ("hide_keys(block);", KILLED),
    ],
    ids=["does not compile", "the same", "hangs", "crashes", "wrong"],
)
def test_a_hunt_ends(after: str, how: str, hunt: CudaHunt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt, "builds", BUILDS[:1])
    monkeypatch.setattr(hunt, "seconds", 2)
    entry = replace(hunt(planted("raise_maxima();", after)), seconds=0)
    assert entry.how == how
    assert (EXECUTION in entry.by) == after.startswith(("while", "*"))
