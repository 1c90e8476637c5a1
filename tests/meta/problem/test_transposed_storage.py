"""K as a stored transpose (batch, heads, head_dim, seqlen): drawn, named, laid and refused; kernels
that take it are judged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from references.premises import Premise
from tests.harness.court import Court, court_of
from tests.harness.fake_trials import DECLARED
from tests.harness.laid import damage, laid
from verify.campaign.edge_cases import edge_cases
from verify.campaign.targets import Target
from verify.cell.arena import CANARY, Arena, bits, plan
from verify.problem import Layout, Problem, ProblemError
from verify.problem.coverage import bins_reachable, bins_required, coverage_bins
from verify.problem.inputs import tensors
from verify.problem.outside import outside
from verify.problem.refusal import excludes, inside
from verify.problem.sampling import draws
from verify.problem.storage import parse_storage
from verify.problem.storage.transposed import Transposed, TransposedV
from verify.problem.strategies import LIMITS, problems
from verify.variant import Declaration

torch.set_num_threads(1)

KERNELS = '''
import math

import torch

from verify.variant import Numerics, Softmax, Support, Variant


def support(layouts, *storages):
    return Support(
        dtypes=("float16", "float32"),
        head_dims=(8, 16),
        masks=("full", "causal"),
        grouped_heads=True,
        layouts=layouts,
        storages=storages,
    )


ALONE = support("aligned", "transposed")
EITHER = support("any", "strided", "transposed")


def keys_of(args):
    """K as (batch, heads, head_dim, seqlen), with the strides that it has."""
    return args.stored["k"].tensors[""] if "k" in args.stored else args.k.mT


def answer(args, out, lse, k):
    group = args.heads_q // args.heads_kv
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, args.v))
    seen = args.mask.dense(args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv)
    scores = (args.q.float()[..., None] * k[..., None, :, :]).sum(-2) * args.softmax_scale
    beyond = scores[..., args.seqlen_kv :].sum(-1, keepdim=True)
    scores = scores[..., : args.seqlen_kv].masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    p = torch.exp(scores - top)
    total = p.sum(-1)
    sums = (p[..., None] * v[..., None, :, :]).sum(-2) + 0.0 * beyond
    out.copy_(torch.where(total[..., None] == 0, 0.0, sums / total[..., None]))
    lse.copy_(top[..., 0] + total.log())


def right(args, out, lse, workspace):
    ALONE.check(args, out)
    answer(args, out, lse, keys_of(args))


def either(args, out, lse, workspace):
    EITHER.check(args, out)
    answer(args, out, lse, keys_of(args))


def row_of(args, out, lse, row):
    """As if a row had so many elements."""
    ALONE.check(args, out)
    k = keys_of(args)
    batch, heads, dim, keys = k.shape
    answer(args, out, lse, k.as_strided(k.shape, (heads * dim * row, dim * row, row, 1)))


def packed(args, out, lse, workspace):
    row_of(args, out, lse, args.seqlen_kv)


def rounded(args, out, lse, workspace):
    row_of(args, out, lse, -(-args.seqlen_kv // 16) * 16)


def tail(args, out, lse, workspace):
    ALONE.check(args, out)
    k = keys_of(args)
    whole = (*k.shape[:3], -(-args.seqlen_kv // 8) * 8)
    answer(args, out, lse, k.as_strided(whole, k.stride()))


def scribbles(args, out, lse, workspace):
    right(args, out, lse, workspace)
    k = keys_of(args)
    k.as_strided((1,), (1,), k.storage_offset() + args.seqlen_kv).zero_()


def careless(args, out, lse, workspace):
    answer(args, out, lse, keys_of(args))


VARIANTS = [
    Variant(
        name=entry.__name__,
        family="torch",
        forward=entry,
        support=EITHER if entry is either else ALONE,
        numerics=Numerics(softmax=Softmax(exp="vexp", block_n=0)),
    )
    for entry in (right, either, packed, rounded, tail, scribbles, careless)
]
'''

ROUNDS = 10  # of draws, if they do not show all refusals

PITCHED = "b=2,hq=4,hkv=2,sq=5,skv=21,d=8,dtype=float16,lk=transposed.p16"
CASE = PITCHED.replace(".p16", "")


def taking(layouts: str, *storages: str) -> Declaration:
    support = replace(
        DECLARED.support,
        layouts=layouts,
        storages=storages,
        head_dims=(32, 64),
        dtypes=("float16",),
    )
    return replace(DECLARED, support=support)


ALONE, BOTH, ANY = (
    taking("aligned", "transposed"),
    taking("aligned", "strided", "transposed"),
    taking("any", "strided", "transposed"),
)


def drawn(declaration: Declaration, count: int = 80) -> list[Problem]:
    return draws(problems(declaration, dtype="float16", limits=LIMITS["interpreter"]), count)


def aligned(problem: Problem) -> bool:
    return problem.layout_k.aligned(problem.shape_k, 2, 16)


# Names, bins and draws.


def test_it_has_a_name_that_parses_back() -> None:
    for text in (CASE, PITCHED, f"{CASE},lv=bshd.p8"):
        assert Problem.parse(text).name == text
    assert parse_storage("transposed.p16") == Transposed(16)
    (feature,) = Problem.parse(CASE).features
    assert (feature.label, feature.breaks) == ("transposed storage", {Premise.STRIDED_STORAGE})
    for text in ("transposed.16", "transposed.p", "transposed.p-1", "transposed.p8.p8"):
        with pytest.raises(ProblemError, match="is not transposed storage"):
            parse_storage(text)
    with pytest.raises(ProblemError, match="pitch counts elements and cannot be negative"):
        Transposed(-1)
    with pytest.raises(ProblemError, match="layout_v: transposed storage is for k only"):
        Problem.parse(f"{CASE},lv=transposed")


def test_v_can_lie_so_beside_strided_k() -> None:
    name = CASE.replace("d=8", "d=32").replace("lk=transposed", "lv=transposedv.p16")
    problem = Problem.parse(name)
    assert problem.layout_v == TransposedV(16) == parse_storage("transposedv.p16")
    assert problem.layout_v.sibling == TransposedV(0)
    assert problem.layout_v.misaligned == TransposedV(17)
    with pytest.raises(ProblemError, match=r"'transposedv\.8' is not transposedv storage"):
        parse_storage("transposedv.8")
    with pytest.raises(ProblemError, match="layout_k: transposedv storage is for v only"):
        Problem.parse(f"{CASE}v")
    found = drawn(taking("aligned", "transposedv"))
    assert {(p.layout_k.word, p.layout_v.word) for p in found} == {("strided", "transposedv")}
    reason = "strided storage is none of transposedv"
    assert excludes(taking("any", "transposedv").support, problem.but(layout_v=Layout())) == (
        "layout_k",
        reason,
    )

    arena, where = Arena(), plan(problem, lse=True, workspace={})
    given = tensors(problem)
    laid(arena, where, given.named)
    assert torch.equal(where["v"].view(torch.from_numpy(arena.bytes)), given.v.mT)
    arena.close()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("keys", [1, 7, 16, 21, 64])
def test_its_rows_are_aligned_or_not_in_every_dtype(keys: int, itemsize: int) -> None:
    shape = (2, 3, 8, keys)
    for storage in (Transposed(), Transposed(16), Transposed(144), Transposed(33)):
        assert storage.aligned((2, 3, keys, 8), itemsize, 16) is (storage.pitch % 16 == 0), shape
        assert not storage.misaligned.aligned((2, 3, keys, 8), itemsize, 16)
        assert storage.sibling != storage


@pytest.mark.for_ci
def test_it_is_drawn_for_who_takes_it() -> None:
    for declaration, words in (
        (ALONE, {"transposed"}),
        (BOTH, {"strided", "transposed"}),
        (DECLARED, {"strided"}),
    ):
        found = drawn(declaration, 200)
        assert {p.layout_k.word for p in found} == words
        assert {p.layout_v.word for p in found} == {"strided"}
        assert len({p.layout_v for p in found}) > 3
        assert all(Problem.parse(p.name) == p for p in found)
        assert all(inside(declaration.support, p) for p in found)
        if "transposed" in words:
            held = [p for p in found if p.layout_k.word == "transposed"]
            assert len(held) > 20
            assert len({p.layout_k for p in held}) == 4
            assert all(map(aligned, held))
    held = [p for p in drawn(ANY, 200) if p.layout_k.word == "transposed"]
    assert 5 < sum(not aligned(p) for p in held) < len(held) / 2


@pytest.mark.for_ci
def test_it_has_a_bin_and_edge_cases() -> None:
    assert "storage:transposed" in bins_required()
    assert "storage:transposed" in bins_reachable(BOTH.support)
    assert "storage:transposed" not in bins_reachable(DECLARED.support)
    config = DECLARED.configs[0]
    assert "storage:transposed" in coverage_bins(Problem.parse(CASE), config)
    for declaration, words in ((ALONE, {"transposed"}), (BOTH, {"strided", "transposed"})):
        cases = edge_cases(Target(declaration, config, "float16", "accuracy"))
        assert len(cases) > 30
        assert {p.layout_k.word for p in cases} == words


def test_it_is_refused_by_the_argument() -> None:
    problem = Problem.parse(CASE.replace("d=8", "d=32"))
    plain = problem.but(layout_k=Layout())
    odd = problem.but(layout_k=Transposed(1))
    reason = "transposed storage is none of strided"
    assert excludes(taking("any", "strided").support, problem) == ("layout_k", reason)
    assert excludes(ALONE.support, plain) == (
        "layout_k",
        "strided storage is none of transposed",
    )
    assert inside(ALONE.support, problem.but(layout_v=Layout("bshd")))
    reason = "rows of transposed.p1 are not aligned to 16 bytes"
    for declaration in (ALONE, BOTH):
        assert excludes(declaration.support, odd) == ("layout_k", reason)
    assert inside(ANY.support, odd)


def test_refusals_are_drawn() -> None:
    for declaration, words in (
        (DECLARED, {"transposed"}),
        (ALONE, {"strided", "transposed.p1"}),
        (BOTH, {"bhsd.p1", "transposed.p1"}),
    ):
        strategy = outside(declaration, dtype="float16", limits=LIMITS["interpreter"])
        edges: list[Problem] = []
        for number in range(ROUNDS):
            drawn_now = draws(strategy, 80, number)
            edges += [problem for problem, argument in drawn_now if argument == "layout_k"]
            if {x for p in edges for x in (p.layout_k.word, p.layout_k.name)} >= words:
                break
        assert {x for p in edges for x in (p.layout_k.word, p.layout_k.name)} >= words
        assert not any(inside(declaration.support, p) for p in edges)


@pytest.mark.parametrize("word", ["transposed", "transposedv"])
def test_a_tensor_that_is_never_strided_is_not_drawn_with_a_pitch(word: str) -> None:
    """A strided problem is refused as K, whatever has another storage alone."""
    support = replace(ALONE.support, storages=(word,))
    strategy = outside(
        replace(ALONE, support=support), dtype="float16", limits=LIMITS["interpreter"]
    )
    drawn = [pair for number in range(ROUNDS) for pair in draws(strategy, 80, number)]
    assert any(problem.layout_q.name == "bhsd.p1" for problem, _ in drawn)
    never = "layout_v" if word == "transposedv" else "layout_k"
    assert not any(getattr(problem, never).name == "bhsd.p1" for problem, _ in drawn)
    for problem, argument in drawn:
        refused = excludes(support, problem)
        assert refused is None or refused[0] == argument


# Memory.


@pytest.mark.parametrize("keys", [1, 16, 21])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_it_is_laid_and_its_gaps_are_canaries(keys: int, dtype: str) -> None:
    problem = Problem.parse(PITCHED.replace("skv=21", f"skv={keys}")).but(dtype=dtype)
    arena, where = Arena(), plan(problem, lse=True, workspace={})
    given = tensors(problem)
    runs = laid(arena, where, given.named)
    slot = where["k"]
    whole = torch.from_numpy(arena.bytes)
    assert torch.equal(slot.view(whole), given.k.mT)
    row = -(-keys // 16) * 16 + 16
    assert slot.strides == (2 * 8 * row, 8 * row, row, 1)
    held = bits(whole[slot.begin : slot.end].view(problem.format.torch))
    canary = int.from_bytes(CANARY.to_bytes(2, "little") * 4, "little") & (
        (1 << 8 * problem.format.itemsize) - 1
    )
    assert int((held == canary).sum()) == held.numel() - given.k.numel() == 2 * 2 * 8 * (row - keys)
    arena.bytes[slot.end - 1] ^= 0xFF
    found = damage(runs)
    assert found is not None
    assert found.slot == "k"
    arena.close()


# Kernels.


@pytest.fixture(scope="module")
def court(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Court]:
    with court_of(tmp_path_factory.mktemp("kernels"), transposed=KERNELS) as court:
        assert not court.roster.failures
        yield court


GROUPS = ("accuracy", "counting", "gather", "poison", "slice", "relaunch", "key_permutation")


@pytest.mark.first_look(2)
@pytest.mark.parametrize("group", GROUPS)
def test_a_right_kernel_passes(court: Court, group: str) -> None:
    for name in ("right", "either"):
        declaration = court.declaration(name)
        target = Target(declaration, declaration.configs[0], "float16", group)
        asked = draws(target.problems, 24)
        held = [p for p in asked if p.layout_k.word == "transposed"]
        assert len(held) >= 6
        oracle = "bound" if group == "accuracy" else group
        found = set()
        for problem in sorted(held, key=lambda p: p.pairs * p.head_dim)[len(held) // 2 :]:
            outcomes = {o: v.outcome for o, v in court.verdicts(name, group, problem).items()}
            assert "fail" not in outcomes.values(), (outcomes, problem.name)
            found.add(outcomes[oracle])
            if "pass" in found:  # an oracle can be inapplicable to what is drawn
                break
        assert "pass" in found


def test_a_kernel_that_takes_rows_for_packed_is_convicted(court: Court) -> None:
    assert "bound" in court.convicted("packed", "accuracy", CASE)
    assert not court.convicted("packed", "accuracy", CASE.replace("skv=21", "skv=32"))


def test_a_kernel_that_does_not_know_the_pitch_is_convicted(court: Court) -> None:
    assert "bound" in court.convicted("rounded", "accuracy", PITCHED)
    assert not court.convicted("rounded", "accuracy", CASE)


def test_a_kernel_that_reads_behind_the_last_key_is_convicted(court: Court) -> None:
    assert "nan" in court.convicted("tail", "accuracy", CASE)["bound"]
    assert not court.convicted("tail", "accuracy", CASE.replace("skv=21", "skv=24"))


def test_a_kernel_that_writes_behind_the_last_key_is_convicted(court: Court) -> None:
    found = court.convicted("scribbles", "accuracy", CASE)
    assert re.match(r"changes its input k: \d+ bytes changed", found["memory"])


def test_misaligned_rows_are_to_be_refused(court: Court) -> None:
    odd = CASE.replace("transposed", "transposed.p1")
    assert court.verdicts("right", "refusal", Problem.parse(odd))["refusal"].outcome == "pass"
    assert not court.convicted("either", "accuracy", odd)
    said = "should refuse layout_k: rows of transposed.p1 are not aligned to 16 bytes"
    assert said in court.convicted("careless", "refusal", odd)["refusal"]
