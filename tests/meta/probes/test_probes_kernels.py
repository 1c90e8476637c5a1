"""The probes' kernels: compiled for every architecture, and run as host code, with fragments as in
PTX's manual and with planted matrix units and functions instead of the device's."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from tests.harness.host_library import runs
from tests.harness.probe_host import HostProgram
from tests.properties import tier
from verify.arithmetic.dot import fused_dot
from verify.probes import agreement, functions, matrix
from verify.probes.functions import FUNCTIONS, Probed, Surveyor
from verify.probes.instructions import INSTRUCTIONS, Bench
from verify.probes.report import FunctionProbe
from verify.probes.toolchain import HERE, Launch, Program, compilable, compile_for
from verify.variant import compiled_archs

pytestmark = pytest.mark.for_ci

torch.set_num_threads(1)

compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
BY_NAME = {one.name: one for one in INSTRUCTIONS}


# One architecture of each number of instructions; the others, which have those of one, are for CI.
TELLING = ("sm_80", "sm_90a", "sm_120a")
OTHERS = tuple(arch for arch in compiled_archs() if arch not in TELLING)


@compiles
@pytest.mark.parametrize("arch", tier.for_ci([*TELLING, *OTHERS], keep=len(TELLING)))
def test_every_instruction_compiles_where_it_exists(arch: str) -> None:
    here = [one for one in INSTRUCTIONS if one.unsupported_on(arch) is None]
    assert len(here) == {"sm_80": 9, "sm_86": 9, "sm_90a": 25}.get(arch, 17)
    for one in here:
        assert compile_for(one.program, arch).spill_stores == 0, one.name


def test_every_instruction_that_only_probes_use_is_probed() -> None:
    header = (HERE / "ptx_probes.cuh").read_text(encoding="utf-8")
    suffixes = {"PTX_MMA_K16": "_f32", "PTX_MMA_K32": "_f32", "PTX_WGMMA": "_f32"}
    suffixes |= {f"{name}_HALF": "_f16" for name in suffixes}
    made = {
        name + suffixes.get(macro, "")
        for macro, name in re.findall(r"^(PTX_\w+)\((\w+),", header, re.MULTILINE)
    }
    single = set(re.findall(r"__forceinline__ [\w ]+ (\w+)\((?!NAME)", header)) - {"NAME"}
    helpers = {"wgmma_fence", "wgmma_finish", "wgmma_descriptor", "fence_proxy_async"}
    probed = {one.function for one in INSTRUCTIONS} | {
        one.call.removeprefix("ptx::") for one in FUNCTIONS
    }
    assert made | single - helpers <= probed
    assert helpers <= single
    assert len(made) == 29


HOSTED = [
    "mma.sync m16n8k8 f16 into f32",
    "mma.sync m16n8k8 f16 into f16",
    "mma.sync m16n8k4 tf32 into f32",
    "mma.sync m16n8k16 e4m3 into f32",
    "mma.sync m16n8k8 tf32 into f32",
    "mma.sync m16n8k32 e5m2 into f16",
    "wgmma m64n8k16 f16 into f32",
    "wgmma m64n8k32 e4m3 into f16",
    "mma.sync m8n8k4 f64 into f64",
]


@runs
@pytest.mark.parametrize("name", HOSTED)
def test_the_kernel_reads_and_writes_its_fragments(name: str, tmp_path: Path) -> None:
    """With the table's unit instead of the tensor core the complete probe agrees; with another unit
    it does not."""
    one = BY_NAME[name]
    unit = matrix.table_unit("sm_90", one)
    assert unit is not None
    program = HostProgram(one.program, tmp_path)
    program.plant(one, unit)
    got = matrix.probe(Bench(one, program.launch, "cpu"), "sm_90", 1_000)
    assert (got.error, got.agrees) == ("", True), disagreements(got)


def disagreements(got: matrix.MatrixProbe) -> list[str]:
    return [quantity.name for quantity in (*got.structure, *got.specials) if not quantity.agrees]


SLIPS = {
    "row of A": ("r % 2 * 8 * ROW_BYTES", "r / 2 * 8 * ROW_BYTES"),
    "half of A": ("r / 2 * 16", "r / 2 * 8"),
    "column of B": ("16 * column + i)", "16 * (column ^ 1) + i)"),
    "half of B": ("16 * half + i)", "16 * (half ^ 1) + i)"),
    "column of C": ("first + g) * columns + 2 * t;", "first + g) * columns + 2 * (t ^ 1);"),
    "row of C": ("accumulator.read(1, from + 8 * columns)", "accumulator.read(1, from)"),
    "barrier": ("__syncthreads();", ""),
}


@runs
@pytest.mark.parametrize("name", SLIPS)
def test_every_slip_of_the_kernel_is_seen(name: str, tmp_path: Path) -> None:
    one, (text, instead) = BY_NAME["wgmma m64n8k16 f16 into f32"], SLIPS[name]

    def slip(source: str) -> str:
        assert source.count(text) == 1
        return source.replace(text, instead)

    program = HostProgram(one.program, tmp_path, slip)
    unit = matrix.table_unit("sm_90", one)
    assert unit is not None
    program.plant(one, unit)
    bench = Bench(one, program.launch, "cpu")
    assert (
        agreement.agree(
            one, bench.tiles, lambda a, b, c: fused_dot(a, b, c, unit), 1_000
        ).mismatches
        > 100
    )


# Functions.


@compiles
@pytest.mark.parametrize("arch", tier.for_ci(["sm_80", "sm_90a", "sm_120a"], keep=2))
def test_every_function_compiles_where_it_exists(arch: str) -> None:
    here = [one for one in FUNCTIONS if one.unsupported_on(arch) is None]
    assert len(here) == len(FUNCTIONS) - 2 * (arch == "sm_80")
    for one in here:
        assert compile_for(one.program("survey"), arch).registers <= 128, one.name


class Hosted:
    """A function whose two kernels are compiled for the CPU, once with all that is planted: pieces
    of C++ that change y, the bits of f(x)."""

    def __init__(self, name: str, folder: Path, *plants: str) -> None:
        self.probed: Probed = {one.name: one for one in FUNCTIONS}[name]
        self.plants = ("", *plants)
        self.programs = {}
        for entry in ("survey", "values"):
            (folder / entry).mkdir()
            self.programs[entry] = HostProgram(
                self.probed.program(entry), folder / entry, lambda text: _plant(text, self.plants)
            )
        self.plant()

    def plant(self, planted: str = "") -> Hosted:
        """Let one of the pieces act from now on, or none."""
        for program in self.programs.values():
            program.library.plant(self.plants.index(planted))
        return self

    def launch(self, program: Program, how: Launch, arguments: ctypes.Structure) -> None:
        self.programs[program.entry].launch(program, how, arguments)

    def probe(self, first: int, count: int, arch: str = "") -> FunctionProbe:
        probe = functions.probe(Surveyor(self.probed, self.launch, "cpu", 2), first, count, arch)
        assert not probe.error
        return probe


def _plant(text: str, plants: tuple[str, ...]) -> str:
    place = "__device__ __forceinline__ u32 evaluate("
    assert text.count(place) == 1
    acts = " ".join(f"if (acts == {n}) {{ {plant} }}" for n, plant in enumerate(plants))
    changed = (
        'static int acts; extern "C" void plant(int which) { acts = which; }\n'
        f"__device__ u32 evaluate(u32 x, u32 z) {{ u32 y = honest(x, z); {acts} return y; }}"
    )
    where = "__device__ __forceinline__ u32 low("
    return text.replace(place, place.replace("evaluate", "honest")).replace(
        where, f"{changed}\n{where}"
    )


EX2 = "ex2.approx.ftz.f32"  # on the CPU, 2^x correctly rounded or nearly so
ONE, COUNT = 0x3F800000, 1 << 14
OFF_AT_ONE = "if (x == 0x3f800000) y += 1;"
AT_ZERO = {"0": "if (x == 0x0) y -= 1;", "-0": "if (x == 0x80000000) y -= 1;"}
PLANTED = {
    "off": "if (x == 0x3f800123) y += 7;",
    "integer": OFF_AT_ONE,
    "NaN": "if (x == 0x3f800321) y = 0x7fc00000;",
    "infinity": "if (x == 0x3f801777) y = 0x7f800000;",
    "decreasing": "if (x >= 0x3f801000 && x < 0x3f801010) y -= 3;",
}


@pytest.fixture(scope="module")
def ex2(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    return Hosted(EX2, tmp_path_factory.mktemp("ex2"), *PLANTED.values(), *AT_ZERO.values())


@runs
def test_an_honest_function_agrees(ex2: Hosted) -> None:
    host = ex2.plant()
    probe = host.probe(ONE - COUNT // 2, COUNT)
    assert probe.agrees
    assert probe.ulp is not None
    assert 0.49 < probe.ulp.value < 0.51
    assert probe.ulp_bound is None  # not all inputs
    assert (probe.order, probe.integers, probe.wrong) == ("monotone", "exact from -126 to 127", "")
    assert (probe.subnormal_inputs, probe.subnormal_results) == ("none", "none")
    assert probe.edges is not None
    assert {probe.edges[name] for name in ("0", "-0", "smallest subnormal")} == {"3f800000"}
    assert (probe.edges["inf"], probe.edges["-inf"]) == ("7f800000", "00000000")
    # just below -126, to where 2^x is half the smallest number
    tiny = host.probe(0xC2FC0001, 1 << 20)
    assert tiny.subnormal_results == "all become 0"


@runs
def test_where_the_table_has_integers_exact_they_must_be(ex2: Hosted) -> None:
    host = ex2.plant(OFF_AT_ONE)
    assert host.probe(ONE, COUNT, "sm_100").agrees, "nothing is known of it there"
    probe = host.probe(ONE, COUNT, "sm_90")
    assert not probe.agrees
    assert probe.wrong == "2^n, which the table has exact: 1 inexact, the first at 1"


@runs
@pytest.mark.parametrize("zero", AT_ZERO)
def test_where_the_table_has_1_at_zero_it_must_be(zero: str, ex2: Hosted) -> None:
    """On every device: the bounds of exact sums rest on it (docs/tolerance.md)."""
    probe = ex2.plant(AT_ZERO[zero]).probe(ONE, COUNT, "sm_100")
    assert not probe.agrees
    assert probe.wrong == f"f({zero}), which the table has 1: 3f7fffff"


@runs
@pytest.mark.parametrize(
    ("planted", "wanted"),
    [
        ("off", {"ulp": "3f800123", "order": "not monotone: 1 times, the first at 3f800124"}),
        ("integer", {"integers": "1 inexact, the first at 1"}),
        ("NaN", {"wrong": "1 times, the first at 3f800321"}),
        ("infinity", {"ulp": "3f801777"}),
        ("decreasing", {"order": "not monotone"}),
    ],
    ids=PLANTED,
)
def test_every_planted_error_of_a_function_is_found(
    planted: str, wanted: dict[str, str], ex2: Hosted
) -> None:
    probe = ex2.plant(PLANTED[planted]).probe(ONE - COUNT // 2, COUNT)
    for name, text in wanted.items():
        value = probe.ulp.at if name == "ulp" and probe.ulp else str(getattr(probe, name))
        assert text in value
    if {"ulp", "wrong"} & set(wanted):
        assert not probe.agrees


@runs
def test_a_pair_and_its_subnormals(tmp_path: Path) -> None:
    """All inputs of a 16-bit format; halves that differ; subnormals that are flushed."""
    planted = "if ((x & 0x7c00) == 0) y &= 0x80008000; if (x == 0x1234) y ^= 0x10000;"
    host = Hosted("tanh.approx.f16x2", tmp_path, planted)
    probe = host.probe(0, 1 << 16)
    assert (probe.exhaustive, probe.agrees, probe.order) == (True, True, "monotone")
    assert probe.ulp_bound is not None
    assert 0.49 < probe.ulp_bound < 0.51
    assert probe.subnormal_inputs.startswith("within")
    probe = host.plant(planted).probe(0, 1 << 16)
    # up to 4 of the smallest, zero is less than 4 ulp off
    assert probe.subnormal_inputs == "2038 of 2046 taken as 0"
    assert probe.wrong == "a pair's results differ: 1 times, the first at 1234"
    assert not probe.agrees


@runs
def test_a_sampled_function_names_both_arguments(tmp_path: Path) -> None:
    probe = Hosted("div.full.f32", tmp_path).probe(0, 1 << 14)
    assert probe.agrees
    assert (probe.exhaustive, probe.ulp_bound) == (False, None)
    assert probe.ulp is not None
    x, z = probe.ulp.at.split(" / ")
    (tmp_path / "planted").mkdir()
    planted = f"if (x == 0x{x} && z == 0x{z}) y += 5;"
    host = Hosted("div.full.f32", tmp_path / "planted", planted)
    worse = host.plant(planted).probe(0, 1 << 14)
    assert worse.ulp is not None
    assert (worse.ulp.at, worse.ulp.value > 4, worse.agrees) == (probe.ulp.at, True, False)


@runs
def test_near_one_only_the_absolute_error_of_a_logarithm_counts(tmp_path: Path) -> None:
    # 2^-23 in place of 1.44 times it, and one ulp off behind 4.
    planted = "if (x == 0x3f800001) y = 0x34000000; if (x == 0x40800001) y += 1;"
    host = Hosted("lg2.approx.f32", tmp_path, planted).plant(planted)
    near, beyond = host.probe(0x3F700000, 1 << 21), host.probe(0x40800000, 1 << 10)
    assert near.absolute is not None
    assert near.ulp is not None
    assert beyond.ulp is not None
    assert (near.absolute.at, near.ulp.value, near.agrees) == ("3f800001", 0, True)
    assert beyond.ulp.at == "40800001"
