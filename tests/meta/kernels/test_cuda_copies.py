"""The known-bad copies of the CUDA variants (tests/planted/copies.py) without a GPU: each differs
from what is shipped by one slip, and the emulation shows the slip.  Delays at barriers change no
bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
import torch

from tests.harness.host_library import runs
from tests.harness.ptx_host import MODULES, SCHEDULES, Choice, Host, Schedule, convict, run
from tests.harness.ptx_together import Edited, Together
from tests.planted import copies
from tests.properties import tier
from verify.cuda.edits import Edit
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


def edited(text: str, *edits: Edit) -> str:
    """The text with these edits."""
    return reduce(lambda made, edit: edit.apply({"": made})[""], edits, text)


def delayed(text: str, *edits: Edit) -> str:
    """The same, with delays."""
    return BEFORE + edited(text, *edits, DELAYED)


SHOWN = copies.PTX_SLIPS["missing-barrier"]  # by delays


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """The copies that this session tries, and what is delayed."""
    tried = [getattr(item, "callspec", None) for item in request.session.items]
    pairs = {(spec.params.get("name"), spec.params.get("slip")) for spec in tried if spec}
    builds = {
        (name, slip): Edited(choice_of(name), lambda text, edit=edit: edited(text, edit))
        for name, (slip, edit) in itertools.product(MODULES, copies.PTX_SLIPS.items())
        if (name, slip) in pairs
    }
    builds |= {(name, DELAYED): Edited(choice_of(name), delayed) for name in MODULES}
    builds["split_q", SHOWN] = Edited(choice_of("split_q"), lambda text: delayed(text, SHOWN))
    return Together(builds, tmp_path_factory)


@pytest.mark.first_look(3)
@runs
@tier.first_tier("name", "slip")
@pytest.mark.parametrize("slip", copies.PTX_SLIPS)
@pytest.mark.parametrize("name", MODULES)
def test_each_tilings_copy_is_caught(
    name: str, slip: str, together: Together, launched: Callable[[Host], Host]
) -> None:
    assert verdict_on(choice_of(name), launched(together.host((name, slip)))) is not None


def bits_by_seed(choice: Choice, kernel: Any, schedules: list[Schedule]) -> Iterator[bytes]:
    """O and LSE as bytes, of a run for each seed of the delays."""
    problem = problem_of(choice)
    seed = ctypes.c_uint.in_dll(kernel.library, "delay_seed")
    for seed.value, kernel.schedule in zip(range(5), itertools.cycle(schedules), strict=False):
        results = run(choice.variant, problem, choice.build[0])
        yield b"".join(result.view(torch.uint8).numpy().tobytes() for result in results)


@pytest.mark.first_look(2)
@runs
@pytest.mark.parametrize("name", MODULES)
def test_delays_change_no_bit_of_what_is_shipped(
    name: str, together: Together, launched: Callable[[Host], Host]
) -> None:
    kernel = launched(together.host((name, DELAYED)))
    assert len(set(bits_by_seed(choice_of(name), kernel, SCHEDULES))) == 1


@runs
def test_delays_show_a_missing_barrier(
    together: Together, launched: Callable[[Host], Host]
) -> None:
    kernel = launched(together.host(("split_q", SHOWN)))
    assert len(set(bits_by_seed(choice_of("split_q"), kernel, SCHEDULES[:1]))) > 1
