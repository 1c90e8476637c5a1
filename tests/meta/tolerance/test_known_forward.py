"""Known roundings of a forward, and the lattice of its O: honest kernels of every order pass, and
faults that the bound of any rounding lets through are seen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests import known_roundings_sweep
from tests.harness.emulation import Kernel, Luck
from tests.harness.ordered_forwards import (
    HALVES,
    HONEST,
    SHAPES,
    TILE,
    judged,
    ordered,
    problem_of,
    suits,
    truth_of,
)
from verify.judging.known_forward import finer
from verify.problem.distributions import ordinary
from verify.tolerance import forward
from verify.tolerance.forward import resolve
from verify.tolerance.forward_known import known_sum
from verify.tolerance.forward_maxima import block_maxima, scale_blocks
from verify.variant import Config, DeclarationError, Maximum

ORDINARY = "sq=48,skv=200,d=64"
CAUSAL = "sq=48,skv=96,d=64,mask=causal"
WINDOW = "sq=64,skv=128,d=64,mask=window.50.20"
ASCENDING = ordered("ascending")
DESCENDING = ordered("descending", "descending")
WHOLE_FIRST = ordered("whole blocks first", "whole_first", block_n=16)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.first_look(6)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_no_honest_kernel_is_refused(kernel: Kernel) -> None:
    """Every distribution, each with the next shape, dtype and errors in turn;
    `tests.known_roundings_sweep` asks the same of a million elements."""
    shapes = [shape for shape in SHAPES if suits(kernel, shape)]
    for turn, distribution in enumerate(ordinary()):
        dtype = kernel.dtypes[turn % len(kernel.dtypes)]
        problem = problem_of(shapes[turn * 5 % len(shapes)], dtype, distribution, turn)
        luck = list(Luck)[turn % 2]
        found = judged(problem, kernel, luck)
        assert found.worst <= 1, (kernel.name, problem.name, luck, found.worst)
        assert float(found.bounded.max()) <= 1


# The fault, the kernel that has it, the shape that shows it.
FAULTS = (
    ("P truncated", ASCENDING, ORDINARY),
    ("P truncated", DESCENDING, CAUSAL),
    ("P truncated", WHOLE_FIRST, WINDOW),
    ("O truncated", ASCENDING, ORDINARY),
    ("stale maximum", ASCENDING, ORDINARY),
    ("stale maximum", DESCENDING, ORDINARY),
    ("drops the lightest key", ASCENDING, f"{ORDINARY},scale=0.2"),
)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("fault", "kernel", "shape"), FAULTS, ids=[f"{f}, {k.name}" for f, k, _ in FAULTS]
)
def test_faults_that_were_invisible_are_seen(
    fault: str, kernel: Kernel, shape: str, dtype: str
) -> None:
    problem = problem_of(shape, dtype)
    assert judged(problem, kernel).worst <= 1
    found = judged(problem, kernel.but(fault=fault), declared=kernel)
    assert float(found.bounded.max()) <= 1
    assert found.worst > 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("kernel", "declared", "shape"),
    [
        (DESCENDING, ASCENDING, ORDINARY),
        (ASCENDING, DESCENDING, ORDINARY),
        (ordered("one block", block_n=0), ASCENDING, ORDINARY),
        (ASCENDING.but(block_n=128), ASCENDING, ORDINARY),
        (WHOLE_FIRST, WHOLE_FIRST.but(key_order="ascending"), WINDOW),
        (WHOLE_FIRST, WHOLE_FIRST.but(tile=64), WINDOW),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_wrong_order_is_seen(kernel: Kernel, declared: Kernel, shape: str, dtype: str) -> None:
    """Other blocks, too, and tiles of other rows; each is within the bound."""
    problem = problem_of(shape, dtype)
    assert judged(problem, kernel).worst <= 1
    found = judged(problem, kernel, declared=declared)
    assert float(found.bounded.max()) <= 1
    assert found.worst > 1


def test_where_every_row_sees_the_first_key_whole_blocks_first_is_ascending() -> None:
    problem = problem_of(CAUSAL, "bfloat16")
    ascending = WHOLE_FIRST.but(key_order="ascending")
    for tile in (TILE, 32):
        first = truth_of(problem, replace(WHOLE_FIRST, tile=tile)).interval
        plain = truth_of(problem, ascending).interval
        assert first is not None
        assert plain is not None
        assert torch.equal(first.middle, plain.middle)
        assert torch.equal(first.reach, plain.reach)


def test_a_kernel_that_rounds_less_or_has_smaller_tiles_is_explained() -> None:
    """P in fp32 and a tile of 16 rows are no fault, though not declared; P truncated is one."""
    problem = problem_of(WINDOW, "bfloat16")
    declared = replace(WHOLE_FIRST, tile=64)
    others = [
        replace(declared, numerics=numerics, tile=config.block_m)
        for numerics, config in finer(declared.numerics, Config(block_m=64), "bfloat16")
    ]
    assert [each.tile for each in others] == [32, 16, 64, 32, 16]
    for honest in (WHOLE_FIRST, declared.but(probability="float32")):
        assert judged(problem, honest, declared=declared).worst > 1
        assert min(judged(problem, honest, declared=each).worst for each in others) <= 1
    for each in (declared, *others):
        assert judged(problem, declared.but(fault="P truncated"), declared=each).worst > 1


def test_finer_declarations_leave_out_what_is_declared() -> None:
    config = Config(block_m=64, block_n=32)
    found = list(finer(ASCENDING.numerics, config, "float16"))
    assert [each.output.probability for each, _ in found] == ["float32"]
    assert not list(finer(ASCENDING.numerics, config, "float32"))
    narrow = list(finer(ASCENDING.but(accumulator="float16").numerics, config, "float16"))
    assert [each.products.accumulator for each, _ in narrow] == ["float32"]
    for numerics, other in (*found, *narrow):
        resolve(numerics, other, problem_of(ORDINARY, "float16"), "sm_90")


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 6.0), ("float16", 4.0)])
def test_the_known_interval_is_far_narrower(dtype: str, least: float) -> None:
    """Never wider than the bound; the median of the ratio is what docs/tolerance.md says."""
    for kernel in (ASCENDING, DESCENDING):
        found = judged(problem_of(ORDINARY, dtype), kernel)
        far = (found.span.middle - found.truth.out).abs()
        assert bool((far + found.span.reach <= found.truth.out_bound).all())
        assert found.sharper() > least
        assert found.single > (0.5 if dtype == "bfloat16" else 0.05)


@pytest.mark.for_ci
def test_the_sweep_refuses_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--elements", "3000", "--climb", "1", "--mixed", "60", "--only", "three parts"]
    assert known_roundings_sweep.main(words) == 0
    said = capsys.readouterr().out
    assert "three parts, bfloat16:" in said
    assert "mixed: " in said
    wrong = ASCENDING.but(fault="O truncated", name="wrong", dtypes=("bfloat16",))
    monkeypatch.setattr(known_roundings_sweep, "HONEST", (wrong,))
    assert known_roundings_sweep.main(words[:6]) == 1
    assert "REFUSED" in capsys.readouterr().out


# What is left out of the weights' errors, and an honest kernel that needs it.
TERMS = {
    "the maximum's error": (
        lambda w, block: replace(w, error=torch.zeros_like(w.error)),
        ("tanh.approx", "sq=9,skv=33,d=24,dv=40,softcap=20.0", "outliers", 4),
    ),
    "the rescales": (
        lambda w, block: replace(w, rescaled=torch.zeros_like(w.rescaled)),
        ("CPU, fexp_u20", "sq=4,skv=200,d=64,scale=1.0", "small_integers", 31),
    ),
    "the row sum": (
        lambda w, block: replace(
            w, moved=torch.zeros_like(w.moved), total=torch.ones_like(w.total)
        ),
        ("CPU, fexp_u20", "sq=5,skv=3,d=16", "v_mean", 0),
    ),
    "the error of p~": (
        lambda w, block: replace(w, upper=block.probabilities.clone()),
        ("CPU, fexp_u20", "sq=12,skv=30,d=16,mask=dense.50.3", "subnormals", 280),
    ),
}


@pytest.mark.parametrize("term", TERMS)
def test_every_term_is_needed(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without, (name, shape, distribution, seed) = TERMS[term]
    kernel = next(kernel for kernel in HONEST if kernel.name == name)
    problem = problem_of(shape, "bfloat16", distribution, seed)
    assert judged(problem, kernel, Luck.AGAINST).worst <= 1

    def less(block, values, a, problem, w, room):  # type: ignore[no-untyped-def]
        return known_sum(block, values, a, problem, without(w, block), room)

    monkeypatch.setattr(forward, "known_sum", less)
    assert judged(problem, kernel, Luck.AGAINST).worst > 1


def test_an_order_that_is_not_declared_promises_nothing() -> None:
    for kernel in (ASCENDING.but(key_order="any"), ASCENDING.but(fault="O truncated")):
        truth = truth_of(problem_of(ORDINARY, "bfloat16"), kernel.but(key_order="any"))
        assert truth.interval is None
    with pytest.raises(DeclarationError, match="key_order: 'forward' is none of any, ascending"):
        Maximum(key_order="forward")


def test_parts_are_those_declared_or_the_configs() -> None:
    problem = problem_of(ORDINARY, "bfloat16")
    split = ASCENDING.but(split_keys=True, parts=None).numerics
    for options, parts in (((), 0), ((("split", 4),), 4), ((("split", "all"),), 0)):
        found = resolve(split, Config(block_n=32, options=options), problem, "sm_90")
        assert found.key_parts == parts
        assert found.knows_p == (parts > 0)
    assert resolve(
        ASCENDING.but(split_keys=True, parts=2).numerics, Config(), problem, "cpu"
    ).knows_p
    with pytest.raises(ValueError, match=r"parts only beside numerics\.output\.split_keys"):
        resolve(ASCENDING.but(parts=2).numerics, Config(), problem, "sm_90")


@pytest.mark.parametrize("dtype", HALVES)
def test_other_parts_than_declared_are_seen(dtype: str) -> None:
    problem = problem_of(ORDINARY, dtype)
    kernel = ordered("parts", split_keys=True, style="split", parts=3)
    assert judged(problem, kernel).worst <= 1
    for wrong in (kernel.but(parts=1), kernel.but(key_order="descending")):
        found = judged(problem, wrong, declared=kernel)
        assert float(found.bounded.max()) <= 1
        assert found.worst > 1


def test_the_bound_is_the_same_for_every_order() -> None:
    for shape, dtype in itertools.product((ORDINARY, WINDOW), HALVES):
        problem = problem_of(shape, dtype)
        plain = truth_of(problem, WHOLE_FIRST.but(key_order="any"))
        for order in ("ascending", "descending", "whole_first"):
            found = truth_of(problem, WHOLE_FIRST.but(key_order=order))
            assert torch.equal(found.out_bound, plain.out_bound)
            assert torch.equal(found.lse_bound, plain.lse_bound)


def test_blocks_of_any_length() -> None:
    made = torch.Generator().manual_seed(3)
    for keys, size in ((1, 16), (16, 16), (17, 16), (40, 16), (40, 0), (5, 8)):
        pairs = torch.randn(2, 3, keys, generator=made, dtype=torch.float64)
        parts = pairs.split(size or keys, -1)
        most = block_maxima(pairs, size)
        assert torch.equal(most, torch.stack([part.amax(-1) for part in parts], -1))
        scaled = scale_blocks(pairs, most, size, torch.empty_like(pairs))
        wanted = [part * most[..., n, None] for n, part in enumerate(parts)]
        assert torch.equal(scaled, torch.cat(wanted, -1))
