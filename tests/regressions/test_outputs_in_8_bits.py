"""Outputs in 8 bits: problems name their scale, oracles that know no such O are not asked, and what
has no bound is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.torch.flash_backward import VARIANT as FLASH
from references.output_scale import DTYPES
from tests.harness import in_process
from tests.harness.in_process import SUPPORT, Kernel, declared, trial
from verify.oracles import Oracle, oracles
from verify.problem import Problem
from verify.problem.premises import broken, without_broken
from verify.problem.storage import ProblemError
from verify.variant import DeclarationError

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
    for name in ("counting", "linearity", "dyadic", "convexity", "split_merge", "power_of_two"):
        assert "exact_output" in (reasons[name] or ""), name
        assert "which output in 8 bits breaks" in (reasons[name] or ""), name
    assert {oracle.name for oracle in asked()} == set(JUDGED)
    plainer = without_broken(oracles()[0].needs and frozenset(), p, EIGHT)
    assert plainer == p
    needs = next(oracle.needs for oracle in oracles() if oracle.name == "counting")
    assert without_broken(needs, p, EIGHT) == Problem.parse(f"{BASE},seed=3")


def test_a_backward_of_a_saved_output_in_8_bits_is_refused_by_name() -> None:
    support = replace(FLASH.support, dtypes_out=("float8_e5m2",))
    with pytest.raises(DeclarationError, match=r"no bound of gradients .* in float8_e5m2$"):
        replace(FLASH, support=support)


def judged(oracle: Oracle, output: str, spoil: Callable[..., Tensor], **changes: object) -> object:
    """The finding of an oracle on a kernel whose O in fp32 `spoil` turns into what is stored;
    changes: of the problem's fields, which can leave nothing to ask."""
    distribution = {
        "gather": "gather",
        "key_shift": "small_integers",
        "integer_scores": "small_integers",
    }
    p = problem_of(output)
    if oracle.name in distribution:
        p = p.but(distribution=distribution[oracle.name])
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


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("empty", ["seqlen_q", "seqlen_kv"])
def test_a_right_kernel_passes_without_rows_or_without_keys(output: str, empty: str) -> None:
    for oracle in asked():
        if oracle.group != "long":
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
