"""FlashAttention-2 backward in CuTe: dQ, dK and dV from a saved O and LSE, by mma.sync, ldmatrix
and cp.async of sm_80.

Three kernels (Dao, arXiv 2307.08691, algorithm 2, with dQ in a kernel of its own instead of atomic
adds; `ATOMIC` has these):

    delta = rowsum(dO O)                            in fp32, into a workspace (row_sums.cu)
    for a tile of keys, over the rows of every query head of the group that see one of them:
        x  = (softmax_scale log2 e) (q . k)         one fp32 product per score, as in the forward
        P  = 2^(x - lse log2 e)                     dV += round(P)^T dO
        dS = P (dO V^T - delta)                     dK += round(dS)^T Q
    for a tile of rows, over the keys that they see: the same dS, dQ += round(dS) K

round() is to the inputs' dtype.  Every sum is one fp32 chain in a fixed order, that of dK and dV
through all heads of the group, so that the result repeats bit for bit; dQ and dK are multiplied by
softmax_scale once, at the end.

`ATOMIC` forms dQ in the second kernel: it adds softmax_scale round(dS) K of each tile of keys to
fp32 sums in memory, in no fixed order, which are rounded at the end.

The two walks are one source, flash_backward.cu: a block of four warps owns a tile of block_n keys
(or rows) and walks over the rows (or keys) in steps of block_m.  Keys are owned transposed, K Q^T
and V dO^T: P^T and dS^T then lie in registers as the next products take them.  A mask is a band
between two diagonals or a table of intervals, and both are plain arguments: one build takes every
mask.  docs/cute.md draws the layouts and the pipeline.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.family import LOG2_E, Launch, Strided, check_config, check_room, loaded
from kernels.cute.flash_forward import ELEMENTS, STAGES, WARPS, available, compilable, cute_source
from kernels.masks import MaskBuild, mask_build, mask_tables
from kernels.ptx import split_q
from verify.cuda.compile import Source, build_of, device_arch
from verify.cuda.compile import launch as launch_kernel
from verify.variant import (
    STRIDED,
    AttentionArgs,
    Build,
    Config,
    Contract,
    GradientNumerics,
    GradientProducts,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    ScoreGradient,
    Support,
    Variant,
    Workspace,
    arch_named,
)

HEAD_DIMS = (32, 64, 96, 128)
DELTA_ROWS = 32  # of a block of row_sums.cu

KEYS, KEYS_ATOMIC, ROWS = "key_value_gradients", "all_gradients", "query_gradients"
"""The walks: over rows for dK and dV, the same with dQ, and over keys for dQ."""


class SumArguments(ctypes.Structure):
    """What row_sums.cu takes."""

    _fields_ = [
        ("out", Strided),
        ("dout", Strided),
        ("delta", ctypes.c_uint64),
        ("heads_q", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
    ]


class WalkArguments(ctypes.Structure):
    """What flash_backward.cu takes; strides are in elements, and addresses that are not used 0."""

    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_uint64) for name in ("lse", "delta", "dq_sums", "row_low", "row_high")),
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
        *((name, ctypes.c_float) for name in ("scale_log2", "scale")),
    ]


@dataclass(frozen=True)
class Step:
    """A kernel's launch, its arguments and its blocks."""

    launch: Launch
    arguments: ctypes.Structure
    blocks: int


def sums_launch(dtype: str, head_dim: int) -> Launch:
    """How the sums delta are compiled and launched."""
    defines = ("FORMAT", dtype), ("HEAD_DIM", str(head_dim))
    source = Source(Path(__file__).with_name("row_sums.cu"), "row_sums", defines=defines)
    return Launch(source, DELTA_ROWS, 32 * WARPS, 0)


def walk_launch(walk: str, config: Config, dtype: str, head_dim: int) -> Launch:
    """How a walk is compiled and launched; `Launch.block_m` is the rows, or keys, of a tile.

    Raises CompileError where CuTe's headers are missing.
    """
    owned, walked = config.block_n, config.block_m
    assert owned is not None
    assert walked is not None
    pairs = owned * walked if walk == KEYS_ATOMIC else 64
    # Two owned tiles, two of each stage, pairs; LSE and delta of each stage.
    shared_bytes = 2 * (2 * head_dim * (owned + STAGES * walked) + pairs) + 8 * STAGES * walked
    defines = {
        "ELEMENT": ELEMENTS[dtype],
        "HEAD_DIM": head_dim,
        "OWNED": owned,
        "WALKED": walked,
        "KEYS": int(walk != ROWS),
        "ATOMIC": int(walk == KEYS_ATOMIC),
        "WALK": walk,
        "SHARED_BYTES": shared_bytes,
    }
    source = cute_source(Path(__file__).with_suffix(".cu"), walk, defines)
    return Launch(source, owned, 32 * WARPS, shared_bytes)


@dataclass(frozen=True, kw_only=True)
class Walks:
    """A variant's kernels behind the sums of rows, in their order, and what it is launched with.

    make: the launch of a walk, a config, a dtype and a head dim.
    """

    names: tuple[str, ...]
    configs: tuple[Config, ...]
    support: Support
    make: Callable[[str, Config, str, int], Launch] = walk_launch

    @property
    def atomic(self) -> bool:
        """Whether dQ is added up in memory."""
        return KEYS_ATOMIC in self.names

    def backward(
        self,
        args: AttentionArgs,
        saved: Saved,
        dout: Tensor,
        gradients: Gradients,
        workspace: Workspace,
    ) -> None:
        """Write dQ, dK and dV from an O and its natural-log LSE.

        Raises `Unsupported` outside the support, and for a config that is not one of `configs` or
        that this device has not enough shared memory for.
        """
        self.support.check_backward(args, saved, dout, gradients)
        check_config(args, self.configs)
        mask = mask_build(args)
        tables = mask_tables(args, mask)  # referenced until the launches have been queued
        kernels = self.steps(args, saved, dout, gradients, workspace, mask, tables)
        if kernels:
            check_room(args, *(kernel.launch for kernel in kernels))
        if self.atomic:
            workspace["dq_sums"].zero_()
        with torch.cuda.device_of(args.q):
            arch = device_arch(args.q.device)
            for kernel in kernels:
                made = kernel.launch
                launch_kernel(
                    loaded(made.source, arch),
                    (kernel.blocks,),
                    (made.threads,),
                    made.shared_bytes,
                    kernel.arguments,
                )
        if self.atomic:
            gradients.dq.copy_(workspace["dq_sums"])

    def steps(
        self,
        args: AttentionArgs,
        saved: Saved,
        dout: Tensor,
        gradients: Gradients,
        workspace: Workspace,
        mask: MaskBuild,
        tables: tuple[Tensor | None, Tensor | None],
    ) -> list[Step]:
        """The kernels in their order; the tensors must outlive the launches."""
        of = partial(Strided.of, in_bytes=False)
        inputs = args.q, args.k, args.v, dout
        addresses = (saved.lse, workspace["delta"], workspace.get("dq_sums"), *tables)
        arguments = WalkArguments(
            *map(of, (*inputs, *gradients.by_name().values())),
            *(0 if tensor is None else tensor.data_ptr() for tensor in addresses),
            args.heads_q,
            args.heads_q // args.heads_kv,
            args.seqlen_q,
            args.seqlen_kv,
            mask.diagonal_low,
            mask.diagonal_high,
            args.softmax_scale * LOG2_E,
            args.softmax_scale,
        )
        of_sums = SumArguments(
            of(saved.out), of(dout), workspace["delta"].data_ptr(), args.heads_q, args.seqlen_q
        )
        queries = args.heads_q, args.seqlen_q
        keys = args.heads_kv, args.seqlen_kv

        def step(launch: Launch, arguments: ctypes.Structure, owned: tuple[int, int]) -> Step:
            heads, seqlen = owned
            tiles = math.ceil(seqlen / launch.block_m)
            return Step(launch, arguments, args.batch * heads * tiles)

        found = [step(sums_launch(args.dtype, args.head_dim), of_sums, queries)]
        for name in self.names:
            launch = self.make(name, args.config, args.dtype, args.head_dim)
            found.append(step(launch, arguments, queries if name == ROWS else keys))
        return [each for each in found if each.blocks]

    def workspace(self, args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
        """delta, one sum per row; and the sums dQ, if they are added up in memory."""
        rows = args.batch, args.heads_q, args.seqlen_q
        sums = {"dq_sums": ((*rows, args.head_dim), "float32")} if self.atomic else {}
        return {"delta": (rows, "float32"), **sums}


def builds(walks: Sequence[str], arch: str) -> list[Build]:
    """For Hopper two builds of each walk, in which every config and dtype occurs and pieces of
    both widths; elsewhere the first of them, which is the largest.

    The code is the same for every architecture, only ptxas differs, and one build takes as long as
    hundreds of other kernels'.
    """
    capability = arch_named(arch).capability
    if capability is None or capability < SUPPORT.capability:
        return []
    found = []
    for walk in walks:
        for config, dtype, head_dim in _BUILDS[walk][: None if arch == "sm_90a" else 1]:
            made = walk_launch(walk, config, dtype, head_dim)
            name = f"{walk}, {config.name}, {dtype}, d {head_dim}"
            budget = SPILL_BUDGETS.get(name, {}).get(arch, 0)
            found.append(
                build_of(
                    name,
                    made.source,
                    arch,
                    shared=made.shared_bytes,
                    spill_budget=budget,
                    expects=("HMMA", "LDSM", "LDGSTS"),
                )
            )
    for dtype in ELEMENTS:
        made = sums_launch(dtype, 128)
        found.append(build_of(f"row_sums, {dtype}, d 128", made.source, arch, shared=0))
    return found


# Bytes per thread, by the name of a build.
SPILL_BUDGETS: dict[str, dict[str, int]] = {
    f"{KEYS}, m64n64w4s2, float16, d 128": {
        "sm_80": 32,
        "sm_86": 28,
        "sm_89": 28,
        "sm_90a": 40,
    },
}

CONFIGS = (
    Config(block_m=32, block_n=64, num_warps=WARPS, num_stages=STAGES),
    Config(block_m=64, block_n=64, num_warps=WARPS, num_stages=STAGES),
)

_SMALL, _LARGE = CONFIGS
_BUILDS = {
    KEYS: ((_LARGE, "float16", 128), (_SMALL, "bfloat16", 96)),
    ROWS: ((_LARGE, "float16", 128), (_SMALL, "bfloat16", 96)),
    KEYS_ATOMIC: ((_SMALL, "float16", 128), (_SMALL, "bfloat16", 96)),
}

SUPPORT = replace(split_q.VARIANT.support, head_dims=HEAD_DIMS, storages=(STRIDED,))

NUMERICS = GradientNumerics(
    products=GradientProducts(operands="input", instruction="mma.sync"),
    softmax=GradientSoftmax(exp="ex2.approx", probability="input"),
    score_gradient=ScoreGradient(dtype="input"),
    sums=GradientSums(block_m=0, block_n=0, group="float32", roundings=1),
)


def _variant(name: str, walks: Walks, gradients: GradientNumerics) -> Variant:
    return Variant(
        name=name,
        family="cute",
        backward=walks.backward,
        saved_by=split_q.VARIANT,
        configs=walks.configs,
        support=walks.support,
        gradients=gradients,
        contract=Contract(deterministic_backward=not walks.atomic),
        backward_workspace=walks.workspace,
        available=available,
        compilable=compilable,
        builds=partial(builds, walks.names),
        head_dim_buckets=HEAD_DIMS,
    )


VARIANT = _variant(
    "cute-flash-backward",
    Walks(names=(KEYS, ROWS), configs=CONFIGS, support=SUPPORT),
    NUMERICS,
)
ATOMIC = _variant(
    "cute-flash-backward-atomic",
    Walks(names=(KEYS_ATOMIC,), configs=CONFIGS[:1], support=SUPPORT),
    replace(NUMERICS, sums=replace(NUMERICS.sums, block_n=None, atomics=("dq",))),
)
VARIANTS = [VARIANT, ATOMIC]

WITNESS = (
    {
        "case": (
            "cute-flash-backward:m32n64w4s2:gradients:hq=2,sq=427,skv=427,d=64,dtype=bfloat16,"
            "mask=window.5000.inf,scale=4.0,dist=subnormals,seed=89"
        ),
        "tensor": "dq",
        "r": 0.993,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "cute-flash-backward-atomic:m32n64w4s2:gradients:hq=2,sq=427,skv=427,d=64,"
            "dtype=bfloat16,mask=window.5000.inf,scale=4.0,dist=subnormals,seed=89"
        ),
        "tensor": "dq",
        "r": 0.993,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
