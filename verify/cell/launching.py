"""One launch in a kernel process: it turns the arena's buffers into an entry point's arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from references.masks import parse_mask
from references.score_mods import parse_score_mod
from verify.cell.arena import Slot, slots_from, torch_dtype
from verify.cell.breach import Breach
from verify.variant import (
    AttentionArgs,
    Config,
    Descales,
    Gradients,
    Saved,
    Stored,
    Variant,
    Workspace,
)


class _Running:
    """The code that is running.  While `kernel_code` is true, the kernel causes any exception."""

    kernel_code = True


running = _Running()


def launch(variant: Variant, message: dict[str, Any], arena: Tensor) -> None:
    """Run the entry that the message names on views of `arena`, a uint8 tensor; raises Breach where
    the variant lacks it."""
    buffers = buffers_of(message, arena)
    if variant.allocates_outputs:
        # Whatever the kernel allocates next is likely to be this memory: leave poison in it.
        for slot in message["slots"]:
            if slot["role"] == "output":
                torch.full_like(
                    buffers[slot["name"]], float("nan"), memory_format=torch.contiguous_format
                )
    prefix = "workspace."
    workspace = {
        name.removeprefix(prefix): tensor
        for name, tensor in buffers.items()
        if name.startswith(prefix)
    }
    call = bound(variant, message, buffers, workspace)
    running.kernel_code = True
    call()
    running.kernel_code = False


def bound(
    variant: Variant, message: dict[str, Any], buffers: dict[str, Tensor], workspace: Workspace
) -> Callable[[], None]:
    """The entry that the message names with its arguments; raises Breach where the variant lacks
    it."""
    args = arguments_of(message, variant, buffers)
    entry, _ = variant.entry(message["entry"])
    if entry is None:
        raise Breach(f"{variant.name} has no {message['entry']}")
    if message["entry"] == "backward":
        saved = Saved(buffers["out"], buffers["lse"])
        gradients = Gradients(buffers["dq"], buffers["dk"], buffers["dv"])
        return partial(entry, args, saved, buffers["dout"], gradients, workspace)
    return partial(entry, args, buffers["out"], buffers.get("lse"), workspace)


def buffers_of(message: dict[str, Any], arena: Tensor) -> dict[str, Tensor]:
    """Every buffer of a run by name: views of the arena, or shapes without memory where that is on
    "meta"."""

    def tensor(slot: Slot) -> Tensor:
        if arena.device.type == "meta":
            dtype = torch_dtype(slot.dtype)
            return torch.empty(0, dtype=dtype, device="meta").as_strided(slot.shape, slot.strides)
        return slot.view(arena)

    return {slot.name: tensor(slot) for slot in slots_from(message["slots"])}


def arguments_of(
    message: dict[str, Any], variant: Variant, buffers: dict[str, Tensor]
) -> AttentionArgs:
    """The arguments of the entry that the message names, its buffers by name."""
    descales = None
    if "descale_q" in buffers:
        q, k, v = (buffers[f"descale_{name}"] for name in "qkv")
        descales = Descales(q, k, v, message["descaling"])
    stored: dict[str, Stored] = {}
    logical = {name: buffers[name] for name in "qkv" if name in buffers}
    for name, held in message.get("stored", {}).items():
        tensors = {of: buffers[slot] for of, slot in held["slots"].items()}
        stored[name] = Stored(held["word"], held["name"], tensors, tuple(held["holds"]))
        dtype = torch_dtype(held["dtype"])
        logical[name] = torch.empty(held["shape"], dtype=dtype, device="meta")
    return AttentionArgs(
        **logical,
        mask=parse_mask(message["mask"]),
        softmax_scale=message["softmax_scale"],
        score_mod=parse_score_mod(message["score_mod"]) if message["score_mod"] else None,
        config=variant.config_of(message["entry"], Config.parse(message["config"])),
        descales=descales,
        stored=stored,
        output_scale=message.get("output_scale", 1.0),
    )
