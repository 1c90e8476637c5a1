"""Delays at barriers: a kernel process whose kernels are built with a sleep before and after each
barrier and each wait for copies: CUDA kernels here, those that Triton compiles in `triton_delays`.

`python -m verify.sanitizers.delays SOCKET` connects to the judge's socket and answers like any
other kernel process.  A seed, which is part of a request, decides which warps sleep, where, and for
how long: up to four microseconds, a quarter of the warps at each place.  A block gets more dynamic
shared memory than it asks for, by an amount that the seed decides: fewer blocks then share a
multiprocessor, and the kernel reads the seed off the amount, so that all seeds run one binary.
Runs with a seed are on streams of their own.  Seed 0 adds no memory and is that of all other runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from verify.cell.child import KernelProcess, serve_at
from verify.cell.ways import DELAYS, UNBUILT
from verify.cuda.compile import CompileError, Kernel, Source
from verify.cuda.edits import Edit, EditError, edited
from verify.sanitizers import building, triton_delays
from verify.sanitizers.triton_delays import TritonDelays
from verify.variant import Binary

# No line of it is in a kernel's own text: a compiler's messages count from there.
BEFORE = """
#ifndef DELAY_SEED
#define DELAY_SEED delay_seed()
#define DELAY_SLEEP(nanoseconds) asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds))
__device__ __forceinline__ unsigned delay_seed() {
    unsigned bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}
#endif
// A warp sleeps the same in every turn of a loop, so that it drifts from its neighbours.
__device__ __forceinline__ void verify_delay(unsigned place) {
    const unsigned warp = 64 * blockIdx.x + threadIdx.x / 32;
    unsigned x = 0x9e3779b9u * DELAY_SEED + 0x85ebca6bu * place + 0xc2b2ae35u * warp;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
    if (x % 4 == 0) {
        DELAY_SLEEP(x >> 20);
    }
}
#line 1
"""
# A call of a barrier of the block, of a warp or of some warps, or of a wait for groups of copies or
# at an mbarrier (ptx.cuh's and CuTe's).
SITE = (
    r"(?:(?:\b__sync(?:threads|warp)|\b(?:ptx::)?cp_async_wait(?:_group)?<[^;{}]*>"
    r"|\bcp_async_wait_all)\(\)"
    r"|\b(?:wait_barrier|cutlass::arch::NamedBarrier::sync)\([^;{}]*\));"
)
DELAYED = Edit(
    SITE,
    r"do { verify_delay(2 * __LINE__); \g<0> verify_delay(2 * __LINE__ + 1); } while (0);",
    times=None,
)


def extra_bytes(seed: int) -> int:
    """Dynamic shared memory that a block gets beside its own."""
    return 1024 * seed + 16384 * (seed % 4)


class UnbuiltError(RuntimeError):
    """A kernel does not compile with delays: a fault of the edit, and not of the kernel.

    The reply to its launch has the status UNBUILT.
    """


class Delays:
    """What replaces the functions of `verify.cuda.compile`.  launches: of kernels with delays."""

    def __init__(self) -> None:
        from verify.cuda import compile as cuda

        self.seed = 0
        self.launches = 0
        self._cuda = cuda
        self._compile: Callable[[Source, str], Binary] = cuda.compile_source
        self._load: Callable[[Binary], Kernel] = cuda.load
        self._launch: Callable[..., None] = cuda.launch
        self._delayed: set[bytes] = set()  # binaries
        self._static: dict[Kernel, tuple[int, bool]] = {}  # bytes of shared memory; delays

    def more(self, shared: int, room: int) -> int:
        """How much shared memory a launch adds to so many bytes, of those that it may have."""
        return min(extra_bytes(self.seed), max(room - shared, 0))

    def install(self) -> None:
        """Replace the functions.  Call it before kernel files are loaded: they import them."""
        for name in ("compile_source", "load", "launch"):
            setattr(self._cuda, name, getattr(self, name))

    def compile_source(self, source: Source, arch: str) -> Binary:
        """Compile the source with delays; as it is, if it has no barrier and no wait."""
        try:
            delayed = edited(source, [DELAYED], BEFORE)
        except EditError:
            return self._compile(source, arch)
        try:
            binary = self._compile(delayed, arch)
        except CompileError as error:
            raise UnbuiltError(str(error)) from error
        self._delayed.add(binary.cubin)
        return binary

    def load(self, binary: Binary) -> Kernel:
        """Load a binary, and keep what it needs of shared memory."""
        kernel = self._load(binary)
        self._static[kernel] = binary.resources.shared, binary.cubin in self._delayed
        return kernel

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        *args: object,
    ) -> None:
        """Launch with more shared memory, as far as the device has it."""
        static, delayed = self._static.get(kernel, (0, False))
        more = self.more(static + shared_bytes, _room())
        self.launches += delayed
        self._launch(kernel, grid, block, shared_bytes + more, *args)

    def more_for_triton(self, shared: int) -> int:
        """The same for a kernel of Triton's that asks for so much."""
        return self.more(shared, triton_delays.most(shared, _room()))


def _room() -> int:
    """Bytes of shared memory that a block of the current device can ask for."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.shared_memory_per_block_optin)


class DelayedKernelProcess(KernelProcess):
    """A kernel process that takes the seed of a run from its request."""

    delays = Delays()
    triton: TritonDelays | None = None

    def _answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            return super()._answer(message, fds)
        except UnbuiltError as error:
            return {"status": UNBUILT, "message": str(error)}

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        seed = str(message.get("way", "")).removeprefix(DELAYS)
        self.delays.seed = int(seed or 0)
        message = message | {"way": ""}
        if message["device"] == "cpu" or not self.delays.seed:
            return self._counted(super()._run, message)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return self._counted(super()._run, message)

    def _run_concurrently(self, message: dict[str, Any]) -> dict[str, Any]:
        self.delays.seed = 0
        return self._counted(super()._run_concurrently, message)

    def _counted(
        self, run: Callable[[dict[str, Any]], dict[str, Any]], message: dict[str, Any]
    ) -> dict[str, Any]:
        if self.triton is None and "triton" in sys.modules and message["device"] != "cpu":
            self.triton = TritonDelays(self.delays.more_for_triton)
            self.triton.install()
            building.watch_triton()
        before = self._launched
        return run(message) | {"delayed": self._launched - before}

    @property
    def _launched(self) -> int:
        return self.delays.launches + (0 if self.triton is None else self.triton.launches)


def main() -> None:
    """Serve at the socket that the command line names."""
    DelayedKernelProcess.delays.install()
    serve_at(DelayedKernelProcess)


if __name__ == "__main__":
    main()
