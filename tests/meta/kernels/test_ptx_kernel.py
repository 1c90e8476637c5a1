"""The raw-PTX kernels without a GPU: their own sources, run by a host compiler's code
(tests/harness/ptx_host.py), compute attention."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from tests.harness.host_library import runs
from tests.harness.ptx_cases import CHOICES, problems
from tests.harness.ptx_host import (
    MODULES,
    SCHEDULES,
    Choice,
    Host,
    convict,
    inputs_of,
    run,
)
from tests.harness.ptx_together import Edited, Together
from tests.properties import tier
from verify.cuda.compile import compilable, compile_source
from verify.cuda.sass import listing
from verify.cuda.toolkit import executables
from verify.problem import Problem

torch.set_num_threads(1)
Launched = Callable[[Host], Host]


def tiling_and_arithmetic(parameters: Mapping[str, object]) -> Iterator[object]:
    """Of a choice: its tiling, with its dtype, its kind of mask and its storage."""
    choice = parameters["choice"]
    assert isinstance(choice, Choice)
    yield from ((choice.name, choice.dtype), choice.kind, choice.storage)


# What the further tests launch.
ADDED = Choice("split_q_fp8", 0, "float8_e4m3fn", 64)
NO_NUMBERS = (("float8_e4m3fn", 64, 0x7F), ("float8_e5m2", 128, 0xFC))
PLAIN = {
    name: Choice(name, 0, module.VARIANT.support.dtypes[0], 64) for name, module in MODULES.items()
}


def as_on_sm_89(text: str) -> str:
    return text.replace("__CUDA_ARCH__ == 890", "1")


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """The builds of the choices that this session tries, and those of the further tests."""
    tried = [getattr(item, "callspec", None) for item in request.session.items]
    choices = [spec.params["choice"] for spec in tried if spec and "choice" in spec.params]
    builds = {
        choice: Edited(choice)
        for choice in (
            *(choice for choice in CHOICES if choice in choices),
            *PLAIN.values(),
            *(Choice("split_q_fp8", 0, dtype, head_dim) for dtype, head_dim, _ in NO_NUMBERS),
        )
    }
    return Together({**builds, as_on_sm_89: Edited(ADDED, as_on_sm_89)}, tmp_path_factory)


@pytest.mark.first_look(5)
@runs
@tier.first_tier(tiling_and_arithmetic)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_source_computes_attention(
    choice: Choice, together: Together, launched: Launched
) -> None:
    variant, config = choice.variant, choice.build[0]
    kernel = launched(together.host(choice))
    given = problems(choice)
    for problem, kernel.schedule in zip(given, itertools.cycle(SCHEDULES), strict=False):
        assert convict(variant, problem, config, *run(variant, problem, config)) is None, problem


@runs
def test_sums_that_begin_at_zero_are_added(together: Together, launched: Launched) -> None:
    """The source as sm_89 compiles it, which keeps few bits of a sum of 8-bit products."""
    choice = ADDED
    kernel = launched(together.host(as_on_sm_89))
    problem = next(problems(choice))
    kernel.schedule = SCHEDULES[0]
    result = run(choice.variant, problem, choice.build[0])
    assert convict(choice.variant, problem, choice.build[0], *result) is None


@runs
@pytest.mark.parametrize(
    ("dtype", "head_dim", "bits"),
    NO_NUMBERS,
    ids=["NaN in e4m3", "infinity in e5m2"],
)
def test_zero_times_what_is_no_number_is_nan(
    dtype: str, head_dim: int, bits: int, together: Together, launched: Launched
) -> None:
    """A scale of 0 does not hide NaN or infinity in 8-bit Q, nor do other rows see it."""
    choice = Choice("split_q_fp8", 0, dtype, head_dim)
    launched(together.host(choice))
    problem = Problem(
        seqlen_q=20, seqlen_kv=40, head_dim=head_dim, dtype=dtype, softmax_scale=0.0, seed=99
    )
    inputs_of(problem)[0].tensor.view(torch.uint8)[0, 0, 3, 5] = bits
    out, lse = run(choice.variant, problem, choice.build[0])
    spoiled = torch.arange(20) == 3
    assert torch.equal(out[0, 0].isnan().all(-1), spoiled)
    assert torch.equal(out[0, 0].isnan().any(-1), spoiled)
    assert torch.equal(lse[0, 0].isnan(), spoiled)


@pytest.mark.for_ci
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.skipif(not executables("nvdisasm"), reason="no nvdisasm")
def test_products_of_8_bits_begin_at_zero_on_sm_89_alone() -> None:
    """As declared: promotion after 32 products, where a unit keeps fewer bits than fp32."""
    launch = MODULES["split_q_fp8"].TILING.launch(
        *Choice("split_q_fp8", 0, "float8_e4m3fn", 64).build, narrow=False
    )
    added: dict[str, set[bool]] = {}
    for arch in ("sm_89", "sm_120a"):
        code = listing(compile_source(launch.source, arch).cubin)
        sums = re.findall(r"QMMA\S* \w+, \S+, \S+, (\w+)", code)
        assert sums
        added[arch] = {register != "RZ" for register in sums}
    assert added["sm_89"] == {False}
    assert True in added["sm_120a"]


@runs
@pytest.mark.parametrize("name", MODULES)
def test_no_schedule_changes_a_bit(name: str, together: Together, launched: Launched) -> None:
    choice = PLAIN[name]
    variant, config = choice.variant, choice.build[0]
    kernel = launched(together.host(choice))
    problem = Problem(seqlen_q=64, seqlen_kv=200, head_dim=64, dtype=choice.format)
    results = []
    for kernel.schedule in SCHEDULES:
        results.append(run(variant, problem, config))
    assert convict(variant, problem, config, *results[0]) is None
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))
