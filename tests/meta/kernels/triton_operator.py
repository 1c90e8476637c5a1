"""`python -m tests.meta.kernels.triton_operator` checks the torch operator where Triton
interprets."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.triton import flash_backward, flash_forward
from kernels.triton.attention_op import flash_attention, flash_attention_backward
from references.masks import parse_mask
from verify.cell.triton_interpreter import repair
from verify.variant import AttentionArgs, Gradients, Saved


def main() -> None:
    """Raise where the operator is not what torch asks for, or not its kernels'."""
    repair()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2, heads, length, dim, generator=generator, dtype=torch.float16)
        for heads, length, dim in ((4, 21, 32), (2, 30, 32), (2, 30, 16), (4, 21, 16))
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(flash_attention, (*inputs, "lengths.20_7.30_0", 0.3))

    out, lse = flash_attention(*inputs, mask="causal")
    assert not lse.requires_grad
    found = torch.autograd.grad(out, inputs, dout)
    saved = Saved(torch.empty_like(out), torch.empty_like(lse))
    expected = Gradients(*(torch.empty_like(x) for x in inputs))
    args = AttentionArgs(
        *(x.detach() for x in inputs),
        mask=parse_mask("causal"),
        softmax_scale=32**-0.5,
        score_mod=None,
        config=flash_forward.VARIANT.configs[0],
    )
    flash_forward.forward(args, saved.out, saved.lse, {})
    assert torch.equal(out, saved.out)
    assert torch.equal(lse, saved.lse)
    args = replace(args, config=flash_backward.HOPPER)
    flash_backward.backward(
        flash_backward.TWO_PASS, args, saved, dout, expected, {"delta": torch.empty_like(lse)}
    )
    assert all(map(torch.equal, found, expected.by_name().values()))
    (of_sum,) = torch.autograd.grad(flash_attention(*inputs)[0].sum(), inputs[2])  # expanded dO
    assert of_sum.shape == v.shape
    detached = [x.detach() for x in (dout, *inputs, out, lse)]
    torch.library.opcheck(flash_attention_backward, (*detached, "causal", None))


if __name__ == "__main__":
    main()
