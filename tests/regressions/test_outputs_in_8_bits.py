"""Outputs in 8 bits: problems name their scale, oracles that know no such O are not asked, and what
has no bound is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.torch.flash_backward import VARIANT as FLASH
from references.output_scale import DTYPES, ScaledOutput
from tests.harness import in_process
from tests.harness.fake_trials import acquitted
from tests.harness.in_process import SUPPORT, Kernel, declared, trial
from tests.harness.reference_kernel import faulty, same, tried_by
from verify.arithmetic.dtypes import dtype_named
from verify.oracles import Oracle, counting, dyadic, oracles
from verify.problem import Problem
from verify.problem.coverage import bins_reachable, coverage_bins
from verify.problem.premises import broken, without_broken
from verify.problem.storage import ProblemError
from verify.tolerance.scaled_output import out_bound, stored_ends
from verify.tolerance.scaled_output import stored as known_stored
from verify.variant import Config, DeclarationError

torch.set_num_threads(1)

EIGHT = replace(SUPPORT, dtypes_out=DTYPES)
BASE = "b=2,hq=4,hkv=2,sq=22,skv=20,d=16,dtype=float16,mask=causal"


def problem_of(output: str, **changes: object) -> Problem:
    return Problem.parse(f"{BASE},out={output},oscale=104.5,seed=3").but(**changes)


def stored(out: Tensor, p: Problem) -> Tensor:
    """O8 as the definition has it; the harness only casts it."""
    largest = p.format_out.max
    return (out * p.output_scale).clamp(-largest, largest)


def asked() -> list[Oracle]:
    """Oracles of drawn forwards that are asked about an O in 8 bits."""
    return [
        oracle
        for oracle in oracles()
        if broken(oracle.needs, problem_of(DTYPES[0])) is None and oracle.name in JUDGED
    ]


JUDGED = (
    "bound",
    "counting",
    "dyadic",
    "gather",
    "empty_rows",
    "repeat",
    "poison",
    "causality",
    "slice",
    "key_permutation",
    "decode_step",
    "replicated_heads",
    "duplicated_keys",
    "key_shift",
    "integer_scores",
)


def test_a_scale_is_a_part_of_the_name() -> None:
    p = problem_of("float8_e4m3fn")
    assert "out=float8_e4m3fn,oscale=104.5" in p.name
    assert Problem.parse(p.name) == p
    assert "oscale" not in p.but(output_scale=1.0).name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype_out": "float16"}, "output_scale: 104.5 is for outputs in"),
        ({"output_scale": 0.0}, "output_scale: 0.0 is not between"),
        ({"output_scale": -1.0}, "output_scale: -1.0 is not between"),
        ({"output_scale": float("nan")}, "output_scale: nan is not between"),
        ({"output_scale": 0.1}, "output_scale: 0.1 is no number of fp32"),
    ],
)
def test_scales_that_make_no_sense_are_refused_by_name(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ProblemError, match=f"^{words}"):
        problem_of("float8_e5m2", **changes)


def test_an_oracle_that_needs_a_plain_output_is_not_asked() -> None:
    p = problem_of("float8_e4m3fn")
    reasons = {oracle.name: broken(oracle.needs, p) for oracle in oracles()}
    for name in ("linearity", "convexity", "split_merge", "power_of_two"):
        assert "exact_output" in (reasons[name] or ""), name
        assert "which output in 8 bits breaks" in (reasons[name] or ""), name
    assert {oracle.name for oracle in asked()} == set(JUDGED)
    plainer = without_broken(oracles()[0].needs and frozenset(), p, EIGHT)
    assert plainer == p
    needs = next(oracle.needs for oracle in oracles() if oracle.name == "convexity")
    assert without_broken(needs, p, EIGHT) == Problem.parse(f"{BASE},seed=3")


def test_a_backward_of_a_saved_output_in_8_bits_is_refused_by_name() -> None:
    support = replace(FLASH.support, dtypes_out=("float8_e5m2",))
    with pytest.raises(DeclarationError, match=r"no bound of gradients .* in float8_e5m2$"):
        replace(FLASH, support=support)


def judged(oracle: Oracle, output: str, spoil: Callable[..., Tensor], **changes: object) -> object:
    """The finding of an oracle on a kernel whose O in fp32 `spoil` turns into what is stored;
    changes: of the problem's fields, which can leave nothing to ask."""
    distribution = {
        "counting": "counting",
        "gather": "gather",
        "key_shift": "small_integers",
        "integer_scores": "small_integers",
    }
    p = problem_of(output)
    if oracle.name in distribution:
        p = p.but(distribution=distribution[oracle.name])
    if oracle.name == "dyadic":
        p = p.but(distribution="dyadic", softmax_scale=math.log(2))
    if oracle.name == "key_permutation":
        p = p.but(mask=Problem.parse("sq=1,skv=1,d=16,dtype=float16").mask)
    p = p.but(**changes)
    kernel = Kernel(spoil=lambda out, of, call: spoil(out, of), masked_zero=False)
    contract = replace(declared().contract, masked_values="any")
    found = oracle.rule(trial(kernel, p, declared(contract, dtypes_out=DTYPES)))
    assert changes or found.inapplicable is None, found.inapplicable
    return found.finding


@pytest.mark.parametrize("output", DTYPES)
def test_a_right_kernel_passes_every_oracle_that_is_asked(output: str) -> None:
    for oracle in asked():
        assert judged(oracle, output, stored) is None, oracle.name


def last_key_twice(s: Tensor) -> Tensor:
    """The exponential of a kernel that takes the last key of every row twice."""
    weights = torch.exp(s)
    weights[..., -1] *= 2
    return weights


RELATED: dict[str, Kernel] = {
    "key_permutation": Kernel(exp=last_key_twice, masked_zero=False),
    "key_shift": Kernel(
        maximum=lambda s: torch.zeros_like(s[..., :1]), exp=lambda s: torch.exp(s.clamp(max=20.0))
    ),
}


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("name", RELATED)
def test_relations_convict_in_8_bits(name: str, output: str) -> None:
    """Keys in another order, and one vector added to all keys; their bounds are those of O8."""
    oracle = next(oracle for oracle in asked() if oracle.name == name)
    p = problem_of(output).but(mask=Problem.parse("sq=1,skv=1,d=16,dtype=float16").mask)
    p = p.but(distribution="small_integers" if name == "key_shift" else "normal", seqlen_kv=8)
    wrong = replace(RELATED[name], spoil=lambda out, of, call: stored(out, of))
    right = Kernel(spoil=wrong.spoil)
    declaration = declared(dtypes_out=DTYPES)
    assert oracle.rule(trial(right, p, declaration)).finding is None
    assert oracle.rule(trial(wrong, p, declaration)).finding is not None


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("empty", ["seqlen_q", "seqlen_kv"])
def test_a_right_kernel_passes_without_rows_or_without_keys(output: str, empty: str) -> None:
    for oracle in asked():
        if oracle.group not in ("long", "lengths"):
            assert judged(oracle, output, stored, **{empty: 0}) is None, oracle.name


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("times", [0, 2])
def test_a_scale_forgotten_or_applied_twice_is_convicted(output: str, times: int) -> None:
    def spoil(out: Tensor, p: Problem) -> Tensor:
        return (out * p.output_scale**times).clamp(-p.format_out.max, p.format_out.max)

    bound = next(oracle for oracle in asked() if oracle.name == "bound")
    assert judged(bound, output, spoil) is not None


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 104.5, 448.0])
def test_gather_convicts_an_output_that_is_cut_instead_of_rounded(
    output: str, scale: float
) -> None:
    """The P of this kernel has the 8 bits of O: its bound is too wide for that."""

    def cut(out: Tensor, p: Problem) -> Tensor:
        whole = stored(out, p)
        exponent = torch.frexp(whole).exponent.clamp(min=p.format_out.emin + 1)
        last = exponent - p.format_out.precision
        return torch.ldexp(torch.ldexp(whole, -last).trunc(), last)

    p = problem_of(output, distribution="gather", output_scale=scale)
    gather = next(oracle for oracle in asked() if oracle.name == "gather")
    declaration = declared(dtypes_out=DTYPES)
    for spoil, right in ((stored, True), (cut, False)):
        kernel = Kernel(spoil=lambda out, of, call, spoil=spoil: spoil(out, of))
        finding = gather.rule(trial(kernel, p, declaration)).finding
        assert (finding is None) == right, finding
        if finding is not None:
            assert "should be row" in finding.message


@pytest.mark.parametrize(("scale", "saturated"), [(16.0, False), (2.0**12, True)])
def test_what_8_bits_lose_is_measured_apart_from_the_kernel(scale: float, saturated: bool) -> None:
    p = problem_of("float8_e4m3fn", output_scale=scale)
    bound = next(oracle for oracle in asked() if oracle.name == "bound")
    kernel = Kernel(spoil=lambda out, of, call: stored(out, of))
    measures = bound.rule(trial(kernel, p, declared(dtypes_out=DTYPES))).measures
    assert (measures["saturated_out"] > 0) == saturated
    assert 0.0 < measures["rounded_out"] < 2.0**-4
    assert abs(measures["rms_out"] / measures["rounded_out"] - 1) < 0.05
    wide = bound.rule(trial(Kernel(), p.but(dtype_out="float16", output_scale=1.0))).measures
    assert not {"rms_out", "rounded_out", "saturated_out"} & set(wide)


def test_infinity_is_never_right_in_8_bits() -> None:
    def spoil(out: Tensor, p: Problem) -> Tensor:
        whole = out * 2.0**12 * p.output_scale
        return torch.where(whole.abs() > p.format_out.max, torch.inf, whole)

    p = problem_of("float8_e5m2", output_scale=104.5 * 2.0**12)
    bound = next(oracle for oracle in asked() if oracle.name == "bound")
    right = Kernel(spoil=lambda out, of, call: stored(out, of))
    wrong = Kernel(spoil=lambda out, of, call: spoil(out, p.but(output_scale=104.5)))
    declaration = in_process.declared(dtypes_out=DTYPES)
    assert bound.rule(trial(right, p, declaration)).finding is None
    assert bound.rule(trial(wrong, p, declaration)).finding is not None


# O that is known exactly, on the lattice of its 8 bits.

SCALES = (1.0, 16.0, 104.5, 0.375, 448.0, 2.0**15, 2.0**-7)
KNOWN = {"counting": counting, "dyadic": dyadic}
SHAPE = "b=2,hq=4,hkv=2,sq=40,skv=90,d=64,seed=5,mask=causal"


def known(oracle: str, output: str, scale: float, dtype: str = "float16") -> Problem:
    p = Problem.parse(f"{SHAPE},dtype={dtype},dist={oracle},out={output}").but(output_scale=scale)
    return p.but(softmax_scale=math.log(2)) if oracle == "dyadic" else p


def ruled(oracle: str, p: Problem, arch: str, before: Callable[[Tensor], Tensor] = same) -> bool:
    """Whether the kernel is acquitted that scales O, does `before`, cuts it to the largest number
    and rounds it."""

    def finish(out: Tensor) -> Tensor:
        return before(out * p.output_scale).clamp(-p.format_out.max, p.format_out.max)

    tried = tried_by(faulty(finish=finish), p)
    tried.arch = arch
    return acquitted(KNOWN[oracle].judge(tried))


@pytest.mark.parametrize("oracle", KNOWN)
@pytest.mark.parametrize("output", DTYPES)
def test_a_known_answer_is_known_in_8_bits(oracle: str, output: str) -> None:
    for scale in SCALES:
        for arch, dtype in (("sm_90", "float16"), ("cpu", "bfloat16")):
            assert ruled(oracle, known(oracle, output, scale, dtype), arch), (scale, arch)


def places(number: int, x: Tensor, way: Callable[[Tensor], Tensor]) -> Tensor:
    """x with so many significant bits."""
    last = torch.frexp(x).exponent - number
    return torch.ldexp(way(torch.ldexp(x, -last)), last)


FAULTS: dict[str, Callable[[Problem], Callable[[Tensor], Tensor]]] = {
    "cut": lambda p: lambda x: places(p.format_out.precision, x, torch.trunc),
    "rounded up": lambda p: lambda x: places(p.format_out.precision, x, torch.ceil),
    "rounded twice": lambda p: lambda x: places(p.format_out.precision + 1, x, torch.round),
    "through half": lambda p: lambda x: x.half().float(),
    "forgotten": lambda p: lambda x: x / p.output_scale,
    "twice": lambda p: lambda x: x * p.output_scale,
}


@pytest.mark.parametrize("oracle", KNOWN)
@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_last_step_is_convicted_by_a_known_answer(
    fault: str, oracle: str, output: str
) -> None:
    """On a machine whose exponential is exact at integers."""
    p = known(oracle, output, 104.5)
    assert ruled(oracle, p, "sm_90")
    # too few counts lie so near the middle between two numbers that 11 bits move them
    if (fault, oracle) != ("through half", "counting"):
        assert not ruled(oracle, p, "sm_90", FAULTS[fault](p))


@pytest.mark.parametrize("output", DTYPES)
def test_a_key_too_many_is_counted_in_8_bits(output: str) -> None:
    """The row of the diagonal sees the key behind it."""
    p = known("counting", output, 104.5).but(seqlen_q=40, seqlen_kv=40)

    def seen(of: Problem) -> Tensor:
        return of.mask.dense(of.batch, of.heads_q, of.seqlen_q, of.seqlen_kv).roll(1, -2)

    for kernel, right in ((Kernel(), True), (Kernel(seen=seen), False)):
        spoiled = replace(kernel, spoil=lambda out, of, call: stored(out, of))
        found = counting.judge(trial(spoiled, p, declared(dtypes_out=DTYPES)))
        assert (found.finding is None) == right
        if found.finding is not None:
            assert "visible keys" in found.finding.message


@pytest.mark.parametrize("dtype_out", [*DTYPES, "float16"])
def test_what_can_be_stored_of_a_number_encloses_what_is(dtype_out: str) -> None:
    """Between the ends, and no wider than the bound says; the ends are numbers of the format."""
    for scale in SCALES if dtype_out in DTYPES else (1.0,):
        output = ScaledOutput(dtype_out, scale) if dtype_out in DTYPES else None
        form = dtype_named(dtype_out)
        out = torch.randn(500, dtype=torch.float64, generator=torch.manual_seed(3))
        before = 2.0**-12 * out.abs()
        low, high = stored_ends(out, before, form, output)
        for side in torch.linspace(-1, 1, 9, dtype=torch.float64):
            off = (out + side * before).float() * scale
            got = off.clamp(-form.max, form.max).to(form.torch).double()
            assert bool(((low <= got) & (got <= high)).all())
        want = known_stored(out, output)
        most = out_bound(out.abs(), before, form, output)
        assert bool(((high - want <= most) & (want - low <= most)).all())
        for end in (low, high):
            assert torch.equal(end, end.to(form.torch).double())


@pytest.mark.parametrize("output", DTYPES)
def test_problems_with_a_scale_of_their_own_fill_a_bin(output: str) -> None:
    filled = coverage_bins(problem_of(output), Config())
    assert "output_scale" in filled
    assert "output_scale" not in coverage_bins(problem_of(output, output_scale=1.0), Config())
    assert "output_scale" in bins_reachable(EIGHT)
    assert "output_scale" not in bins_reachable(SUPPORT)
