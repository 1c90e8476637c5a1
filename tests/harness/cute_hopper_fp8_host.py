"""The Hopper forward of 8-bit inputs on the CPU: its own source, as `cute_hopper_host` runs that of
16 bits, with faults that a test can plant."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kernels.cute import hopper_fp8_forward as kernel
from tests.harness.cute_hopper_host import PROGRAM, SHARED, Program, build, patch
from tests.harness.cute_host import compiled_program, without_guard
from tests.harness.hopper_faults import Switch, switched
from tests.harness.hopper_fp8_faults import FAULTS as FURTHER
from verify.cuda.edits import Edit
from verify.variant import Config, Variant

SOURCE = Path(kernel.__file__).with_suffix(".cu")
SMALL, LARGE, OVERLAP = kernel.CONFIGS
BUILDS: dict[str, tuple[Variant, Config, int]] = {
    "small": (kernel.PROMOTED, SMALL, 64),
    "large": (kernel.PROMOTED, LARGE, 128),
    "deep": (kernel.PROMOTED, LARGE, 256),  # half of the columns of O at once
    "chained": (kernel.UNPROMOTED, SMALL, 64),
    "overlap": (kernel.PROMOTED, OVERLAP, 64),
    "chained_overlap": (kernel.UNPROMOTED, OVERLAP, 64),
}
SUMS = """
extern "C" float sum_of_small(int format, const unsigned char* a, const unsigned char* b, float c) {
  hopper::Small left[32], right[32];
  for (int k = 0; k < 32; ++k) {
    left[k] = hopper::small(ptx::Format(format), a[k]);
    right[k] = hopper::small(ptx::Format(format), b[k]);
  }
  return hopper::sum_of_small(ptx::Format(format), left, right, c);
}
"""
# Bits of warps, to make them slow: what copies, what transposes V, what multiplies; and products.
ROLES = {
    "loader": 0x1,
    "transposers": 0xE,
    "last transposers": 0xC,
    "first consumer": 0xF0,
    "second consumer": 0xF00,
    "products": 1 << 31,
}
# Those that a build's macros change, or that faults do.
HEADERS = ("hopper_fp8_tiles.cuh", *SHARED)
# An expression of the kernel or of its headers, and what it becomes while that fault is planted.
FAULTS = {
    "every other block added by wgmma": ("PROMOTES_HERE", "t % 2 == 0"),
    "a block is never promoted": ("PROMOTES_HERE", "t == 0"),
    "a factor of the query's head": (
        "factor_of(a.descale_k, batch, head_kv)",
        "factor_of(a.descale_k, batch, head)",
    ),
    "V's factor of the first batch": (
        "factor_of(a.descale_v, batch, head_kv)",
        "factor_of(a.descale_v, 0, head_kv)",
    ),
    "P's factor stays in the sum": ("1.0f / kScaleP", "1.0f"),
    "P is not scaled": (
        "__fsub_rn(__fmul_rn(factor, most), kLog2ScaleP)",
        "__fmul_rn(factor, most)",
    ),
    "scores of the other sign": ("factor < 0.0f ? -1.0f : 0.0f", "factor < 0.0f ? 1.0f : 0.0f"),
    "one pair of keys permuted": (
        "ptx::prmt(pairs[0], pairs[1], 0x6420)",
        "ptx::prmt(pairs[0], pairs[1], 0x4620)",
    ),
    "even columns for odd ones": (
        "ptx::prmt(pairs[2], pairs[3], 0x7531)",
        "ptx::prmt(pairs[2], pairs[3], 0x6420)",
    ),
    "a key of P twice": ("p(first + 4)", "p(first + 1)"),
    "O's columns in the order of the products": (
        "ptx::pack<format>(o(r, c), o(r, c + 2))",
        "ptx::pack<format>(o(r, c), o(r, c + 1))",
    ),
    "a value beyond the last key": ("own < seen.high", "own <= seen.high"),
    "a key too many": ("column >= seen[r].high", "column > seen[r].high"),
    "a block taken for whole": ("key + BLOCK_N > every.high", "key > every.high"),
}
# All that a program holds, in the order of their numbers.
PLANTED: dict[str, tuple[Switch, ...]] = {
    **{name: (Switch(*pair),) for name, pair in FAULTS.items()},
    **{name: fault.switches for name, fault in FURTHER.items()},
}
_HERE = "PROMOTES_HERE"
# Whether a block is promoted becomes a question, which a fault can answer otherwise.
_ASKED = Edit(r"if constexpr \(PROMOTED\)", f"if (PROMOTED && {_HERE})")


def compiled(folder: Path) -> Path:
    """The shared library of all builds."""
    texts = [PROGRAM, SUMS]
    for name, (variant, config, head_dim) in BUILDS.items():
        source = kernel.source(config, head_dim, promoted=variant is kernel.PROMOTED)
        texts.append(build(SOURCE.name, name, source))
    return compiled_program(folder, "".join(texts), own_headers)


def own_headers(headers: Path, folder: Path) -> None:
    """What the program includes in place of CuTe's headers, and the kernel, once for each build."""
    patch(headers, folder)
    texts = {name: without_guard(SOURCE.with_name(name)) for name in (SOURCE.name, *HEADERS)}
    texts = _ASKED.apply(texts)
    texts = switched(texts, PLANTED.values())
    for name, text in texts.items():
        (folder / name).write_text(text.replace(_HERE, "true"))


def program_of(name: str, library: ctypes.CDLL) -> Program:
    """One build of the library."""
    entry = library[f"run_{name}"]
    entry.restype = ctypes.c_char_p
    variant, config, head_dim = BUILDS[name]
    return Program(library, entry, config, kernel.DTYPE, head_dim, variant)
