"""Conformance of instructions: the kernel and the expectations on the host's emulation of ptx.cuh,
written from the manual by itself; and a wrong copy of every function, which must be seen."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.harness.host_library import HOST, runs
from tests.harness.probe_host import HostProgram
from tests.meta.probes.test_probes_report import REPORT
from verify import document as doc
from verify.bundle import ROOT
from verify.cli import probe as command
from verify.document import markdown
from verify.probes import conformance, page
from verify.probes.conformance import CONFORMING, PROGRAM, Conforming, Warp
from verify.probes.report import ConformanceProbe, read, write
from verify.probes.toolchain import HERE, Launch, Program, compilable, compile_for
from verify.probes.worker import Answer, Job
from verify.report import beside
from verify.report.sections import probes as section
from verify.variant import compiled_archs

compiles = pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
BY_CASE = {one.case: one for one in CONFORMING}


@pytest.mark.first_look(1)
@compiles
@pytest.mark.parametrize("arch", compiled_archs())
def test_the_kernel_compiles_for_every_architecture(arch: str) -> None:
    assert compile_for(PROGRAM, arch).spill_stores == 0
    absent = {one.case.partition("_")[0] for one in CONFORMING if one.unsupported_on(arch)}
    old = {"sm_80": {"STMATRIX", "MMA", "PACK"}, "sm_89": {"STMATRIX"}}
    assert absent == (old | {"sm_86": old["sm_80"]}).get(arch, set())


def test_every_instruction_of_the_header_has_a_case() -> None:
    header = (HERE.parents[1] / "kernels" / "cuda" / "ptx.cuh").read_text(encoding="utf-8")
    named = {one.function.partition("<")[0] for one in CONFORMING}
    assert all(f" {name}(" in header for name in named)
    defined = {
        line.partition("(")[0].split()[-1]
        for line in header.splitlines()
        if "__forceinline__" in line
    }
    assert defined - named == {"shared_address", "cp_async_commit_group"}


@dataclass
class Planted:
    """A wrong copy of a function: where its body begins, and what it does instead, in C++."""

    case: str
    begins: str
    instead: str


LOAD, STORE = "void ldmatrix_{}", "void stmatrix_{}"
D1, D2, D4 = "(u32& d, u32 row) {", "(u32 (&d)[2], u32 row) {", "(u32 (&d)[4], u32 row) {"
S1, S2, S4 = (
    "(u32 row, u32 d) {",
    "(u32 row, const u32 (&d)[2]) {",
    "(u32 row, const u32 (&d)[4]) {",
)
OPERANDS = "(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {"
ROWS = "const u32 other[4] = {a[0], a[2], a[1], a[3]};"
PLANTS = [
    Planted("LDMATRIX_X1", LOAD.format("x1") + D1, "detail::ldmatrix<1, true>(&d, row); return;"),
    Planted(
        "LDMATRIX_X2",
        LOAD.format("x2") + D2,
        "detail::ldmatrix<2, false>(d, row); std::swap(d[0], d[1]); return;",
    ),
    Planted(
        "LDMATRIX_X2 reads all",
        LOAD.format("x2") + D2,
        "u32 all[4]; detail::ldmatrix<4, false>(all, row); d[0] = all[0]; d[1] = all[1]; return;",
    ),
    Planted(
        "LDMATRIX_X4",
        LOAD.format("x4") + D4,
        "detail::ldmatrix<4, false>(d, row); std::swap(d[1], d[2]); return;",
    ),
    Planted(
        "LDMATRIX_X1_TRANS",
        LOAD.format("x1_trans") + D1,
        "detail::ldmatrix<1, false>(&d, row); return;",
    ),
    Planted(
        "LDMATRIX_X2_TRANS",
        LOAD.format("x2_trans") + D2,
        "detail::ldmatrix<2, true>(d, row); d[1] = d[1] >> 16 | d[1] << 16; return;",
    ),
    Planted("LDMATRIX_X4_TRANS", LOAD.format("x4_trans") + D4, "row += threadIdx.x == 9 ? 16 : 0;"),
    Planted("STMATRIX_X1", STORE.format("x1") + S1, "d = d >> 16 | d << 16;"),
    Planted(
        "STMATRIX_X2",
        STORE.format("x2") + S2,
        "const u32 other[2] = {d[1], d[0]}; detail::stmatrix<2, false>(row, other); return;",
    ),
    Planted("STMATRIX_X4", STORE.format("x4") + S4, "detail::stmatrix<4, true>(row, d); return;"),
    Planted(
        "STMATRIX_X1_TRANS",
        STORE.format("x1_trans") + S1,
        "detail::stmatrix<1, false>(row, &d); return;",
    ),
    Planted(
        "STMATRIX_X2_TRANS",
        STORE.format("x2_trans") + S2,
        "detail::stmatrix<1, true>(row, d); return;",
    ),
    Planted(
        "STMATRIX_X4_TRANS",
        STORE.format("x4_trans") + S4,
        "const u32 other[4] = {d[0], d[2], d[1], d[3]}; detail::stmatrix<4, true>(row, other);"
        " return;",
    ),
    Planted(
        "CP_ASYNC_CG", "void cp_async_cg(u32 to, const void* from, u32 bytes) {", "bytes = 16;"
    ),
    *(
        Planted(
            f"CP_ASYNC_CA_{size}",
            "void cp_async_ca(u32 to, const void* from, u32 bytes) {",
            f"if (size == {size}) {{ {wrong} }}",
        )
        for size, wrong in ((16, "bytes &= ~1u;"), (8, "bytes = 8;"), (4, "bytes ^= bytes == 1;"))
    ),
    Planted("CP_ASYNC_GROUPS", "void cp_async_wait_group() {", "if (N == 2) { return; }"),
    Planted("SHFL_BFLY", "u32 shfl_bfly(u32 x, int bits) {", "bits &= 15;"),
    Planted("SHFL_BFLY_FLOAT", "float shfl_bfly(float x, int bits) {", "x = x == x ? x : NAN;"),
    Planted("SHFL_IDX", "u32 shfl_idx(u32 x, int lane) {", "lane ^= lane == 31;"),
    Planted("PRMT", "u32 prmt(u32 a, u32 b, u32 selector) {", "selector &= 0x7777;"),
    Planted(
        "MMA_FLOAT16",
        "void mma_m16n8k16" + OPERANDS,
        f"if (format == Format::float16) {{ {ROWS}"
        " detail::mma<format, float>(c, other, b0, b1); return; }",
    ),
    Planted(
        "MMA_BFLOAT16",
        "void mma_m16n8k16" + OPERANDS,
        "if (format == Format::bfloat16) { std::swap(b0, b1); }",
    ),
    Planted(
        "MMA_FLOAT16_HALF",
        "void mma_m16n8k16_f16(u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1) {",
        "detail::mma<Format::float16, std::uint16_t>(c, a, b0, b1); std::swap(c[0], c[1]); return;",
    ),
    Planted(
        "MMA_E4M3",
        "void mma_m16n8k32" + OPERANDS,
        "if (format == Format::float8_e4m3fn) { b1 = b1 >> 8 | b1 << 24; }",
    ),
    Planted(
        "MMA_E5M2",
        "void mma_m16n8k32" + OPERANDS,
        "if (format == Format::float8_e5m2) {"
        " detail::mma<format, float>(c, a, b0, b1); std::swap(c[1], c[2]); return; }",
    ),
    Planted("EX2", "float ex2(float x) {", "x = x < 0 && x > -1e-38f ? -1.0f : x;"),
    Planted("EX2_F16X2", "u32 ex2_approx_f16x2(u32 x) {", "x = x >> 16 | x << 16;"),
    Planted("LG2", "float lg2(float x) {", "x = std::fabs(x);"),
    Planted("RCP", "float rcp(float x) {", "x = x == 0 ? 0.0f : x;"),
    *(
        Planted(
            f"PACK_{format.upper()}",
            "u32 pack(float low, float high) {",
            f"if (format == Format::{format}) {{ {wrong} }}",
        )
        for format, wrong in (
            ("float16", "std::swap(low, high);"),
            ("bfloat16", "low = std::nextafter(low, 0.0f);"),
        )
    ),
    *(
        Planted(
            f"UNPACK_{format.upper()}",
            "void unpack(u32 packed, float& low, float& high) {",
            f"if (format == Format::{format}) {{ {wrong} }}",
        )
        for format, wrong in (
            ("float16", "packed = packed & 0x7c00 ? packed : packed & 0x8000ffff;"),
            ("bfloat16", "packed = packed << 16 | packed >> 16;"),
        )
    ),
    *(
        Planted(
            f"PACK_{short}",
            "u32 pack(float x0, float x1, float x2, float x3) {",
            f"if (format == Format::{format}) {{ {wrong} }}",
        )
        for short, format, wrong in (
            ("E4M3", "float8_e4m3fn", "std::swap(x1, x2);"),
            ("E5M2", "float8_e5m2", "x3 = std::fabs(x3) > 57344 ? NAN : x3;"),
        )
    ),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProgram]:
    """The kernel with a ptx.cuh that holds every wrong copy; plant(n) makes the n-th count, 0 none.

    Copies land as late as they may.
    """
    folder = tmp_path_factory.mktemp("conformance")
    header = (HOST / "ptx.cuh").read_text(encoding="utf-8")
    for number, plant in enumerate(PLANTS, 1):
        assert header.count(plant.begins) == 1, plant.begins
        wrong = f"{plant.begins}\n    if (planted == {number}) {{ {plant.instead} }}\n"
        header = header.replace(plant.begins, wrong)
    switch = (
        "inline int planted = 0;\n"
        'extern "C" __attribute__((used)) inline void plant(int number) { planted = number; }\n'
    )
    include = '#include "block.h"\n'
    assert header.count(include) == 1
    (folder / "ptx.cuh").write_text(header.replace(include, include + switch), encoding="utf-8")
    program = HostProgram(PROGRAM, folder, late=True)
    yield program
    program.library.plant(0)


def probed(host: HostProgram, one: Conforming, planted: int = 0) -> ConformanceProbe:
    host.library.plant(planted)
    return conformance.probe(Warp(host.launch, "cpu"), one)


@pytest.mark.first_look(3)
@runs
@pytest.mark.parametrize("case", BY_CASE)
def test_every_instruction_does_what_the_manual_says(case: str, host: HostProgram) -> None:
    got = probed(host, BY_CASE[case])
    assert (got.error, got.first, got.differing, got.agrees) == ("", "", 0, True)
    assert got.checks >= 5


@runs
def test_every_instruction_has_a_wrong_copy_which_is_seen(host: HostProgram) -> None:
    assert {plant.case.partition(" ")[0] for plant in PLANTS} == set(BY_CASE)
    missed = [
        plant.case
        for number, plant in enumerate(PLANTS, 1)
        if plant.case in BY_CASE and probed(host, BY_CASE[plant.case], number).agrees
    ]
    assert not missed


@runs
def test_a_disagreement_says_where(host: HostProgram) -> None:
    numbers = {plant.case: number for number, plant in enumerate(PLANTS, 1)}
    load, store, mma = (
        probed(host, BY_CASE[case], numbers[case])
        for case in ("LDMATRIX_X1", "STMATRIX_X1", "MMA_BFLOAT16")
    )
    assert load.first == "rows in order: lane 0, d[0]: 10081000, the manual has 10011000"
    assert store.first == "rows in order: shared byte 0: 01, the manual has 00"
    assert mma.first.startswith("B by rows, 1 at A[0][0]: lane 0, x[0]: ")
    assert (load.differing, load.checks) == (20, 20)


@runs
def test_an_instruction_that_fails_has_an_error_and_what_was_compared_before(
    host: HostProgram,
) -> None:
    launches = 0

    def fails_later(program: Program, how: Launch, arguments: ctypes.Structure) -> None:
        nonlocal launches
        launches += 1
        if launches == 2:
            raise RuntimeError("an illegal address")
        host.launch(program, how, arguments)

    host.library.plant(0)
    got = conformance.probe(Warp(fails_later, "cpu"), BY_CASE["LDMATRIX_X2"])
    assert (got.checks, got.differing, got.error) == (10, 0, "RuntimeError: an illegal address")


@runs
def test_a_load_that_reads_through_every_address_is_seen(host: HostProgram) -> None:
    """The emulation refuses an address that is not aligned, so that the probe has an error."""
    number = next(n for n, one in enumerate(PLANTS, 1) if one.case == "LDMATRIX_X2 reads all")
    got = probed(host, BY_CASE["LDMATRIX_X2"], number)
    assert "a bad shared address" in got.error


# The report.

ONE = CONFORMING[0]
WRONG = ConformanceProbe(ONE.name, 10, 3, "random rows 1: lane 5, d[0]: 00000001, the manual has 2")


def test_a_record_keeps_conformance(tmp_path: Path) -> None:
    report = replace(REPORT, conformance=(replace(WRONG, differing=0, first=""), WRONG))
    paths = write(report, tmp_path, page.markdown(report))
    assert read(paths[0]) == report
    assert '"differing":3' in paths[0].read_text(encoding="utf-8")


def test_older_records_are_read_and_shown_as_they_were() -> None:
    for path in (ROOT / "reports").glob("*/probes.json"):
        report = read(path)
        if not report.conformance:
            shown = page.markdown(report)
            assert shown == path.with_name("probes.md").read_text(encoding="utf-8")
            assert "Conformance" not in shown


def test_what_disagrees_with_the_manual_is_red() -> None:
    good = replace(REPORT, conformance=(ConformanceProbe(ONE.name, 10),))
    assert good.agrees
    assert "Nothing disagrees with the tables or with the PTX manual." in page.markdown(good)
    bad = replace(REPORT, conformance=(WRONG,))
    assert not bad.agrees
    shown = page.markdown(bad)
    assert "disagrees with the manual" in shown
    assert f"| **{ONE.name}** | sm_90a | 10 | " in shown
    (said,) = page.details(bad)
    assert said.endswith(f"{WRONG.first}; entry: kernels/cuda/ptx.cuh: ldmatrix_x1")
    failed = replace(REPORT, conformance=(ConformanceProbe(ONE.name, error="CompileError: no"),))
    assert (failed.agrees, failed.failed) == (True, (ONE.name,))
    assert "CompileError: no" in page.markdown(failed)


def test_the_device_report_shows_conformance() -> None:
    bad = replace(REPORT, conformance=(WRONG,))
    data = {"device": REPORT.device}
    whole = section.section(data, beside.Beside(probes=bad))  # type: ignore[arg-type]
    assert "the manual has 2" in markdown.render(doc.Document("", (), (whole,)), "")


def test_the_command_asks_for_what_the_device_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(jobs: list[Job[ConformanceProbe]], *rest: object) -> Iterator[Any]:
        return (Answer(ConformanceProbe(job.arguments[0], 10)) for job in jobs)

    monkeypatch.setattr(command, "_arch", lambda: ("sm_89", None))
    monkeypatch.setattr(command, "do_all", answers)
    for stage in ("_matrix", "_functions", "_orders", "_gradients"):
        monkeypatch.setattr(command, stage, lambda report, request, console: report)
    request = command.Request((), tmp_path)
    report = command.measure(request, Console(file=io.StringIO()))
    asked = [one.name for one in CONFORMING if not one.name.startswith("stmatrix")]
    assert [found.name for found in report.conformance] == asked
    assert {left.reason for left in report.not_run} == {"needs sm_90"}
    assert len(report.not_run) == len(CONFORMING) - len(asked)
    assert read(tmp_path / "probes.json") == report
