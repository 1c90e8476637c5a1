"""The declared order of the Triton backward's blocks; `python -m
tests.meta.kernels.triton_backward_order` prints what its runs need, where Triton interprets.

dV adds up rows that cancel between the first two blocks, and then small ones.  A kernel that takes
the first block last adds these to a large sum, which loses them.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.triton import flash_backward, flash_backward_kernels, tiles
from references.attention import Attention
from references.attention import forward as reference
from verify.cell.triton_interpreter import repair
from verify.judging.lattice import explained
from verify.problem import Problem
from verify.tolerance.backward import gradient_truth, resolve
from verify.variant import AttentionArgs, GradientOrder, Gradients, Saved

_STEP = 16  # rows of a block of the second config


@triton.jit
def first_block_last(walk, i, EDGE: tl.constexpr):
    """`tiles.block_at` of another kernel: the whole blocks but the first, then that."""
    found = tiles.block_at(walk, i, EDGE)
    if not EDGE:
        found = tl.where(found + 1 < walk[2], found + 1, walk[1])
    return found


def needed() -> list[float]:
    """The parts of what is known of dV that the kernel needs, that one of another order needs, and
    that this one needs if no order is declared."""
    problem = Problem.parse("sq=1536,skv=16,d=16,scale=1.0,dtype=float16")
    variant, config = flash_backward.VARIANT, flash_backward.CONFIGS[1]
    shapes = problem.shape_q, problem.shape_k, problem.shape_v, problem.shape_out
    q, k, v, dout = (torch.zeros(shape, dtype=torch.float16) for shape in shapes)
    dout.fill_(0.9 * 2.0**-13)
    dout[..., :_STEP, :] = 2304.0
    dout[..., _STEP : 2 * _STEP, :] = -2304.0
    exact = reference(q, k, v, Attention(problem.mask, problem.scale))
    saved = Saved(exact.out.half(), exact.lse.float())
    args = AttentionArgs(q, k, v, problem.mask, problem.scale, None, config)
    assert variant.gradients is not None
    assert variant.backward is not None
    assert variant.backward_workspace is not None
    undeclared = replace(variant.gradients, order=GradientOrder())
    found = []
    for walked, numerics in (
        (tiles.block_at, variant.gradients),
        (first_block_last, variant.gradients),
        (first_block_last, undeclared),
    ):
        flash_backward_kernels.block_at = walked
        made = Gradients(*(torch.empty_like(x) for x in (q, k, v)))
        workspace = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in variant.backward_workspace(args).items()
        }
        variant.backward(args, saved, dout, made, workspace)
        a = resolve(numerics, config, problem, "sm_90")
        truth = gradient_truth(problem, q, k, v, dout, saved.out, saved.lse.double(), a)
        assert truth.intervals is not None
        span = truth.intervals["dv"]
        found.append(float(explained(made.dv, span.middle, span.reach, problem.format).max()))
    return found


if __name__ == "__main__":
    repair()
    torch.set_num_threads(1)
    print(json.dumps(needed()), flush=True)
