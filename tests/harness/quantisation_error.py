"""What rounding Q, K and V to e4m3 costs, apart from what a kernel adds:
`python -m tests.harness.quantisation_error [SEQLEN HEAD_DIM]`.

The inputs are those of FlashAttention-3's accuracy test, N(0, 1) + N(0, 100) Bernoulli(0.001).
Factors are amax / 448 of a tensor, of a head or of blocks of rows; "rotated" multiplies Q and K by
one random orthogonal matrix first, which leaves O as it is.  The table gives root mean
squares of differences of O, in fp64: of the quantised inputs from the exact ones, which no judge
counts against a kernel; on a GPU also of each 8-bit kernel from the quantised inputs' O, which is
what a bound is for, and from the exact O, which is what a user sees.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from references.attention import forward
from references.definition import Attention
from references.masks import Full
from verify.variant import AttentionArgs, Descales, Stored, Variant

HEADS = 8
LARGEST = 448.0  # of e4m3
BLOCKS = {"tensor": 0, "head": 0, "block128": 128, "block64": 64}
Three = tuple[Tensor, Tensor, Tensor]


def drawn(seqlen: int, head_dim: int, device: str, seed: int = 1) -> Three:
    """q, k and v in fp32."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = 1, HEADS, seqlen, head_dim

    def one() -> Tensor:
        usual, large = (torch.randn(shape, generator=draw, device=device) for _ in range(2))
        rare = torch.rand(shape, generator=draw, device=device) < 0.001
        return usual + 10.0 * large * rare

    return one(), one(), one()


@dataclass(frozen=True)
class Quantised:
    """A tensor in e4m3 and its factors in fp32, which broadcast with it."""

    stored: Tensor
    factors: Tensor

    @property
    def exact(self) -> Tensor:
        """What it stands for, in fp64."""
        return self.stored.double() * self.factors.double()


def quantised(x: Tensor, word: str) -> Quantised:
    """x by factors of that word; seqlen must be a multiple of a block."""
    if word == "tensor":
        most = x.abs().amax().expand(x.shape[0], x.shape[1], 1, 1)
    elif word == "head":
        most = x.abs().amax((2, 3), keepdim=True)
    else:
        size = BLOCKS[word]
        blocks = x.unflatten(2, (-1, size)).abs().amax((3, 4), keepdim=True)
        most = blocks.expand(-1, -1, -1, size, -1).flatten(2, 3)
    factors = most / LARGEST
    return Quantised((x / factors).to(torch.float8_e4m3fn), factors)


def rotated(q: Tensor, k: Tensor, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Both by one random orthogonal matrix, which spreads a large element over its row."""
    draw = torch.Generator("cpu").manual_seed(seed)
    size = q.shape[3]
    turn = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64)).Q
    turn = turn.to(q.device, torch.float64)
    return (q.double() @ turn).float(), (k.double() @ turn).float()


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O in fp64."""
    return forward(q.double(), k.double(), v.double(), Attention(Full(), q.shape[3] ** -0.5)).out


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.double().square().mean().sqrt())


def _variants() -> Iterator[Variant]:
    from kernels.cute import hopper_fp8_forward as cute
    from kernels.gluon import hopper_fp8_forward as gluon
    from kernels.ptx import split_q_fp8 as ptx
    from kernels.triton import block_pointer_forward, fp8_forward, fp8_transposed_forward

    yield block_pointer_forward.FP8_VARIANT
    for module in (fp8_forward, fp8_transposed_forward, gluon, cute, ptx):
        yield from getattr(module, "VARIANTS", None) or [module.VARIANT]


def as_stored(made: Quantised, word: str) -> Tensor:
    """The factors as a kernel gets them: (batch, heads), or (batch, heads, blocks)."""
    size = BLOCKS[word]
    return made.factors[:, :, ::size, 0] if size else made.factors[:, :, 0, 0]


def of_kernel(variant: Variant, inputs: tuple[Quantised, ...], word: str) -> Tensor:
    """O of a kernel, in bf16."""
    q, k, v = (each.stored for each in inputs)
    factors = (as_stored(each, word).float() for each in inputs)
    args = AttentionArgs(q, k, v, Full(), q.shape[3] ** -0.5, None, variant.configs[0])
    args = replace(args, descales=Descales(*factors, word))
    if "transposedv" in variant.support.storages:
        columns = v.mT.contiguous()
        args = replace(
            args, stored={"v": Stored("transposedv", "transposedv", {"": columns}, ("v",))}
        )
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device)
    assert variant.forward is not None
    variant.forward(args, out, lse, {})
    return out


def main(seqlen: int = 2048, head_dim: int = 128) -> None:
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = drawn(seqlen, head_dim, device)
    wanted = exact(*inputs)
    print(f"{HEADS} heads, {seqlen} keys, head dim {head_dim}; rms of O {rms(wanted):.2e}\n")
    print("| factors by | O from | rms from the exact O | from that of the quantised inputs |")
    print("|---|---|---:|---:|")
    for word in BLOCKS:
        for q, k, about in ((*inputs[:2], word), (*rotated(*inputs[:2]), f"{word}, rotated")):
            made = tuple(map(partial(quantised, word=word), (q, k, inputs[2])))
            ideal = exact(*(each.exact for each in made))
            print(f"| {about} | fp64 | {rms(ideal - wanted):.1e} | 0 |")
            for variant in _variants() if device == "cuda" and about == word else ():
                absent = variant.available() if variant.available is not None else None
                if word in variant.support.descalings and absent is None:
                    out = of_kernel(variant, made, word)
                    off = f"{rms(out - wanted):.1e} | {rms(out - ideal):.1e}"
                    print(f"| {word} | {variant.name} | {off} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
