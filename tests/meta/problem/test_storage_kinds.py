"""Storages: a kind from outside the tree is drawn, named, laid, guarded and judged, and refused by
kernels that do not take it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from references.premises import EVERY_PREMISE, Premise
from tests.harness.court import Court, court_of
from tests.harness.fake_trials import DECLARED
from tests.harness.laid import damage, laid
from tests.harness.outside_storage import KERNELS, STORAGES
from verify.campaign.edge_cases import edge_cases
from verify.campaign.targets import Target, excludes_group
from verify.cell.arena import CANARY, Arena, bits, plan, side_by_side, side_name
from verify.evidence import INAPPLICABLE
from verify.problem import Layout, Problem, ProblemError, storage
from verify.problem.coverage import bins_reachable, bins_required, coverage_bins
from verify.problem.inputs import tensors
from verify.problem.outside import outside
from verify.problem.refusal import excludes, inside
from verify.problem.sampling import draws
from verify.problem.storage import Storage, parse_storage, storage_kind, storage_words
from verify.problem.storage.base import KINDS
from verify.problem.strategies import LIMITS, problems
from verify.report.states import claims
from verify.variant import Declaration

torch.set_num_threads(1)

ROUNDS = 10  # of draws, if they do not show all refusals
PAGED = "b=2,hq=4,hkv=2,sq=5,skv=21,d=8,dtype=float32,lk=paged.8.3,lv=paged.8.3"
TILED = PAGED.replace("paged.8.3", "tiles")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, type[Storage]]]:
    """The storages of a file outside the tree, in a folder that the package looks into."""
    folder = tmp_path_factory.mktemp("storages")
    (folder / "elsewhere.py").write_text(STORAGES, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "__path__", [*storage.__path__, str(folder)])
        storage.import_kinds()
        try:
            yield {word: storage_kind(word) for word in ("paged", "tiles")}
        finally:
            for word in ("paged", "tiles"):
                KINDS.pop(word, None)
            sys.modules.pop(f"{storage.__name__}.elsewhere", None)


def taking(*storages: str, **changes: object) -> Declaration:
    return replace(DECLARED, support=replace(DECLARED.support, storages=storages, **changes))


def drawn(declaration: Declaration, count: int = 60) -> list[Problem]:
    return draws(problems(declaration, dtype="float16", limits=LIMITS["interpreter"]), count)


# Names, bins and draws.


def test_it_has_a_name_that_parses_back(kinds: dict[str, type[Storage]]) -> None:
    assert storage_words() == ("strided", "transposed", "transposedv", "paged", "tiles")
    for text in (PAGED, TILED, TILED.replace("lv=tiles", "lv=bshd.p8")):
        assert Problem.parse(text).name == text
    assert Problem.parse(PAGED).layout_k == kinds["paged"](8, 3)
    assert parse_storage("bshd.p8.o1.xh") == Layout("bshd", 8, 1, "h")
    for text, said in (
        ("pagd", "order 'pagd' is none of bhsd, bshd, sbhd, transposed, transposedv, paged, tiles"),
        ("paged.8", "'paged.8' is no paged storage: not enough values"),
    ):
        with pytest.raises(ProblemError, match=f"lk: '{text}' does not parse .layout: {said}"):
            Problem.parse(f"sq=1,skv=1,d=8,dtype=float32,lk={text}")
    with pytest.raises(ProblemError, match="layout_out: tiles storage is for k, v only"):
        Problem.parse("sq=1,skv=1,d=8,dtype=float32,lo=tiles")


def test_it_is_a_feature_that_breaks_what_it_does_not_vouch_for(
    kinds: dict[str, type[Storage]],
) -> None:
    (feature,) = Problem.parse(PAGED).features
    assert (feature.label, feature.breaks) == ("paged storage", {Premise.STRIDED_STORAGE})
    (feature,) = Problem.parse(TILED).features
    assert (feature.label, feature.breaks) == ("tiles storage", EVERY_PREMISE)
    assert Problem.parse("sq=1,skv=1,d=8,dtype=float32,lk=bshd").features == ()


def test_it_is_drawn_for_who_takes_it(kinds: dict[str, type[Storage]]) -> None:
    several, alone = drawn(taking("strided", "paged", "tiles")), drawn(taking("paged"))
    for word in ("strided", "paged", "tiles"):
        assert sum(p.layout_k.word == word for p in several) >= 5
    assert {p.layout_v.word for p in alone} == {"paged"}
    assert len({p.layout_v for p in alone}) > 4
    for problem in (*several, *alone):
        assert Problem.parse(problem.name) == problem
        assert problem.layout_k.word == problem.layout_v.word
        assert {problem.layouts[name].word for name in ("q", "out", "dout")} == {"strided"}
    assert {p.layout_k.word for p in drawn(DECLARED)} == {"strided"}


def test_it_has_a_bin_and_edge_cases(kinds: dict[str, type[Storage]]) -> None:
    assert {"storage:paged", "storage:tiles"} <= set(bins_required())
    assert "storage:paged" in bins_reachable(taking("paged").support)
    assert "storage:paged" not in bins_reachable(DECLARED.support)
    config = DECLARED.configs[0]
    assert "storage:paged" in coverage_bins(Problem.parse(PAGED), config)
    cases = edge_cases(Target(taking("paged"), config, "float16", "accuracy"))
    assert len(cases) > 30
    assert {p.layout_k.word for p in cases} == {"paged"}


def test_it_is_refused_by_the_argument(kinds: dict[str, type[Storage]]) -> None:
    problem = Problem.parse(PAGED)
    reason = "paged storage is none of strided"
    assert excludes(DECLARED.support, problem) == ("layout_k", reason)
    assert inside(taking("paged").support, problem)
    strided = Problem.parse(PAGED.partition(",lk")[0])
    reason = "strided storage is none of paged"
    assert taking("paged").support.refusal(strided) == ("layout_k", reason)
    for declaration, words in ((DECLARED, {"paged", "tiles"}), (taking("paged"), {"strided"})):
        strategy = outside(declaration, dtype="float16", limits=LIMITS["interpreter"])
        edges: list[Problem] = []
        for number in range(ROUNDS):
            drawn_now = draws(strategy, 80, number)
            edges += [problem for problem, argument in drawn_now if argument == "layout_k"]
            if {p.layout_k.word for p in edges} >= words:
                break
        assert {p.layout_k.word for p in edges} >= words
        assert not any(inside(declaration.support, p) for p in edges)


def test_a_report_says_that_a_kernel_takes_it() -> None:
    variant = {
        "support": {"head_dims": [64], "masks": ["full"], "storages": ["strided", "paged"]},
        "contract": {},
        "entries": ["forward"],
        "dtypes": [],
        "undeclared": False,
    }
    assert "strided or paged storage" in claims(variant)
    variant["support"]["storages"] = ["strided"]
    assert "storage" not in claims(variant)


# Memory.


@pytest.mark.parametrize("text", [PAGED, TILED, PAGED.replace("skv=21", "skv=16")])
def test_it_is_laid_and_its_gaps_are_canaries(kinds: dict[str, type[Storage]], text: str) -> None:
    problem, arena = Problem.parse(text), Arena()
    where, given = plan(problem, lse=True, workspace={}), tensors(problem)
    runs = laid(arena, where, given.named)
    whole = torch.from_numpy(arena.bytes)
    values = (CANARY << 16) + CANARY
    for name in "kv":
        pieces = problem.layouts[name].pieces(problem.shapes[name])
        held = {of: where[f"{name}.{of}" if of else name].view(whole) for of in pieces}
        stored = held["pages"] if "pages" in held else held[""]
        gaps = int((bits(stored.contiguous()) == values).sum())
        assert gaps == stored.numel() - getattr(given, name).numel()
        if "pages" in held:
            rows = held["pages"][held["table"].long()].transpose(1, 2).flatten(2, 3)
        else:
            rows = held[""].mT.flatten(2, 3)
        assert torch.equal(rows[:, :, : problem.seqlen_kv], getattr(given, name))
    assert damage(runs) is None
    slot = where["k.pages" if "pages" in held else "k"]
    arena.bytes[slot.end - 1] ^= 0xFF
    found = damage(runs)
    assert found is not None
    assert found.slot == slot.name
    both, inputs = side_by_side(where, [given.named, given.named])
    laid(arena, both, inputs)
    second = both[side_name(1, slot.name)].view(torch.from_numpy(arena.bytes))
    assert torch.equal(bits(second), bits(slot.view(torch.from_numpy(arena.bytes))))
    arena.close()


def test_gradients_of_it_are_strided(kinds: dict[str, type[Storage]]) -> None:
    problem = Problem.parse(PAGED)
    where = plan(problem, lse=True, workspace={}, entry="backward")
    assert where["dk"].shape == problem.shape_k
    assert "k.table" in where
    assert "k" not in where


# Kernels.


@pytest.fixture(scope="module")
def court(
    kinds: dict[str, type[Storage]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Court]:
    misspelt = KERNELS.replace('support("paged")', 'support("pagd")')
    folder = tmp_path_factory.mktemp("kernels")
    with court_of(folder, paged=KERNELS, misspelt=misspelt) as court:
        yield court


def test_a_kernel_that_takes_an_unknown_storage_does_not_load(court: Court) -> None:
    (failure,) = court.roster.failures
    said = (
        "ProblemError: storages: 'pagd' is none of strided, transposed, transposedv, paged, tiles"
    )
    assert failure.line.endswith(said)


def test_a_storage_that_vouches_for_nothing_is_asked_of_few(
    kinds: dict[str, type[Storage]],
) -> None:
    """A relation draws its problems without it; where there are none without, it is not asked."""
    either, alone = taking("strided", "tiles"), taking("tiles")
    for group, asked in (("accuracy", True), ("relaunch", True), ("slice", False)):
        target = Target(either, either.configs[0], "float16", group)
        words = {p.layout_v.word for p in draws(target.problems, 40)}
        assert words == ({"strided", "tiles"} if asked else {"strided"})
        reason = excludes_group(alone, group)
        assert (reason is None) is asked
    assert reason is not None
    assert reason.endswith("which tiles storage breaks")


GROUPS = ("accuracy", "counting", "gather", "poison", "slice", "relaunch", "key_permutation")


@pytest.mark.parametrize("group", GROUPS)
def test_a_right_kernel_passes(court: Court, group: str) -> None:
    declaration = court.declaration("right")
    target = Target(declaration, declaration.configs[0], "float32", group)
    asked = sorted(draws(target.problems, 12), key=lambda p: p.pairs * p.head_dim)
    for problem in asked[4:9:4]:
        assert problem.layout_k.word == "paged"
        outcomes = {o: v.outcome for o, v in court.verdicts("right", group, problem).items()}
        assert "fail" not in outcomes.values(), (outcomes, problem.name)
        assert outcomes["bound" if group == "accuracy" else group] == "pass"


def test_a_storage_that_vouches_for_nothing_is_asked_what_needs_nothing(court: Court) -> None:
    found = court.verdicts("tiled", "accuracy", Problem.parse(TILED))
    assert found["bound"].outcome == "pass"
    assert found["convexity"].outcome == "inapplicable"
    declaration = court.declaration("tiled")
    target = Target(declaration, declaration.configs[0], "float32", "gather")
    assert {p.layout_k.word for p in draws(target.problems, 12)} == {"strided"}


def test_an_oracle_that_does_not_know_it_is_inapplicable_and_says_why(court: Court) -> None:
    found = court.verdicts("tiled", "accuracy", Problem.parse(TILED))
    assert (found["bound"].outcome, found["bound"].observed) == ("pass", {})
    assert found["repeat"].outcome == "pass"
    skipped = found["convexity"]
    assert (skipped.outcome, skipped.measures, skipped.bins) == ("inapplicable", {}, ())
    words = skipped.observed.pop(INAPPLICABLE)
    assert re.fullmatch(r"needs exact_output and norm_bounded.*, which tiles storage breaks", words)
    assert not skipped.observed


def test_a_kernel_that_swaps_two_pages_is_convicted(court: Court) -> None:
    assert "bound" in court.convicted("swaps", "accuracy", PAGED)
    found = court.verdicts("swaps", "accuracy", Problem.parse(PAGED))
    assert found["bound"].case.endswith(PAGED)
    assert not court.convicted("swaps", "accuracy", PAGED.replace("paged.8.", "paged.64."))


def test_a_kernel_that_reads_behind_the_last_key_of_a_tile_is_convicted(court: Court) -> None:
    found = court.convicted("tail", "accuracy", TILED)
    assert "nan" in found["bound"]
    assert not court.convicted("tail", "accuracy", TILED.replace("skv=21", "skv=32"))


def test_a_kernel_that_writes_into_the_gap_of_a_page_is_convicted(court: Court) -> None:
    found = court.convicted("scribbles", "accuracy", PAGED)
    assert re.match(r"changes its input k\.pages: \d+ bytes changed", found["memory"])
    assert not court.convicted("scribbles", "accuracy", PAGED.replace("skv=21", "skv=24"))


def test_a_kernel_without_it_refuses_it_in_one_line(court: Court) -> None:
    assert court.verdicts("plain", "refusal", Problem.parse(PAGED))["refusal"].outcome == "pass"
    assert court.verdicts("right", "refusal", Problem.parse(TILED))["refusal"].outcome == "pass"
    found = court.convicted("careless", "refusal", PAGED)
    said = "should refuse layout_k: paged storage is none of strided with Unsupported"
    assert said in found["refusal"]


# Incomplete kinds.

MEMBERS = {name: getattr(Layout, name) for name in ("name", "parse", "pieces", "write")}


@pytest.mark.parametrize("lacks", [*MEMBERS, "word"])
def test_a_kind_without_it_is_refused_when_its_class_is_made(lacks: str) -> None:
    members = MEMBERS | {"word": "zebra"}
    del members[lacks]
    said = f"^storage: Zebra lacks {lacks}; see Storage in verify/problem/storage/base.py$"
    with pytest.raises(TypeError, match=said):
        type("Zebra", (Storage,), members)
    assert "zebra" not in KINDS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"word": "ze.bra"}, "Zebra.word 'ze.bra' is not of lower-case letters alone"),
        ({"word": "strided"}, "Zebra: 'strided' is the name of another kind"),
        ({"word": "zebra", "heads": ("bshd",)}, "Zebra: 'bshd' is the name of another kind"),
        ({"word": "zebra", "breaks": frozenset()}, "Zebra.breaks lacks Premise.STRIDED_STORAGE"),
        ({"word": "zebra", "holds": ("out",)}, r"Zebra.holds \('out',\) can be of q, k and v only"),
    ],
)
def test_a_kind_of_a_bad_name_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=f"^storage: {said}"):
        type("Zebra", (Storage,), MEMBERS | changes)
    assert "zebra" not in KINDS
