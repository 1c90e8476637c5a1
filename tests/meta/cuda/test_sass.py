"""Counts of SASS instructions: from nvdisasm's text, by kind and of the hottest loop; the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.cuda import sass
from verify.cuda.sass import Counts, NotReadError, count, counts
from verify.cuda.toolkit import executables
from verify.variant import Binary, Resources

# A build of tests/planted/builds.cu for sm_90a, as nvdisasm 13.1 prints it, without encodings.
SAMPLE = (Path(__file__).parent / "product.sass").read_text(encoding="utf-8")
BINARY = Binary(b"cubin", "product", Resources(32, 0, 0, 0, 0))


def listing(*lines: str, entry: str = "k") -> str:
    """nvdisasm's text of a kernel: instructions, and labels that end with a colon."""
    body = [
        line if line.endswith(":") else f"        /*{16 * at:04x}*/              {line} ;"
        for at, line in enumerate(lines)
    ]
    return "\n".join([f'\t.section\t.text.{entry},"ax",@progbits', f"{entry}:", *body])


def test_the_sample_is_counted() -> None:
    found = count(SAMPLE, "product")
    matrix = {"MMA": 1, "HMMA": 1, "LDSM": 1, "LDGSTS": 1, "BAR": 2, "LDS": 3}
    assert found.loop == {**matrix, "FP32": 4, "INT": 6, "UNIFORM": 1, "total": 22}
    around = {"LDG": 4, "STG": 8, "MOVE": 9, "INT": 15, "UNIFORM": 2, "total": 61}
    assert found.kernel == {**matrix, "FP32": 4, **around}


def test_the_innermost_loop_with_most_mma_is_the_hottest() -> None:
    text = listing(
        ".L_outer:",
        *["HMMA.16816.F32 R0, R4, R8, R0"] * 8,
        ".L_small:",
        "HMMA.16816.F32 R0, R4, R8, R0",
        "@P0 BRA `(.L_small)",
        ".L_big:",
        *["HMMA.16816.F32 R0, R4, R8, R0"] * 2,
        ".L_without:",
        *["FADD R0, R0, R1"] * 20,
        "@!P2 BRA `(.L_without)",
        "@!UP0 BRA `(.L_big)",
        "BRA.U UP1, `(.L_outer)",
        "EXIT",
        ".L_trap:",
        "BRA `(.L_trap)",
        "NOP",
    )
    found = count(text, "k")
    assert found.loop == {"MMA": 2, "HMMA": 2, "FP32": 20, "total": 24}
    assert (found.kernel["MMA"], found.kernel["total"]) == (11, 37)


def test_a_kernel_without_mma_has_no_hottest_loop() -> None:
    text = listing(".L_x_0:", "FADD R0, R0, R1", "@P0 BRA `(.L_x_0)", "EXIT")
    assert count(text, "k") == Counts({"FP32": 1, "total": 3}, {})


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("QMMA.16832.F32.E4M3.E4M3", "QMMA"),
        ("HGMMA.64x64x16.F32", "HGMMA"),
        ("UTCHMMA", "UTCMMA"),
        ("LDSM.16.MT88.4", "LDSM"),
        ("LDS.128", "LDS"),
        ("LDGSTS.E.BYPASS.128", "LDGSTS"),
        ("LDG.E.128", "LDG"),
        ("LDL.LU.64", "LDL"),
        ("MUFU.EX2", "MUFU"),
        ("FFMA.FTZ", "FP32"),
        ("FFMA2", "FP32"),
        ("FMNMX3", "FP32"),
        ("FSETP.NEU.AND", "FP32"),
        ("HFMA2.MMA", "FP16"),
        ("F2FP.F16.F32.PACK_AB", "CONVERT"),
        ("IMAD.WIDE.U32", "INT"),
        ("IMAD.MOV.U32", "MOVE"),
        ("IMAD.MOV", "MOVE"),
        ("IADD3.X", "INT"),
        ("IADD.64", "INT"),
        ("VIADD", "INT"),
        ("LOP3.LUT", "INT"),
        ("SHF.R.U32.HI", "INT"),
        ("MOV", "MOVE"),
        ("UMOV", "MOVE"),
        ("UIADD3.X", "UNIFORM"),
        ("ULEA.HI", "UNIFORM"),
        ("ULDC.64", None),
        ("LDGDEPBAR", None),
        ("BRA.U", None),
    ],
)
def test_each_opcode_is_of_its_kind(opcode: str, kind: str | None) -> None:
    found = count(listing(f"@P0 {opcode} R0, R1"), "k").kernel
    assert found.keys() - {"total", "MMA"} == ({kind} if kind else set())
    assert ("MMA" in found) == (kind is not None and kind.endswith("MMA"))


def test_only_the_named_kernel_counts() -> None:
    text = "\n".join(
        [listing("FADD R0, R0, R1", entry="k"), listing("EXIT", "EXIT", entry="other")]
    )
    assert count(text, "k").kernel == {"FP32": 1, "total": 1}
    assert count(text, "other").kernel == {"total": 2}
    with pytest.raises(NotReadError, match="has no kernel third"):
        count(text, "third")


@pytest.fixture
def disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """An empty cache, and the cubins that are disassembled."""
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    read: list[bytes] = []
    monkeypatch.setattr(sass, "listing", lambda cubin: read.append(cubin) or SAMPLE)
    return read


def test_a_binary_is_disassembled_once(disassembler: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(NotReadError, match="left out"):
        counts(BINARY, disassemble=False)
    first = counts(BINARY)
    assert first == count(SAMPLE, "product")
    assert counts(BINARY, disassemble=False) == counts(BINARY) == first
    counts(Binary(b"another", "product", BINARY.resources))
    assert disassembler == [b"cubin", b"another"]


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"kernel": {}}'], ids=str)
def test_a_damaged_entry_is_made_again(
    disassembler: list[bytes], tmp_path: Path, damage: str
) -> None:
    first = counts(BINARY)
    (entry,) = (tmp_path / "sass").iterdir()
    entry.write_text(damage)
    assert counts(BINARY) == first
    assert disassembler == [b"cubin", b"cubin"]


def test_without_nvdisasm_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "executables", lambda name: [])
    with pytest.raises(NotReadError, match="no nvdisasm on PATH, in CUDA_HOME"):
        sass.listing(b"cubin")


def test_an_nvdisasm_that_fails_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("#!/bin/sh\necho fatal: sm_300 >&2\nexit 255\n")
    new.write_text("#!/bin/sh\necho listing\n")
    for program in (old, new):
        program.chmod(0o755)
    monkeypatch.setattr(sass, "executables", lambda name: [str(old), str(new)])
    assert sass.listing(b"cubin") == "listing\n"
    monkeypatch.setattr(sass, "executables", lambda name: [str(old)])
    with pytest.raises(NotReadError, match=r"old: fatal: sm_300$"):
        sass.listing(b"cubin")


@pytest.mark.skipif(not executables("nvdisasm"), reason="no nvdisasm")
def test_nvdisasm_refuses_what_is_no_cubin() -> None:
    with pytest.raises(NotReadError, match="nvdisasm"):
        sass.listing(b"no cubin")
