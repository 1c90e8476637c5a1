"""Edited builds of CUDA sources: exact matches, headers, and files on disk."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.planted import copies
from verify.bundle import ROOT
from verify.cuda.compile import Source
from verify.cuda.edits import Edit, EditError, edited, texts_of
from verify.sanitizers.delays import BEFORE, DELAYED, SITE

KERNELS = ROOT / "kernels"
PTX = [path for path in sorted((KERNELS / "ptx").glob("*.cu")) if path.with_suffix(".py").exists()]
CUTE = KERNELS / "cute" / "flash_forward.cu"
HOPPER = KERNELS / "cute" / "hopper_forward.cu"
HOPPER_FP8 = KERNELS / "cute" / "hopper_fp8_forward.cu"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "kernel.cu").write_text('#include "part.cuh"\n#include <cuda.h>\nint a = b;\n')
    (tmp_path / "part.cuh").write_text('#include "ptx.cuh"\nint b = c;\n')
    (tmp_path / "other.cuh").write_text("int b = c;\n")  # nothing includes it
    return Source(tmp_path / "kernel.cu", "kernel", (("N", "1"),))


def test_the_texts_are_those_of_a_source_and_of_its_own_headers(source: Source) -> None:
    assert set(texts_of(source)) == {"kernel.cu", "part.cuh", "ptx.cuh"}


def test_an_edit_is_written_beside_copies_of_the_other_files(source: Source, cache: Path) -> None:
    made = edited(source, [Edit("= c", "= 3"), Edit("= 3", "= 4")], before="int c;\n")
    assert (made.entry, made.defines) == (source.entry, source.defines)
    assert made.path.is_relative_to(cache)
    assert made.path.read_text() == "int c;\n" + source.path.read_text()
    assert made.path.with_name("part.cuh").read_text() == '#include "ptx.cuh"\nint b = 4;\n'
    assert edited(source, [Edit("= c", "= 4")], before="int c;\n").path == made.path
    assert edited(source, [Edit("= c", "= 5")]).path != made.path


def test_a_file_that_another_process_can_be_compiling_stays_the_same_file(
    source: Source, cache: Path
) -> None:
    """NVRTC knows a header with `#pragma once` by its inode: a file written anew can get that of
    one that was read, and is then left out."""
    edits = [Edit("= c", "= 3")]
    made = edited(source, edits)
    before = {file.name: file.stat().st_ino for file in made.path.parent.iterdir()}
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: edited(source, edits).path, range(8)))
    assert set(again) == {made.path}
    assert {file.name: file.stat().st_ino for file in made.path.parent.iterdir()} == before


def test_processes_that_are_first_at_the_same_time_have_one_folder(
    source: Source, cache: Path
) -> None:
    edits = [Edit("= c", "= 3")]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: edited(source, edits).path, range(8)))
    assert len(set(made)) == 1
    assert sorted(file.name for file in made[0].parent.iterdir()) == sorted(texts_of(source))
    assert list((cache / "edited").iterdir()) == [made[0].parent]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (Edit("absent", ""), "occurs 0 times in .*needs it 1 times"),
        (Edit("int [ab] =", ""), "occurs 2 times"),
        (Edit("absent", "", times=None), "needs it at least once"),
    ],
)
def test_a_pattern_that_does_not_occur_as_often_as_it_must_is_an_error(
    source: Source, cache: Path, edit: Edit, says: str
) -> None:
    with pytest.raises(EditError, match=says):
        edited(source, [edit])
    assert not cache.exists()


@pytest.mark.parametrize(
    ("path", "slips"),
    [
        *((path, copies.PTX_SLIPS) for path in PTX),
        (CUTE, copies.CUTE_SLIPS),
        (HOPPER, copies.HOPPER_SLIPS),
        (HOPPER_FP8, copies.HOPPER_FP8_SLIPS),
    ],
)
def test_a_slip_changes_every_shipped_kernel_in_one_place(
    path: Path, slips: dict[str, Edit]
) -> None:
    texts = texts_of(Source(path, path.stem))
    made = [slip.apply(texts) for slip in slips.values()]
    for each in made:
        assert sum(each[name] != texts[name] for name in texts) == 1
    assert len({str(each) for each in made}) == len(slips)


# Barriers and waits that a shipped kernel's text has.
SITES = dict.fromkeys(PTX, 12 + 5) | {CUTE: 4 + 3, HOPPER: 1 + 2 + 4 + 6, HOPPER_FP8: 1 + 4 + 8}
WORDS = re.compile(r"__syncthreads|__syncwarp|cp_async_wait|bar\.sync|barrier\.|mbarrier|wait_")


@pytest.mark.parametrize("path", SITES)
def test_every_barrier_and_wait_of_a_shipped_kernel_gets_its_delays(path: Path) -> None:
    texts = texts_of(Source(path, path.stem))
    kernel = {name: text for name, text in texts.items() if name != "ptx.cuh"}  # no call is there
    code = {name: re.sub(r"//[^\n]*|#include[^\n]*", "", text) for name, text in kernel.items()}
    rest = {word for text in code.values() for word in WORDS.findall(re.sub(SITE, "", text))}
    assert not rest, "barriers or waits that delays.SITE does not know"
    assert not re.search(SITE, texts["ptx.cuh"])
    delayed = DELAYED.apply(texts)
    count = sum(text.count("do { verify_delay(") for text in delayed.values())
    assert count == SITES[path]
    made = edited(Source(path, path.stem), [DELAYED], BEFORE)
    assert made.path.read_text(encoding="utf-8").startswith(BEFORE)
