"""The Triton forward of 8-bit inputs with an 8-bit output, in Triton's interpreter: as it is it
passes, and every fault of its last step is convicted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.fault import TRITON_EIGHT_BITS, TRITON_FP8, Fault
from tests.faults.search import Catch, convicts
from tests.faults.stand import Stand
from verify.problem import Problem

ASKED = "hq=4,hkv=2,sq=33,skv=40,d=32,dtype=float8_e4m3fn,mask=causal,descale=head,seed=7"
WHOLE = "o_tile * output_scale"
STEP = f"saturated({WHOLE}, LARGEST_OUT)"


@dataclass(frozen=True)
class Planted:
    """An edit of the source, or of a module that it imports (helper), and the cases that convict
    it: their oracle, scales and formats."""

    old: str
    new: str
    scales: tuple[float, ...]
    oracle: str = "bound"
    formats: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2")
    helper: str = ""

    @property
    def catches(self) -> list[Catch]:
        group = "accuracy" if self.oracle == "bound" else self.oracle
        distribution = "normal" if self.oracle == "bound" else self.oracle
        log_2 = math.log(2) if self.oracle == "dyadic" else None
        problems = [
            Problem.parse(f"{ASKED},out={output}").but(
                output_scale=scale, distribution=distribution, softmax_scale=log_2
            )
            for output in self.formats
            for scale in self.scales
        ]
        return [Catch(group, self.oracle, "m64n32w4s2", problem.name) for problem in problems]


def cut(bits: int) -> str:
    """The last step with the lowest bits of fp32 cut off."""
    kept = f"(({WHOLE}).to(tl.int32, bitcast=True) & {-(1 << bits)}).to(tl.float32, bitcast=True)"
    return f"saturated({kept}, LARGEST_OUT)"


FAULTS = {
    "forgotten": Planted(STEP, "saturated(o_tile, LARGEST_OUT)", (16.0, 104.5)),
    "twice": Planted(STEP, STEP.replace("* output", "* output_scale * output"), (16.0, 0.375)),
    "inverse": Planted(STEP, STEP.replace("*", "/"), (16.0, 0.375)),
    "nan-beyond": Planted(
        STEP, f"tl.where(tl.abs({WHOLE}) > LARGEST_OUT, float('nan'), {WHOLE})", (2.0**15,)
    ),
    "another-maximum": Planted(
        "torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0",
        "torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 448.0",
        (2.0**15,),
        helper=TRITON_EIGHT_BITS,
    ),
    "through-half": Planted(
        STEP, STEP.replace(WHOLE, f"({WHOLE}).to(tl.float16).to(tl.float32)"), (104.5,), "dyadic"
    ),
    "cut-dyadic": Planted(STEP, cut(21), (104.5,), "dyadic"),
    "cut-counting": Planted(STEP, cut(21), (104.5,), "counting"),
    "cut-e4m3": Planted(STEP, cut(20), (104.5, 448.0), "gather", ("float8_e4m3fn",)),
    "cut-e5m2": Planted(STEP, cut(21), (104.5, 448.0), "gather", ("float8_e5m2",)),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


@pytest.mark.first_look(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_last_step_is_convicted_and_the_kernel_is_not(
    name: str, stand: Stand
) -> None:
    planted = FAULTS[name]
    fault = Fault(
        name=f"output-{name}",
        about="the last step of an 8-bit output",
        source="none known",
        file=TRITON_FP8,
        helper=planted.helper,
        edits=((planted.old, planted.new),),
        common=ASKED,
    )
    for catch in planted.catches:
        assert not convicts(stand, stand.shipped(fault), catch), catch.id
        assert convicts(stand, stand.planted(fault), catch), catch.id
