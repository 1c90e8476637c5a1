"""The Hopper forward's own source on the CPU, with CuTe's layouts, partitions and descriptors; only
the bodies that hold inline assembly are replaced, by the functions of cuda_host/hopper.h."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kernels.cuda.family import Family
from kernels.cute import hopper_forward as kernel
from kernels.cute import hopper_maps
from kernels.masks import mask_build, mask_tables
from tests.harness.cute_host import (
    MARGIN,
    ORDERS,
    HostError,
    Ran,
    compiled_program,
    placed,
    without_guard,
)
from tests.harness.hopper_faults import Fault, Switch, switched
from tests.harness.hopper_forward_faults import EQUIVALENT
from tests.harness.hopper_forward_faults import FAULTS as FURTHER
from tests.harness.ptx_host import descales_of
from tests.planted.copies import HOPPER_SLIPS
from verify.arithmetic.dtypes import dtype_named
from verify.cuda.compile import Source
from verify.cuda.sass import NotReadError, listing
from verify.judging.comparison import compare
from verify.judging.known_forward import needed
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import Inputs, dequantised, tensors
from verify.tolerance.forward import resolve
from verify.variant import STRIDED, AttentionArgs, Build, Config, Variant

SOURCE = Path(kernel.__file__).with_suffix(".cu")
SMALL, LARGE = kernel.BLOCKS
_PERSISTENT, _OVERLAP = ("persistent", 1), ("overlap", 1)
BUILDS = {
    "large": (LARGE, "float16", 64),
    "small": (SMALL, "bfloat16", 128),
    "deep": (LARGE, "float16", 256),  # a ring of one slot
    "persistent": (replace(SMALL, options=(_PERSISTENT,)), "bfloat16", 64),
    "overlap": (replace(LARGE, options=(_OVERLAP,)), "bfloat16", 64),
    "both": (replace(LARGE, options=(_PERSISTENT, _OVERLAP)), "float16", 128),
}
OVERRUN = "overrun"  # the known-bad copy of "large"
SOFTMAX = "softmax.cuh"  # where it slips
# Those that a build's macros change, of both forwards for Hopper; that of the producer, behind the
# tiles.
SHARED = ("hopper_parts.cuh", "hopper_producer.cuh", "intervals.cuh", SOFTMAX)
# Bits of warps, to make them slow: what copies, and what multiplies; and that of products, which
# other warps overtake.
ROLES = {
    "loader": 0x1,
    "first consumer": 0xF0,
    "second consumer": 0xF00,
    "products": 1 << 31,
}
# Faults of the persistent programs' phases: an expression of the kernel or of its headers, and what
# it becomes while that fault is planted.
FAULTS = {
    "rings begin anew with a tile of rows": ("keys += blocks", "keys += 0"),
    "the ring of Q begins anew": ("queries += blocks > 0", "queries += 0"),
    "a tile without keys takes a turn": ("queries += blocks > 0", "queries += 1"),
    "slots of the tile before are taken for free": ("turns.keys + t >= STAGES", "t >= STAGES"),
    "Q waits for the phase to come": ("query.parity ^ 1", "query.parity"),
    "Q is never free": ("arrive_barrier(shared.q_read[query.slot])", "void()"),
    "a tile without keys has no zeros": (
        "blocks > 0 ? *chunk : uint128_t(uint64_t(0))",
        "*chunk",
    ),
    "the last round forgets to turn": ("full % 2 ? programs - 1 - own : own", "own"),
}
# All that a program holds, in the order of their numbers.
PLANTED: dict[str, tuple[Switch, ...]] = {
    **{name: (Switch(*pair),) for name, pair in FAULTS.items()},
    **{name: fault.switches for name, fault in (FURTHER | EQUIVALENT).items()},
}
PRODUCER = SOURCE.with_name("hopper_producer.cuh")

PROGRAM = """
#include "hopper.h"
inline bool& hasty = hopper::hasty;
extern "C" void begin() { hopper::start(); }
inline int planted = -1;  // the fault that is, as its place in the list of faults
extern "C" void plant(int fault) { planted = fault; }
extern "C" void slow(unsigned warps) { hopper::slow = warps; }
extern "C" int copied() { return hopper::copies; }
extern "C" void weaken(int line, int named, bool waits) {
  hopper::dropped = line;
  hopper::unmet = named;
  hopper::hasty = waits;
}
#include <cuda/std/limits>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include "arguments.cuh"
#define wait_barrier(...) \\
  (hopper::passed_by(__FILE__, __LINE__) ? void() : cute::wait_barrier(__VA_ARGS__))
"""
# One for each build, in a namespace of its own: CuTe's headers, which take longest, are read once.
BUILD = """
#define ENTRY_OF_SOURCE entry_NAME
#define ENTRY entry_NAME
#define run run_NAME
#define KERNEL "FILE"
DEFINES
namespace NAME {
#include "run.cpp"
}
UNDEFS
"""


def _call(function: str) -> str:
    """A function's body, up to the end of its assembly, becomes that call."""
    return rf"(\b{function}\s*\([^{{]*\{{).*?#endif"


FORMATS = {
    "F16": "float16",
    "BF16": "bfloat16",
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
}  # of wgmma's operands

# Header -> pattern of a body, which becomes the call behind its first group.
BODIES: dict[str, dict[str, str]] = {
    "cute/arch/copy_sm90_desc.hpp": {
        _call("initialize_barrier"): r"\1 hopper::init(smem_barrier, thread_count);",
        _call("set_barrier_transaction_bytes"): r"\1 hopper::arrive(smem_barrier, bytes);",
        _call("wait_barrier"): r"\1 hopper::wait(smem_barrier, phase_bit);",
        _call("arrive_barrier"): r"\1 hopper::arrive(smem_barrier);",
    },
    "cute/arch/copy_sm90_tma.hpp": {
        r"(struct SM90_TMA_LOAD_4D\b.*?)CUTE_INVALID_CONTROL_PATH\([^;]*;": (
            r"\1 hopper::tensor_copy(desc_ptr, mbar_ptr, smem_ptr, {crd0, crd1, crd2, crd3});"
        ),
    },
    "cute/arch/util.hpp": {
        r"(\bcast_smem_ptr_to_uint\([^{]*\{).*?#endif": r"\1 return ptx::shared_address(ptr);",
    },
    "cutlass/arch/barrier.h": {
        r"(static void arrive_and_wait_internal\([^{]*\{).*?#endif": (
            r"\1 hopper::meet(num_threads, barrier_id);"
        ),
    },
    "cute/arch/mma_sm90_gmma.hpp": {
        r"(\bwarpgroup_arrive\(\)\s*\{).*?#endif": r"\1",
        r"(\bwarpgroup_wait\(\)\s*\{).*?#endif": (r"\1 hopper::complete(N + hopper::hasty);"),
        r"(\bwarpgroup_commit_batch\(\)\s*\{).*?#endif": (
            r"\1 host::together(hopper::commit, nullptr);"
        ),
    },
}


def _with_products(text: str) -> str:
    """mma_sm90_gmma.hpp, with wgmma of fp32 accumulators as calls."""

    def called(match: re.Match[str]) -> str:
        head, dtype, where, parameters = match.group(1, 2, 3, 4)
        major_n = "tnspB == GMMA::Major::MN" if dtype in ("F16", "BF16") else "false"
        d = ", ".join(f"&{name}" for name in re.findall(r"float\s*& (d\d+)", parameters))
        a = ", ".join(f"&{name}" for name in re.findall(r"uint32_t const& (a\d+)", parameters))
        left = "desc_a" if where == "SS" else "0"
        call = (
            f"hopper::wgmma(ptx::Format::{FORMATS[dtype]}, {{{a}}}, {left}, desc_b, {{{d}}},"
            f" {major_n}, int(scale_D) != 0);"
        )
        return f"{head}{call}"

    pattern = (
        r"(struct MMA_64x\d+x\d+_F32(B?F16|E4M3|E5M2)\2_(SS|RS)(?:_TN)?\n\{.*?fma\((.*?)\)\n"
        r".*?#else\n\s*)CUTE_INVALID_CONTROL_PATH\([^;]*;"
    )
    return re.sub(pattern, called, text, flags=re.DOTALL)


def patch(headers: Path, folder: Path) -> None:
    """Copies of headers in which bodies are calls."""
    for name, bodies in BODIES.items():
        text = (headers / name).read_text()
        for pattern, body in bodies.items():
            text, count = re.subn(pattern, body, text, count=1, flags=re.DOTALL)
            assert count == 1, pattern
        if name.endswith("mma_sm90_gmma.hpp"):
            text = _with_products(text)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def build(file: str, name: str, source: Source) -> str:
    """The build of a file with a source's macros, whose entry becomes `run_NAME`."""
    defines = dict(source.defines)
    undefined = (*defines, source.entry, "ENTRY", "run", "KERNEL")
    text = BUILD.replace("NAME", name).replace("FILE", file)
    text = text.replace("ENTRY_OF_SOURCE", source.entry)
    text = text.replace("DEFINES", "\n".join(f"#define {k} {v}" for k, v in defines.items()))
    return text.replace("UNDEFS", "\n".join(f"#undef {word}" for word in undefined))


def compiled(folder: Path) -> Path:
    """The shared library of all builds, and of the known-bad copy."""
    texts = [build(SOURCE.name, name, kernel.source(*chosen)) for name, chosen in BUILDS.items()]
    texts += [build(f"{OVERRUN}.cu", OVERRUN, kernel.source(*BUILDS["large"]))]
    return compiled_program(folder, "".join([PROGRAM, *texts]), own_headers)


def own_headers(headers: Path, folder: Path) -> None:
    """What the program includes in place of CuTe's headers, and the kernel, once for each build."""
    patch(headers, folder)
    names = (SOURCE.name, "hopper_tiles.cuh", *SHARED)
    shipped = {name: without_guard(SOURCE.with_name(name)) for name in names}
    shipped = switched(shipped, PLANTED.values())
    slipped = HOPPER_SLIPS[OVERRUN].apply(shipped)
    slip = {
        f"{OVERRUN}.cu": slipped[SOURCE.name].replace(SOFTMAX, f"{OVERRUN}.cuh"),
        f"{OVERRUN}.cuh": slipped[SOFTMAX],
    }
    for name, text in (shipped | slip).items():
        (folder / name).write_text(text)


def instructions(build: Build) -> str:
    """The listing of a build for Hopper, which must not spill; skips a test where there is none."""
    binary = build.compile()
    resources = binary.resources
    assert resources.stack == resources.spill_stores == resources.spill_loads == 0
    # What warpgroups trade: a launch with fewer would wait forever for the consumers' registers.
    assert resources.registers == 168
    try:
        return listing(binary.cubin)
    except NotReadError as error:
        pytest.skip(str(error))


def waits(source: Path, *, persistent: bool = False) -> list[int]:
    """Where a kernel waits at mbarriers, as `weaken` takes it: lines of the producer's header, and
    lines of the source, negated.  persistent: those of persistent programs, too."""
    return [
        sign * number
        for sign, path in ((1, PRODUCER), (-1, source))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if " wait_barrier(" in line and (persistent or "q_read" not in line)
    ]


class Map(ctypes.Structure):
    """A tensor map, as hopper.h reads it."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("element", ctypes.c_uint32),
        ("row", ctypes.c_uint32),
    )


def encode(made: hopper_maps.TensorMap, to: int) -> None:
    """In place of the driver's."""
    size = dtype_named(made.dtype).itemsize
    fields = ((*made.dims,), (*made.strides,), (*made.box,), size, size * made.box[0])
    Map.from_address(to).__init__(made.address, *fields)


def encoding(fault: Fault) -> Callable[[hopper_maps.TensorMap, int], None]:
    """`encode` with the fault's map; a launch encodes those of q, k and v in this order."""
    names = itertools.cycle("qkv")

    def encoded(made: hopper_maps.TensorMap, to: int) -> None:
        encode(made, to)
        if next(names) == fault.map_of:
            fault.changed(Map.from_address(to))

    return encoded


@dataclass(frozen=True)
class Program:
    """One build in the shared library.  Tests replace the kernel's `encode` by the one here.

    programs: the most that a persistent build runs.
    """

    library: ctypes.CDLL
    entry: Callable[..., bytes]
    config: Config
    dtype: str
    head_dim: int
    variant: Variant = kernel.VARIANT
    programs: int = 2

    @property
    def family(self) -> Family:
        """Whose launches and arguments it takes."""
        return getattr(self.variant.forward, "__self__")  # noqa: B009 - a Callable's type has none

    def problem(self, text: str) -> Problem:
        return Problem.parse(f"{text},d={self.head_dim},dtype={self.dtype}")

    def run(
        self, problem: Problem, inputs: Inputs, *, backwards: bool = False, late: bool = False
    ) -> Ran:
        """Raises HostError where the threads of a block part or wait forever, addresses are bad,
        or anything but O and LSE is written."""
        q, k, v = (placed(getattr(inputs, name), problem, name) for name in ("q", "k", "v"))
        args = AttentionArgs(
            *(q, k, v, problem.mask, problem.scale, problem.score_mod, self.config),
            descales=descales_of(problem),
        )
        made_out = torch.full(problem.shape_out, math.nan, dtype=problem.format_out.torch)
        out = placed(made_out, problem, "out")
        count = math.prod(problem.shape_out[:3])
        storage = torch.full((count + MARGIN,), math.nan)
        lse = storage[:count].view(problem.shape_out[:3])
        made = self.family.make(self.config, self.dtype, self.head_dim, "", STRIDED)
        grid = args.batch * args.heads_q * math.ceil(args.seqlen_q / made.block_m)
        if kernel.option(self.config, "persistent", self.head_dim):
            grid = min(grid, self.programs)
        mask = mask_build(args)
        tables = mask_tables(args, mask)
        given = self.family.arguments(args, out, lse, mask, tables)
        conflicts = (ctypes.c_long * 2)()
        sizes = grid, made.threads, made.shared_bytes
        self.library.begin()
        error = self.entry(ctypes.byref(given), *sizes, backwards, late, conflicts)
        if error:
            raise HostError(error.decode())
        whole = torch.tensor([], dtype=out.dtype).set_(out.untyped_storage())
        written = int(whole.isnan().logical_not().sum())
        if written > out.numel():
            raise HostError(f"{written - out.numel()} elements written beside O")
        if not storage[count:].isnan().all():
            raise HostError("elements written behind LSE")
        return Ran(out, lse, (conflicts[0], conflicts[1]))

    def verdict(self, text: str, *, spoiled: bool = False) -> Iterator[float]:
        """The worst error over its bound, of O and LSE, for each order of warps and copies;
        infinite where a run is refused or an empty row is not empty.

        spoiled: K and V are NaN where no row of the problem sees them.
        """
        problem = self.problem(text)
        arithmetic = resolve(self.variant.numerics, self.config, problem, "sm_90")
        inputs = tensors(problem)
        truth = compute_truth(problem, dequantised(problem, inputs), [arithmetic])
        live = ~truth.empty
        given = without_unseen(problem, inputs) if spoiled else inputs
        for order in ORDERS:
            try:
                ran = self.run(problem, given, **order)
            except HostError:
                yield math.inf
                continue
            empty = bool(
                (ran.lse[truth.empty] == -math.inf).all() and (ran.out[truth.empty] == 0).all()
            )
            out = compare(ran.out, truth.out, truth.out_bound, problem.format_out).ratio[live]
            lse = compare(ran.lse, truth.lse, truth.lse_bound, dtype_named("float32")).ratio[live]
            known = needed(truth, ran.out, problem.format_out)[live]
            parts = [float(part.max()) for part in (out, lse, known) if part.numel()]
            worst = max(parts, default=0.0)
            yield worst if empty else math.inf


def without_unseen(problem: Problem, inputs: Inputs) -> Inputs:
    """K and V with NaN at the keys that no row sees."""
    sizes = problem.batch, 1, problem.seqlen_q, problem.seqlen_kv
    unseen = ~problem.mask.dense(*sizes).any(2)[:, :, :, None]
    nan = torch.tensor(math.nan).to(inputs.k.dtype)
    k, v = (torch.where(unseen, nan, tensor) for tensor in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)
