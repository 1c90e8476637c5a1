"""What CUDA C++ variants share on the host: a kernel's arguments, its builds, its launch.

A variant is a .cu file and a `Family`: how a config, a dtype, a head dim, a kind of mask and
a storage of K become a `Launch`.  `Family` makes the entry point and the list of builds of that.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from kernels.masks import MaskBuild, mask_build, mask_tables
from verify.cuda.compile import Kernel, Source, build_of, compile_source, device_arch, launch, load
from verify.variant import (
    STRIDED,
    AttentionArgs,
    Build,
    Config,
    Support,
    Unsupported,
    Workspace,
    arch_named,
)

LOG2_E = math.log2(math.e)

Choice = tuple[Config, str, int, str, str]
"""What a build is made for: config, dtype, head dim, kind of mask, storage of K."""


class Strided(ctypes.Structure):
    """A tensor's address and its strides of batch, head and row, in the unit that the kernel counts
    in."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]

    @staticmethod
    def of(tensor: Tensor, *, in_bytes: bool) -> Strided:
        """Of a (batch, heads, seqlen, head_dim) tensor; strides in bytes or else in elements."""
        unit = tensor.itemsize if in_bytes else 1
        return Strided(tensor.data_ptr(), *(stride * unit for stride in tensor.stride()[:3]))


class Factors(ctypes.Structure):
    """The address of factors (batch, heads_kv) and their strides, in elements; 0 where there are
    none."""

    _fields_ = [("data", ctypes.c_uint64), ("batch", ctypes.c_int64), ("head", ctypes.c_int64)]

    @staticmethod
    def of(factors: Tensor) -> Factors:
        """Of a (batch, heads_kv) tensor in float32."""
        return Factors(factors.data_ptr(), *factors.stride())


class Arguments(ctypes.Structure):
    """One problem, as arguments.cuh declares it.

    lse: address of (batch, heads_q, seqlen_q), contiguous fp32.
    row_low, row_high: addresses of the tables of `mask_tables`, or 0.
    group: query heads per key head.
    q_factor, scale_log2: what Q, and then a score, is multiplied by; their product is softmax_scale
    log2 e.
    descale_q, descale_k, descale_v: of `AttentionArgs.descales`.
    """

    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_uint64) for name in ("lse", "row_low", "row_high")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "heads_q",
                "group",
                "seqlen_q",
                "seqlen_kv",
                "diagonal_low",
                "diagonal_high",
            )
        ),
        *((name, ctypes.c_float) for name in ("q_factor", "scale_log2")),
        *((f"descale_{name}", Factors) for name in "qkv"),
    ]


@dataclass(frozen=True)
class Launch:
    """How one build is compiled and launched.

    block_m: query rows of a block.  threads: of a block.  shared_bytes: dynamic shared memory.
    """

    source: Source
    block_m: int
    threads: int
    shared_bytes: int


@cache
def loaded(source: Source, arch: str) -> Kernel:
    """The compiled source, in this process."""
    return load(compile_source(source, arch))


def shared_room(device: torch.device) -> int:
    """Bytes of shared memory that a block can ask for."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def check_config(
    args: AttentionArgs,
    configs: Sequence[Config],
    further: Callable[[], Mapping[str, Config]] = dict,
) -> None:
    """Raises `Unsupported` for a config that is neither one of `configs` nor a further one, by
    name."""
    if args.config not in configs and args.config.name not in further():
        names = ", ".join(config.name for config in configs)
        raise Unsupported("config", f"{args.config.name} is none of {names}")


def check_room(args: AttentionArgs, *launches: Launch) -> None:
    """Raises `Unsupported` where a block of the device cannot have a launch's shared memory."""
    room, needed = shared_room(args.q.device), max(made.shared_bytes for made in launches)
    if needed > room:
        raise Unsupported(
            "config",
            f"{args.config.name} takes {needed} bytes of shared memory at head_dim {args.head_dim};"
            f" a block of this device has {room}",
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A variant's builds.

    make: the launch of a choice.  kinds: the kinds of `MaskBuild` that have builds of their own, by
    what they are built as.
    in_bytes: whether the kernel counts strides in bytes or in elements.
    spill_budget: bytes of a build's spills, by its head dim; 0 where it has none.
    scaling: (q_factor, scale_log2) of a softmax_scale.
    further: what else can be compiled, by name.
    matrix: the kind of matrix instructions of a build by architecture, where it is not HMMA.
    """

    configs: Sequence[Config]
    support: Support
    make: Callable[[Config, str, int, str, str], Launch]
    kinds: dict[str, str]
    in_bytes: bool
    spill_budget: Mapping[int, int] = field(default_factory=dict)
    scaling: Callable[[float], tuple[float, float]] = lambda scale: (1.0, scale * LOG2_E)
    further: Callable[[], Mapping[str, Config]] = dict
    matrix: Mapping[str, str] = field(default_factory=dict)

    def forward(
        self, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
    ) -> None:
        """Write O to `out` and the natural-log LSE to `lse`.

        Raises `Unsupported` outside the support, and for a config that this device has not enough
        shared memory for.
        """
        self.support.check(args, out)
        check_config(args, self.configs, self.further)
        if args.seqlen_q == 0:
            return
        assert lse is not None
        mask = mask_build(args)
        tables = mask_tables(args, mask)  # referenced until the launch has been queued
        kind, storage = self.kinds[mask.kind], args.storages["k"]
        made = self.make(args.config, args.dtype, args.head_dim, kind, storage)
        check_room(args, made)
        grid = args.batch * args.heads_q * math.ceil(args.seqlen_q / made.block_m)
        arguments = self.arguments(args, out, lse, mask, tables)
        with torch.cuda.device_of(args.q):
            kernel = loaded(made.source, device_arch(args.q.device))
            launch(kernel, (grid,), (made.threads,), made.shared_bytes, arguments)

    def arguments(
        self,
        args: AttentionArgs,
        out: Tensor,
        lse: Tensor,
        mask: MaskBuild,
        tables: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Arguments:
        """The structure that a launch passes; the tensors must outlive the launch."""
        k = args.stored["k"].tensors[""] if "k" in args.stored else args.k
        tensors = (args.q, k, args.v, out)
        descales = args.descales
        factors = () if descales is None else (descales.q, descales.k, descales.v)
        return Arguments(
            *(Strided.of(tensor, in_bytes=self.in_bytes) for tensor in tensors),
            lse.data_ptr(),
            *(0 if table is None else table.data_ptr() for table in tables),
            args.heads_q,
            args.heads_q // args.heads_kv,
            args.seqlen_q,
            args.seqlen_kv,
            mask.diagonal_low,
            mask.diagonal_high,
            *self.scaling(args.softmax_scale),
            *map(Factors.of, factors),
        )

    def choices(self) -> Iterator[Choice]:
        """Those of every build."""
        kinds = dict.fromkeys(self.kinds.values())
        head_dims, storages = self.support.head_dims, self.support.storages
        return itertools.product(self.configs, self.support.dtypes, head_dims, kinds, storages)

    def covering(self) -> list[Choice]:
        """Choices in which every two values of different parts meet; the largest head dims up to
        128, which are closest to what a thread's registers hold without a spill, come first."""
        left = sorted(self.choices(), key=lambda choice: (choice[2] > 128, -choice[2]))
        wanted = {pair for choice in left for pair in _pairs(choice)}
        chosen = []
        while wanted:
            best = max(left, key=lambda choice: len(wanted & _pairs(choice)))
            chosen.append(best)
            wanted -= _pairs(best)
        return chosen

    def builds(self, arch: str) -> list[Build]:
        """A covering set of builds for that architecture, if the support includes it."""
        capability = arch_named(arch).capability
        if capability is None or capability < self.support.capability:
            return []
        return [self.build(choice, arch) for choice in self.covering()]

    def build(self, choice: Choice, arch: str) -> Build:
        """One build for that architecture."""
        config, dtype, head_dim, kind, storage = choice
        words = (kind, storage if storage != STRIDED else "")
        name = "-".join((config.name, dtype, f"d{head_dim}", *filter(None, words)))
        made = self.make(*choice)
        return build_of(
            name,
            made.source,
            arch,
            shared=made.shared_bytes,
            spill_budget=self.spill_budget.get(head_dim, 0),
            expects=(self.matrix.get(arch, "HMMA"), "LDSM", "LDGSTS"),
        )


def _pairs(choice: Choice) -> set[object]:
    """Every two parts of a choice, with their places."""
    return set(itertools.combinations(enumerate(choice), 2))
