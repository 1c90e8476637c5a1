"""Libraries of the host compiler that lie in one process: each computes with its own constants."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.harness.host_library import host_library, runs

# By its address, as std::min takes it where a compiler does not optimise.
SOURCE = """#include "block.h"
struct Arguments { int* to; };
struct Build { static constexpr int width = WIDTH; };
void ENTRY(Arguments a) {
    const int* volatile width = &Build::width;
    *a.to = *width;
}
"""


class Arguments(ctypes.Structure):
    _fields_ = (("to", ctypes.POINTER(ctypes.c_int)),)


@runs
def test_a_build_reads_its_own_constants(tmp_path: Path) -> None:
    found = []
    for width in (64, 128):
        (tmp_path / str(width)).mkdir()
        kernel = tmp_path / str(width) / "kernel.cu"
        kernel.write_text(SOURCE, encoding="utf-8")
        library = host_library(kernel, "entry", [("WIDTH", str(width))])
        number = ctypes.c_int()
        given = Arguments(ctypes.pointer(number))
        conflicts = (ctypes.c_long * 2)()
        error = library.run(ctypes.byref(given), 1, 32, 0, False, False, conflicts)
        assert not error, error
        found.append(number.value)
    assert found == [64, 128]
