"""The CuTe backward without a GPU: its declarations, its builds, and its own sources run on the CPU
as test_cute_kernel.py runs the forward's: each barrier and wait is dropped, and faults are
planted."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.cuda import family
from kernels.cute import flash_backward as kernel
from kernels.cute.flash_backward_walks import step_of
from tests.harness.backward_inputs import Inputs, exact
from tests.harness.cute_backward_host import (
    FAULTS,
    GRADIENTS,
    ORDERS,
    SOURCE,
    Chosen,
    Program,
    compiled,
)
from tests.harness.cute_backward_trial import HostTrial
from tests.harness.cute_host import has_headers, has_host, library_of_all
from tests.harness.cute_verdicts import convicting_apart
from tests.properties.tier import thorough
from verify.bundle import ROOT
from verify.judging.lattice import explained
from verify.judging.poisoning import gradient_poisoning
from verify.oracles import poison
from verify.problem.inputs import dout as upstream
from verify.problem.inputs import tensors
from verify.tolerance.backward import gradient_truth, resolve
from verify.variant import (
    AttentionArgs,
    GradientOrder,
    Gradients,
    Saved,
    Unsupported,
)

SMALL, LARGE = kernel.CONFIGS
NARROW = {
    "separate": Chosen(kernel.VARIANT, LARGE, "float16", 64),
    "atomic": Chosen(kernel.ATOMIC, SMALL, "bfloat16", 96),
}
# dV and dK apart, with two stages and with one; of bfloat16, since the host is slow in float16.
WIDE = {
    "separate_160": Chosen(kernel.VARIANT, LARGE, "bfloat16", 160),
    "atomic_256": Chosen(kernel.ATOMIC, SMALL, "bfloat16", 256),
}
FURTHER = {
    "separate_192": Chosen(kernel.VARIANT, SMALL, "float16", 192),
    "separate_224": Chosen(kernel.VARIANT, SMALL, "bfloat16", 224),
    "separate_256": Chosen(kernel.VARIANT, LARGE, "float16", 256),
    "atomic_160": Chosen(kernel.ATOMIC, SMALL, "float16", 160),
    "atomic_192": Chosen(kernel.ATOMIC, SMALL, "bfloat16", 192),
    "atomic_224": Chosen(kernel.ATOMIC, SMALL, "float16", 224),
}
CHOICES = NARROW | WIDE
PROGRAMS = thorough([*CHOICES, *FURTHER], keep=len(CHOICES))
NARROW_FIRST = thorough([*CHOICES, *FURTHER], keep=len(NARROW))

# The sources on the CPU.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(
        tmp_path_factory, "cute-backward", lambda folder: compiled(folder, CHOICES)
    )


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(
        tmp_path_factory, "cute-backward-more", lambda folder: compiled(folder, FURTHER)
    )


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    name = request.param
    library = request.getfixturevalue("library" if name in CHOICES else "further")
    library.weaken(0, False)
    library.plant(-1)
    yield Program(library, name, (CHOICES | FURTHER)[name])
    library.weaken(0, False)
    library.plant(-1)


SHAPES = (
    "sq=1,skv=1",
    "sq=64,skv=64",
    "sq=130,skv=70,mask=causal",
    "sq=70,skv=131,mask=causal",
    "sq=129,skv=33,mask=causal.tl",
    "hq=4,hkv=2,sq=67,skv=40,mask=causal",
    "sq=5,skv=0",
    "sq=0,skv=5",
    "sq=70,skv=3,mask=causal",
    "sq=65,skv=97,scale=-0.3",
    "sq=9,skv=40,scale=0.0",
    "sq=100,skv=140,mask=window.20.9",
    "sq=70,skv=60,mask=window.20.inf.tl",
    "b=2,sq=80,skv=130,mask=lengths.70_0.100_33",
    "sq=90,skv=70,mask=causal+documents.50_40",
    "b=2,hq=2,hkv=1,sq=66,skv=65,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8,ldo=bshd.p8",
)
# For wide head dims: grouped heads, no keys or rows, a band, a table, layouts.
BRIEF = (SHAPES[5], SHAPES[6], SHAPES[7], SHAPES[11], SHAPES[13], SHAPES[15])
REST = [(name, shape) for name in WIDE for shape in SHAPES if shape not in BRIEF]
CASES = [
    *((name, shape) for name in NARROW for shape in SHAPES),
    *((name, shape) for name in WIDE for shape in BRIEF),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in (*REST, *((name, shape) for name in FURTHER for shape in BRIEF))
    ),
]
# A fault, and the gradients that it shows in.
FAULTY = {
    "no delta": ("dq", "dk"),
    "a key too many": GRADIENTS,
    "no mask": GRADIENTS,
    "S of another P": GRADIENTS,
    "first head of a group alone": ("dk", "dv"),
    "no scale in dQ or dK": ("dq", "dk"),
    "stages mixed up": ("dv",),
    "no scale in the atomic dQ": ("dq",),
    "P of the bits of float16": ("dv",),
    "dS of the bits of float16": ("dq", "dk"),
    "steps begin behind the diagonal": ("dk", "dv"),
    "no end of rows": GRADIENTS,
    "the first block last": (),
}
TABLE = ROOT / "docs" / "cute.md"
REORDERED = [*FAULTS].index("the first block last")
OF_ONE_VARIANT = {
    (kernel.ATOMIC, "no scale in dQ or dK"): ("dk",),
    (kernel.VARIANT, "no scale in the atomic dQ"): (),
}


@has_headers
@has_host
@pytest.mark.for_ci
class TestOnTheHost:
    @pytest.mark.parametrize(("program", "shape"), CASES, indirect=["program"])
    def test_it_stays_inside_its_bounds(self, program: Program, shape: str) -> None:
        orders = ORDERS if program.name in NARROW else (ORDERS[0], ORDERS[-1])
        assert max(program.verdict(program.asked(shape), orders)) <= 1

    @pytest.mark.parametrize(
        "shape", [SHAPES[2], SHAPES[11], "b=2,sq=70,skv=90,mask=lengths.40_0.30_50"]
    )
    def test_huge_numbers_at_hidden_places_change_no_gradient(
        self, program: Program, shape: str
    ) -> None:
        trial = HostTrial.of(program, shape)
        assert gradient_poisoning(trial).count > 0
        assert poison.judge_backward(trial).finding is None

    def test_shared_memory_has_no_bank_conflicts(self, program: Program) -> None:
        problem = program.problem("sq=130,skv=130")
        assert program.run(problem, program.saved(problem)).conflicts == (0, 0)

    def test_rows_without_a_key_and_keys_without_a_row_have_gradients_of_zero(
        self, program: Program
    ) -> None:
        problem = program.problem("b=2,sq=70,skv=90,mask=lengths.40_0.30_50")
        ran = program.run(problem, program.saved(problem)).gradients
        assert (ran["dq"][0, :, 40:] == 0).all()
        assert (ran["dk"][0, :, 30:] == 0).all()
        assert (ran["dv"][0, :, 30:] == 0).all()
        assert all((gradient[1] == 0).all() for gradient in ran.values())
        assert all((gradient[0] != 0).any() for gradient in ran.values())

    @pytest.mark.parametrize("program", NARROW_FIRST, indirect=True)
    def test_the_order_of_warps_and_copies_changes_no_bit(self, program: Program) -> None:
        problem = program.problem("hq=2,hkv=1,sq=70,skv=130,mask=causal")
        saved = program.saved(problem)
        runs = [program.run(problem, saved, **order).gradients for order in ORDERS]
        # Adds of one block never race here, and blocks run in one order.
        for run in runs[1:]:
            assert all(torch.equal(run[name], runs[0][name]) for name in run)

    def test_the_entry_point_launches_these_kernels(
        self, program: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = program.problem("b=2,hq=4,hkv=2,sq=70,skv=90,mask=causal")
        given = tensors(problem)
        args = AttentionArgs(
            given.q, given.k, given.v, problem.mask, problem.scale, None, program.chosen.config
        )
        saved, variant = program.saved(problem), program.chosen.variant
        asked: list[str] = []

        def launch(entry: str, grid: object, block: object, shared: int, given: object) -> None:
            asked.append(entry)
            assert not program.launch(entry, (grid, block, shared), given)

        monkeypatch.setattr(family, "shared_room", lambda device: 99 * 1024)
        monkeypatch.setattr(kernel, "device_arch", lambda device: "sm_90a")
        monkeypatch.setattr(kernel, "loaded", lambda source, arch: source.entry)
        monkeypatch.setattr(kernel, "launch_kernel", launch)
        assert variant.backward is not None
        assert variant.backward_workspace is not None
        gradients = Gradients(*(torch.full_like(x, torch.nan) for x in (args.q, args.k, args.v)))
        workspace = {
            name: torch.full(shape, torch.nan)
            for name, (shape, _) in variant.backward_workspace(args).items()
        }
        variant.backward(args, saved, upstream(problem), gradients, workspace)
        assert asked == [made.source.entry for made in program.chosen.launches]
        expected = program.run(problem, saved).gradients
        assert all(torch.equal(x, expected[name]) for name, x in gradients.by_name().items())
        monkeypatch.setattr(family, "shared_room", lambda device: 48 * 1024)
        with pytest.raises(Unsupported, match="bytes of shared memory") as error:
            variant.backward(args, saved, upstream(problem), gradients, workspace)
        assert error.value.argument == "config"

    def test_planted_faults_are_caught_in_every_walk(self, program: Program) -> None:
        asked = program.asked("hq=2,hkv=1,sq=70,skv=40,mask=causal")
        assert set(FAULTY) == set(FAULTS)
        for n, fault in enumerate(FAULTS):
            shown = OF_ONE_VARIANT.get((program.chosen.variant, fault), FAULTY[fault])
            if "float16" in fault and program.chosen.dtype == "float16":
                shown = ()  # the bits are right
            program.library.plant(n)
            ratios = program.ratios(asked, ORDERS[0])
            assert all(ratios[gradient] > 1 for gradient in shown), fault
        program.library.plant(-1)
        assert max(program.ratios(asked, ORDERS[0]).values()) <= 1

    @pytest.mark.thorough
    @pytest.mark.parametrize("program", ["atomic"], indirect=True)
    @pytest.mark.parametrize("row", [fault for fault, shown in FAULTY.items() if shown])
    def test_as_often_as_the_table_says(self, program: Program, row: str) -> None:
        program.library.plant([*FAULTS].index(row))
        counts = Counter(
            oracle
            for shape in SHAPES
            for oracle in convicting_apart(partial(HostTrial.of, program, shape))
        )
        told = ", ".join(f"{oracle} {count}" for oracle, count in sorted(counts.items()))
        assert f"| {row} | {told} |" in TABLE.read_text(encoding="utf-8")

    @pytest.mark.parametrize("program", NARROW_FIRST, indirect=True)
    def test_blocks_come_in_the_declared_order(self, program: Program) -> None:
        """dV adds up rows that cancel between the first two blocks, and then small ones, which are
        lost beside a block that comes too early.  Any order allows that."""
        chosen, problem = program.chosen, program.problem("sq=1024,skv=64")
        step = step_of(chosen.config, chosen.head_dim)
        shapes = problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_out
        given = Inputs(*(torch.zeros(shape, dtype=problem.format.torch) for shape in shapes))
        given.dout.fill_(0.9 * 2.0**-13)
        given.dout[..., step - 16 : step, :] = 2304.0
        given.dout[..., step : step + 16, :] = -2304.0
        made = exact(problem, given)
        saved = Saved(made.out.to(problem.format.torch), made.lse.float())
        read = given.q, given.k, given.v, given.dout, saved.out, saved.lse
        assert chosen.variant.gradients is not None
        undeclared = replace(chosen.variant.gradients, order=GradientOrder())
        parts = []
        for fault, numerics in (
            (-1, chosen.variant.gradients),
            (REORDERED, chosen.variant.gradients),
            (REORDERED, undeclared),
        ):
            program.library.plant(fault)
            found = program.run(problem, saved, given=vars(given)).gradients["dv"]
            a = resolve(numerics, chosen.config, problem, "sm_90")
            truth = gradient_truth(problem, *(x.double() for x in read), a)
            assert truth.intervals is not None
            span = truth.intervals["dv"]
            parts.append(float(explained(found, span.middle, span.reach, problem.format).max()))
        assert parts[0] <= 1 < parts[1], parts
        assert parts[2] <= 1, parts

    def test_every_barrier_and_every_wait_is_needed(self, program: Program) -> None:
        atomic = program.chosen.variant is kernel.ATOMIC
        single = 1 in program.chosen.stages
        in_some_builds = {
            "dS has come": atomic,
            "done with dO": atomic and single,
            "done with the step": single,
        }
        lines = [
            n
            for n, line in enumerate(SOURCE.read_text().splitlines(), 1)
            if "__syncthreads();" in line
            and all(built for words, built in in_some_builds.items() if words in line)
        ]
        # Without steps, copies into the owned tiles can be on their way at the end.
        length = 130 if program.name in NARROW else 70
        shapes = (f"sq={q},skv={kv}" for q, kv in ((length, length), (0, length), (length, 0)))
        problems = [program.asked(shape) for shape in shapes]
        for line, hasty in [*((line, False) for line in lines), (0, True)]:
            program.library.weaken(line, hasty)
            noticed = any(ratio > 1 for asked in problems for ratio in program.verdict(asked))
            assert noticed, (
                f"without line {line}" if line else "with waits that leave one group in flight"
            )
