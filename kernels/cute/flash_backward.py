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

The walks are one source, flash_backward.cu: a block of four warps owns a tile of block_n keys (or
rows) and walks over the rows (or keys) in steps of block_m.  Keys are owned transposed, K Q^T and
V dO^T: P^T and dS^T then lie in registers as the next products take them.  A mask is a band between
two diagonals or a table of intervals, and both are plain arguments: one build takes every mask.
docs/cute.md draws the layouts and the pipeline.

Registers hold fp32 sums of 64 keys by at most 256 columns.  So above head dim 128 dV and dK have
walks of their own, which form the same P twice; the order of every sum is the same.  There a step
has 32 rows whatever the config says, and one stage where two do not fit every architecture.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.cuda.family import LOG2_E, Launch, Strided, check_config, check_room, loaded
from kernels.cute import flash_forward
from kernels.cute.family import (
    ELEMENTS,
    HEAD_DIMS,
    STAGES,
    SUPPORT,
    WARPS,
    available,
    compilable,
)
from kernels.cute.flash_backward_walks import (
    KEYS,
    KEYS_ALONE,
    KEYS_ALONE_ATOMIC,
    KEYS_ATOMIC,
    ROWS,
    VALUES_ALONE,
    WIDE,
    Walk,
    sums_launch,
    walk_launch,
)
from kernels.masks import MaskBuild, mask_build, mask_tables
from verify.cuda.compile import build_of, device_arch
from verify.cuda.compile import launch as launch_kernel
from verify.variant import (
    AttentionArgs,
    Build,
    Config,
    Contract,
    GradientNumerics,
    GradientOrder,
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


@dataclass(frozen=True, kw_only=True)
class Walks:
    """A variant's kernels behind the sums of rows, in their order, and what it is launched with.

    narrow, wide: for head dims up to `WIDE`, and above.
    make: the launch of a walk, a config, a dtype and a head dim.
    """

    narrow: tuple[Walk, ...]
    wide: tuple[Walk, ...]
    configs: tuple[Config, ...]
    support: Support
    make: Callable[[Walk, Config, str, int], Launch] = walk_launch

    @property
    def atomic(self) -> bool:
        """Whether dQ is added up in memory."""
        return any(walk.atomic for walk in self.narrow)

    def of(self, head_dim: int) -> tuple[Walk, ...]:
        """Those for a head dim."""
        return self.wide if head_dim > WIDE else self.narrow

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
        for walk in self.of(args.head_dim):
            launch = self.make(walk, args.config, args.dtype, args.head_dim)
            found.append(step(launch, arguments, keys if walk.keys else queries))
        return [each for each in found if each.blocks]

    def workspace(self, args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
        """delta, one sum per row; and the sums dQ, if they are added up in memory."""
        rows = args.batch, args.heads_q, args.seqlen_q
        sums = {"dq_sums": ((*rows, args.head_dim), "float32")} if self.atomic else {}
        return {"delta": (rows, "float32"), **sums}


def builds(walks: Walks, arch: str) -> list[Build]:
    """For Hopper two builds of each walk on either side of `WIDE`, in which every config and dtype
    occurs and pieces of both widths; elsewhere the first of them, which is the largest.

    The code is the same for every architecture, only ptxas differs, and one build takes as long as
    hundreds of other kernels'.
    """
    capability = arch_named(arch).capability
    if capability is None or capability < SUPPORT.capability:
        return []
    found = []
    for walk, config, dtype, head_dim in choices(walks, arch):
        made = walk_launch(walk, config, dtype, head_dim)
        name = name_of(walk, config, dtype, head_dim)
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


def choices(walks: Walks, arch: str) -> list[tuple[Walk, Config, str, int]]:
    """What builds are made for: a walk, a config, a dtype and a head dim."""
    count = 2 if arch == "sm_90a" else 1
    narrow = [(walk, *choice) for walk in walks.narrow for choice in _narrow(walk)[:count]]
    return narrow + [(walk, *choice) for walk in walks.wide for choice in _WIDE_BUILDS[:count]]


def _narrow(walk: Walk) -> tuple[tuple[Config, str, int], ...]:
    return ((_SMALL if walk.atomic else _LARGE, "float16", 128), (_SMALL, "bfloat16", 96))


def name_of(walk: Walk, config: Config, dtype: str, head_dim: int) -> str:
    """The name of a build."""
    return f"{walk.name}, {config.name}, {dtype}, d {head_dim}"


# Bytes per thread, by the name of a build.
SPILL_BUDGETS: dict[str, dict[str, int]] = {
    "key_value_gradients, m64n64w4s2, float16, d 128": {
        "sm_80": 32,
        "sm_86": 28,
        "sm_89": 28,
        "sm_90a": 40,
    },
    "query_gradients, m32n64w4s2, float16, d 256": {"sm_100a": 56, "sm_120a": 152},
}

CONFIGS = (
    Config(block_m=32, block_n=64, num_warps=WARPS, num_stages=STAGES),
    Config(block_m=64, block_n=64, num_warps=WARPS, num_stages=STAGES),
)

_SMALL, _LARGE = CONFIGS
_WIDE_BUILDS = ((_SMALL, "float16", 256), (_SMALL, "bfloat16", 160))

NUMERICS = GradientNumerics(
    products=GradientProducts(operands="input", instruction="mma.sync"),
    softmax=GradientSoftmax(exp="ex2.approx", probability="input"),
    score_gradient=ScoreGradient(dtype="input"),
    sums=GradientSums(block_m=0, block_n=0, group="float32", roundings=1),
    # `multiply` takes one k-step of 16 after another, and a walk one block after another.
    order=GradientOrder(head_dim="ascending", keys="ascending", rows="ascending"),
)


def _variant(name: str, walks: Walks, gradients: GradientNumerics) -> Variant:
    return Variant(
        name=name,
        family="cute",
        backward=walks.backward,
        saved_by=flash_forward.VARIANT,
        saved_config=flash_forward.CONFIGS[1],  # which fits every architecture
        configs=walks.configs,
        support=walks.support,
        gradients=gradients,
        contract=Contract(deterministic_backward=not walks.atomic),
        backward_workspace=walks.workspace,
        available=available,
        compilable=compilable,
        builds=partial(builds, walks),
        head_dim_buckets=HEAD_DIMS,
    )


VARIANT = _variant(
    "cute-flash-backward",
    Walks(
        narrow=(KEYS, ROWS),
        wide=(VALUES_ALONE, KEYS_ALONE, ROWS),
        configs=CONFIGS,
        support=SUPPORT,
    ),
    NUMERICS,
)
ATOMIC = _variant(
    "cute-flash-backward-atomic",
    Walks(
        narrow=(KEYS_ATOMIC,),
        wide=(VALUES_ALONE, KEYS_ALONE_ATOMIC),
        configs=CONFIGS[:1],
        support=SUPPORT,
    ),
    replace(
        NUMERICS,
        sums=replace(NUMERICS.sums, block_n=None, atomics=("dq",)),
        order=replace(NUMERICS.order, keys="any"),
    ),
)
VARIANTS = [VARIANT, ATOMIC]

WITNESS = (
    {
        "case": (
            "cute-flash-backward:m32n64w4s2:gradients:b=5,hq=5,hkv=5,sq=65,skv=65,d=32,"
            "dtype=bfloat16,mask=causal,dist=low_rank,seed=18584347"
        ),
        "tensor": "dq",
        "r": 0.996,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "cute-flash-backward-atomic:m32n64w4s2:gradients:b=5,hq=5,hkv=5,sq=65,skv=65,d=32,"
            "dtype=bfloat16,mask=causal,dist=low_rank,seed=18584347"
        ),
        "tensor": "dq",
        "r": 0.996,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
