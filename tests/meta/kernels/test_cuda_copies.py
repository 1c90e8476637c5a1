"""The known-bad copies of the CUDA variants (tests/planted/copies.py) without a GPU: each differs
from what is shipped by one slip, and the emulation shows the slip.  Delays at barriers change no
bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
import torch

from tests.harness.host_library import runs
from tests.harness.ptx_host import MODULES, SCHEDULES, Choice, Schedule, convict, run
from tests.planted import copies
from tests.properties import tier
from verify.problem import Problem
from verify.sanitizers.delays import BEFORE, DELAYED

torch.set_num_threads(1)


def problem_of(choice: Choice) -> Problem:
    """Ragged tails in both lengths, and several blocks of keys."""
    return Problem(
        heads_q=2, heads_kv=2, seqlen_q=63, seqlen_kv=200, head_dim=64, dtype=choice.format, seed=1
    )


def verdict_on(choice: Choice, kernel: Any) -> str | None:
    """What is wrong with a build in some order of warps and copies, or None."""
    variant, config, problem = choice.variant, choice.build[0], problem_of(choice)
    for kernel.schedule in SCHEDULES:
        try:
            found = convict(variant, problem, config, *run(variant, problem, config))
        except AssertionError as error:
            found = str(error) or "written outside"
        if found is not None:
            return found
    return None


def choice_of(name: str) -> Choice:
    """The build of a tiling's copies."""
    module = MODULES[name]
    config = copies.config_of(module.VARIANT, module.TILING)
    dtype = module.VARIANT.support.dtypes[0]
    return Choice(name, module.VARIANT.configs.index(config), dtype, 64)


@runs
@tier.first_tier("name", "slip")
@pytest.mark.parametrize("slip", copies.PTX_SLIPS)
@pytest.mark.parametrize("name", MODULES)
def test_each_tilings_copy_is_caught(name: str, slip: str, host: Any) -> None:
    choice = choice_of(name)
    edit = copies.PTX_SLIPS[slip]
    kernel = host(choice, lambda text: edit.apply({"": text})[""])
    assert verdict_on(choice, kernel) is not None


def bits_by_seed(choice: Choice, kernel: Any, schedules: list[Schedule]) -> Iterator[bytes]:
    """O and LSE as bytes, of a run for each seed of the delays."""
    problem = problem_of(choice)
    seed = ctypes.c_uint.in_dll(kernel.library, "delay_seed")
    for seed.value, kernel.schedule in zip(range(5), itertools.cycle(schedules), strict=False):
        results = run(choice.variant, problem, choice.build[0])
        yield b"".join(result.view(torch.uint8).numpy().tobytes() for result in results)


@runs
@pytest.mark.parametrize("name", MODULES)
def test_delays_change_no_bit_of_what_is_shipped(name: str, host: Any) -> None:
    choice = choice_of(name)
    kernel = host(choice, lambda text: BEFORE + DELAYED.apply({"": text})[""])
    assert len(set(bits_by_seed(choice, kernel, SCHEDULES))) == 1


@runs
def test_delays_show_a_missing_barrier(host: Any) -> None:
    choice = choice_of("split_q")
    edits = (copies.PTX_SLIPS["missing-barrier"], DELAYED)
    kernel = host(
        choice, lambda text: BEFORE + reduce(lambda t, e: e.apply({"": t})[""], edits, text)
    )
    assert len(set(bits_by_seed(choice, kernel, SCHEDULES[:1]))) > 1
