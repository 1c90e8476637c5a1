"""FlashAttention-2 backward in Triton: dQ, dK and dV from the O and LSE that `flash_forward` saved.

Three kernels (Dao, arXiv 2307.08691, algorithm 2, with dQ in a kernel of its own instead of atomic
adds; `ATOMIC` has these):

    delta = rowsum(dO O)                            in fp32, into a workspace
    for a block of keys, over the rows of every query head of the group that see one of them:
        x  = (softmax_scale log2 e) (q . k)         one fp32 product per score, as in the forward
        P  = 2^(x - lse log2 e)                     dV += round(P)^T dO
        dS = P (dO V^T - delta)                     dK += round(dS)^T Q
    for a block of rows, over the keys that they see: the same dS, dQ += round(dS) K

round() is to the inputs' dtype.  Every sum is one fp32 chain in a fixed order, that of dK and dV
through all heads of the group, so that the result repeats bit for bit; dQ and dK are multiplied by
softmax_scale once, at the end.  The block of keys is computed transposed, K Q^T and V dO^T: P^T and
dS^T then lie in registers as the next products take them.

`ATOMIC` forms dQ in the second kernel: it adds softmax_scale round(dS) K of each block of keys to
fp32 sums in memory, in no fixed order, which are rounded at the end.  `PRESCALED` multiplies K by
softmax_scale log2 e and rounds it to the inputs' dtype, as Triton's tutorial does: x is then the
product alone, and dQ += round(dS) K times ln 2.

Compiled without fp fusion, as the forward is: fused, x - lse log2 e would hold another x than that
whose sum the LSE is.

Masks, buckets and the aligned bit are the forward's.  Blocks that are seen whole come first and
need no mask, then the blocks at the edges; in a table of intervals every block counts as an edge,
and a block of keys looks up first which rows see it.  Rows that see no key of a block are not
loaded there, nor are keys in front of the first or behind the last that a row of a tile sees, so
padding may hold NaN; where the mask hides a pair, P and dS are set to 0, so that what lies there
enters a sum as 0 times a number that the contract has finite.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.masks import mask_build, mask_tables
from kernels.triton import family, flash_forward
from kernels.triton.common import (
    BUCKETS,
    LOG2_E,
    Blocks,
    Launch,
    counts,
    head_dim_bucket,
    head_dims,
    is_aligned,
    steps,
)
from kernels.triton.compile import arguments, binary, expected, meta
from kernels.triton.flash_backward_kernels import (
    HOPPER,
    Use,
    effective_blocks,
    key_value_gradients,
    key_value_gradients_aligned,
    query_gradients,
    query_gradients_aligned,
    row_sums,
    row_sums_aligned,
)
from verify.variant import (
    AttentionArgs,
    Binary,
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
    Variant,
    Workspace,
    arch_named,
)

_DELTA_ROWS = 32  # rows per program of the first kernel


@dataclass(frozen=True)
class Mode:
    """atomic: dQ is added up in memory.  prescaled: K is multiplied by the scale before the
    products."""

    atomic: bool = False
    prescaled: bool = False


def launches(
    args: AttentionArgs,
    saved: Saved,
    dout: Tensor,
    gradients: Gradients,
    workspace: Workspace,
    mode: Mode,
    capability: int | None = None,
) -> list[Launch]:
    """How the kernels are launched, in their order, on a device of that major capability; raises
    `Unsupported` outside SUPPORT."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    mask = mask_build(args)
    tables = mask_tables(args, mask)
    bucket = head_dim_bucket(max(args.head_dim, args.head_dim_v))
    fast = is_aligned(args, saved.out, dout, *gradients.by_name().values())
    keys, rows = (
        effective_blocks(args.config, args.dtype, bucket, fast, Use(owned, mode.atomic, capability))
        for owned in ("keys", "rows")
    )
    inputs = args.q, args.k, args.v, dout
    numbers = args.softmax_scale * LOG2_E, args.softmax_scale

    def walk(
        kernel: Any,
        tiles: Blocks,
        heads: int,
        programs: int,
        outputs: tuple[Tensor, ...],
        sums: tuple[Tensor | None, ...] = (),
    ) -> Launch:
        return Launch(
            kernel,
            args.batch * heads * programs,
            (
                *inputs,
                *outputs,
                *sums,
                saved.lse,
                workspace["delta"],
                tables,
                steps(*inputs, *outputs, aligned=fast),
                head_dims(args, aligned=fast),
                *counts(args, heads, mask),
                *numbers,
            ),
            {**tiles.keywords(mask.kind, bucket, fast), "PRESCALED": mode.prescaled},
        )

    kernels = [
        Launch(
            row_sums_aligned if fast else row_sums,
            args.batch * args.heads_q * triton.cdiv(args.seqlen_q, _DELTA_ROWS),
            (
                saved.out,
                dout,
                workspace["delta"],
                steps(saved.out, dout, aligned=fast),
                head_dims(args, aligned=fast),
                args.heads_q,
                args.seqlen_q,
            ),
            {
                "ALIGNED": fast,
                "ROWS": _DELTA_ROWS,
                "BLOCK_DV": bucket,
                "num_warps": 4,
                "enable_fp_fusion": False,
            },
        ),
        walk(
            key_value_gradients_aligned if fast else key_value_gradients,
            Blocks(keys.walked, keys.owned, keys.num_warps, keys.num_stages),
            args.heads_kv,
            triton.cdiv(args.seqlen_kv, keys.owned),
            (gradients.dk, gradients.dv),
            (workspace.get("dq_sums"),),
        ),
        walk(
            query_gradients_aligned if fast else query_gradients,
            Blocks(rows.owned, rows.walked, rows.num_warps, rows.num_stages),
            args.heads_q,
            triton.cdiv(args.seqlen_q, rows.owned),
            (gradients.dq,),
        ),
    ]
    return kernels[:2] if mode.atomic else kernels


def backward(
    mode: Mode,
    args: AttentionArgs,
    saved: Saved,
    dout: Tensor,
    gradients: Gradients,
    workspace: Workspace,
) -> None:
    """Write dQ, dK and dV from the O and natural-log LSE of `flash_forward`; raises `Unsupported`
    outside SUPPORT."""
    device = args.q.device
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    kernels = launches(args, saved, dout, gradients, workspace, mode, capability)
    if mode.atomic:
        workspace["dq_sums"].zero_()
    with torch.cuda.device_of(args.q):
        for kernel in kernels:
            kernel.run()
    if mode.atomic:
        gradients.dq.copy_(workspace["dq_sums"])


def _workspace(mode: Mode, args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
    """delta, one sum per row; in atomic mode the sums dQ, too."""
    rows = args.batch, args.heads_q, args.seqlen_q
    sums = {"dq_sums": ((*rows, args.head_dim), "float32")} if mode.atomic else {}
    return {"delta": (rows, "float32"), **sums}


def builds(mode: Mode, arch: str) -> list[Build]:
    """Both walks of each dtype by config, bucket, mask and alignment, so that each occurs, and the
    sums of rows; of the other modes the kernels that only they have."""
    found = []
    for kernel, number, dtype, head_dim, kind, aligned in _BUILDS[mode]:
        config = CONFIGS[number]
        name = (
            f"{_KERNELS[kernel]}, {config.name}, {dtype}, d {head_dim},"
            f" {kind}{'' if aligned else ', unaligned'}"
        )
        compile_ = partial(_compile, mode, kernel, config, dtype, (head_dim, kind, aligned), arch)
        budget = _SPILL_BUDGETS.get(mode, {}).get(name, {}).get(arch, 0)
        # The sums of rows multiply no matrices.
        expects = expected(dtype, aligned=aligned) if kernel else ()
        found.append(Build(name, compile_, budget, expects))
    return found


TWO_PASS = Mode()
_ATOMIC = Mode(atomic=True)
_PRESCALED = Mode(prescaled=True)

# Bytes per thread: the most of Triton 3.6 (the larger ones) and 3.7.
_SPILL_BUDGETS: dict[Mode, dict[str, dict[str, int]]] = {
    TWO_PASS: {
        "dk dv, m32n128w8s2, float32, d 64, interval, unaligned": {
            "sm_80": 2192,
            "sm_86": 1412,
            "sm_89": 1412,
            "sm_90a": 192,
            "sm_100a": 96,
            "sm_120a": 104,
        },
        "dk dv, m32n128w8s2, float16, d 128, causal": {"sm_100a": 1060},
        "dk dv, m32n128w8s2, bfloat16, d 64, window": {"sm_100a": 792},
        "dk dv, m16n64w4s2, bfloat16, d 128, interval": {"sm_100a": 172},
        "dk dv, m16n64w4s2, float16, d 64, full": {"sm_120a": 16},
        "dk dv, m64n128w8s3, float16, d 128, full": {"sm_90a": 1448, "sm_100a": 944},
        "dk dv, m64n128w8s3, bfloat16, d 64, causal": {"sm_90a": 1376, "sm_100a": 752},
    },
    _ATOMIC: {
        "dk dv, m32n128w8s2, float16, d 128, causal": {"sm_90a": 44, "sm_100a": 168},
        "dk dv, m16n64w4s2, float32, d 64, interval": {"sm_80": 32},
    },
    _PRESCALED: {
        "dk dv, m32n128w8s2, float16, d 64, causal": {"sm_80": 12, "sm_100a": 776},
        "dk dv, m16n64w4s2, bfloat16, d 128, interval": {"sm_100a": 164},
    },
}


_KERNELS = ("row sums", "dk dv", "dq")
_BUILDS = {
    TWO_PASS: (
        (0, 0, "float16", 128, "full", True),
        (0, 1, "float32", 64, "full", False),
        (1, 0, "float16", 128, "causal", True),
        (1, 0, "bfloat16", 64, "window", True),
        (1, 1, "float16", 64, "full", True),
        (1, 1, "bfloat16", 128, "interval", True),
        (1, 0, "float32", 64, "interval", False),
        (2, 0, "bfloat16", 128, "interval", True),
        (2, 0, "float16", 64, "full", True),
        (2, 1, "bfloat16", 64, "causal", True),
        (2, 1, "float16", 128, "window", False),
        (2, 1, "float32", 128, "full", True),
        (1, 2, "float16", 128, "full", True),
        (1, 2, "bfloat16", 64, "causal", True),
        (2, 2, "bfloat16", 128, "window", True),
        (2, 2, "float16", 64, "interval", True),
    ),
    _ATOMIC: (
        (1, 0, "float16", 128, "causal", True),
        (1, 0, "bfloat16", 64, "window", True),
        (1, 1, "float32", 64, "interval", True),
        (1, 1, "bfloat16", 128, "full", False),
    ),
    _PRESCALED: (
        (1, 0, "float16", 64, "causal", True),
        (1, 1, "bfloat16", 128, "interval", True),
        (2, 0, "bfloat16", 64, "full", True),
        (2, 1, "float16", 128, "window", True),
    ),
}


def _compile(
    mode: Mode, kernel: int, config: Config, dtype: str, shape: tuple[int, str, bool], arch: str
) -> Binary:
    head_dim, kind, aligned = shape
    args = arguments(config, dtype, head_dim, kind, aligned=aligned)
    out, dout, dq, dk, dv = (
        meta(tuple(x.shape), dtype, aligned=aligned)
        for x in (args.q, args.q, args.q, args.k, args.v)
    )
    workspace = {name: meta(*like) for name, like in _workspace(mode, args).items()}
    saved = Saved(out, meta(tuple(args.q.shape[:3]), "float32"))
    capability = (arch_named(arch).capability or (None,))[0]
    gradients = Gradients(dq, dk, dv)
    made = launches(args, saved, dout, gradients, workspace, mode, capability)
    return binary(made[kernel], arch)


SUPPORT = family.SUPPORT

CONFIGS = (
    Config(block_m=32, block_n=128, num_warps=8, num_stages=2),
    Config(block_m=16, block_n=64, num_warps=4, num_stages=2),
    HOPPER,
)


def _variant(
    name: str, mode: Mode, configs: tuple[Config, ...], gradients: GradientNumerics
) -> Variant:
    return Variant(
        name=name,
        family="triton",
        backward=partial(backward, mode),
        saved_by=flash_forward.VARIANT,
        configs=configs,
        further_configs=lambda: CONFIGS,
        support=SUPPORT,
        gradients=gradients,
        contract=Contract(deterministic_backward=not mode.atomic, masked_values_backward="padding"),
        backward_workspace=partial(_workspace, mode),
        builds=partial(builds, mode),
        head_dim_buckets=BUCKETS,
    )


NUMERICS = GradientNumerics(
    products=GradientProducts(operands="input"),
    softmax=GradientSoftmax(exp="ex2.approx", probability="input"),
    score_gradient=ScoreGradient(dtype="input"),
    sums=GradientSums(block_m=0, block_n=0, group="float32", roundings=1),
    # A dot takes its inner dimension from the first to the last step of an MMA, or product by
    # product, and adds to the sums so far; `inside` and `block_at` order the blocks, which have 16
    # rows, or keys, or a multiple.
    order=GradientOrder(head_dim="ascending", keys="whole_first", rows="whole_first"),
)
VARIANT = _variant("triton-flash-backward", TWO_PASS, CONFIGS, NUMERICS)
ATOMIC = _variant(
    "triton-flash-backward-atomic",
    _ATOMIC,
    CONFIGS[1:2],
    # 16 keys are the least that a program owns.
    replace(
        NUMERICS,
        sums=replace(NUMERICS.sums, block_n=16, atomics=("dq",)),
        order=replace(NUMERICS.order, keys="any"),
    ),
)
PRESCALED = _variant(
    "triton-flash-backward-prescaled",
    _PRESCALED,
    CONFIGS[:1],
    replace(NUMERICS, products=replace(NUMERICS.products, prescale="k")),
)
VARIANTS = [VARIANT, ATOMIC, PRESCALED]

WITNESS = (
    {
        "case": (
            "triton-flash-backward:m16n64w4s2:gradients:hq=2,hkv=2,sq=400,skv=400,d=210,dv=238,"
            "dtype=float16,mask=prefix.15,dist=low_rank,seed=910"
        ),
        "tensor": "dk",
        "r": 0.995,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-flash-backward:m16n64w4s2:gradients:hq=2,hkv=2,sq=400,skv=400,d=210,dv=238,"
            "dtype=float16,mask=prefix.15,dist=low_rank,seed=910"
        ),
        "tensor": "dk",
        "r": 0.995,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-flash-backward-atomic:m16n64w4s2:gradients:sq=159,skv=159,d=16,dtype=bfloat16,"
            "mask=causal.tl,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,dist=negative_lse,"
            "seed=2221096549"
        ),
        "tensor": "dq",
        "r": 0.993,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-flash-backward-atomic:m16n64w4s2:gradients:sq=159,skv=159,d=16,dtype=bfloat16,"
            "mask=causal.tl,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,dist=negative_lse,"
            "seed=2221096549"
        ),
        "tensor": "dq",
        "r": 0.992,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-flash-backward-prescaled:m32n128w8s2:gradients:sq=3,skv=127,d=29,"
            "dtype=float16,mask=lengths.1.127,scale=-0.18569533817705186,dist=subnormals,seed=108"
        ),
        "tensor": "dk",
        "r": 0.993,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-flash-backward-prescaled:m32n128w8s2:gradients:sq=3,skv=127,d=29,"
            "dtype=float16,mask=lengths.1.127,scale=-0.18569533817705186,dist=subnormals,seed=108"
        ),
        "tensor": "dk",
        "r": 0.993,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
