"""What was tried for the speed of the forwards: configs, options of the compiler, edits of a text.
`speed_rounds` times it.

Nothing here is judged: a config or an edit that wins becomes one of its kernel and is judged there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType

import torch
from torch import Tensor

from kernels.cute import flash_forward as cute_flash
from kernels.cute import hopper_forward as cute_hopper
from kernels.cute import hopper_fp8_forward as cute_fp8
from kernels.gluon import cluster, hopper_cluster_forward
from kernels.gluon import hopper_forward as gluon_hopper
from kernels.gluon import hopper_fp8_forward as gluon_fp8
from kernels.triton import (
    block_pointer_forward,
    descriptor_forward,
    flash_forward,
    fp8_forward,
    fp8_transposed_forward,
)
from kernels.triton.common import Launch
from references.masks import Causal, Full
from tests.harness import speed_edits as edits
from tests.harness import speed_gluon
from verify.cuda.edits import Edit
from verify.variant import AttentionArgs, Config, Stored, Variant

SHAPES = {64: (1, 8, 8192, 64), 128: (1, 32, 8192, 128)}
Call = Callable[[], None]


@dataclass
class Inputs:
    """Tensors of one head dim on the device, and the mask."""

    head_dim: int
    seqlen: int | None = None  # in the place of the shape's
    causal: bool = False
    device: str = "cuda"

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in fp16."""
        torch.manual_seed(1)
        batch, heads, seqlen, dim = SHAPES[self.head_dim]
        shape = batch, heads, self.seqlen or seqlen, dim
        q, k, v = (torch.randn(shape, device=self.device).half() for _ in range(3))
        return q, k, v

    @cached_property
    def narrow(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in e4m3."""
        q, k, v = (x.to(torch.float8_e4m3fn) for x in self.wide)
        return q, k, v

    @cached_property
    def columns(self) -> Tensor:
        """V of `narrow`, stored transposed."""
        return self.narrow[2].mT.contiguous()

    @cached_property
    def out(self) -> Tensor:
        return torch.empty_like(self.wide[0])

    @cached_property
    def lse(self) -> Tensor:
        return torch.empty(self.wide[0].shape[:3], device=self.device)

    def args(self, config: Config, *, eight: bool = False, columns: bool = False) -> AttentionArgs:
        q, k, v = self.narrow if eight or columns else self.wide
        stored: Mapping[str, Stored] = {}
        if columns:
            word = fp8_transposed_forward.STORAGE
            stored = {"v": Stored(word, word, {"": self.columns}, ("v",))}
        scale = self.head_dim**-0.5
        mask = Causal() if self.causal else Full()
        return AttentionArgs(q, k, v, mask, scale, None, config, stored=stored)


@dataclass(frozen=True)
class Trial:
    """make: the call on some inputs.  wrong: an ablation, whose O is not attention."""

    label: str
    make: Callable[[Inputs], Call]
    wrong: bool = False


def config(rows: int, keys: int, warps: int, stages: int, **options: int) -> Config:
    """A config by its numbers."""
    chosen = tuple(options.items())
    return Config(block_m=rows, block_n=keys, num_warps=warps, num_stages=stages, options=chosen)


# Triton.


def _launched(make: Callable[[Inputs], Launch], **keywords: object) -> Callable[[Inputs], Call]:
    def call(inputs: Inputs) -> Call:
        launch = make(inputs)
        return replace(launch, keywords=launch.keywords | keywords).run

    return call


def _pointers(one: Config, **keywords: object) -> Trial:
    words = "".join(f" {name}={value}" for name, value in keywords.items())
    make = _launched(lambda i: flash_forward.launch(i.args(one), i.out, i.lse), **keywords)
    return Trial(f"pointers {one.name}{words}", make)


def _descriptors(host: bool, one: Config) -> Trial:
    def call(inputs: Inputs) -> Call:
        args = inputs.args(one)
        return partial(descriptor_forward.forward, host, args, inputs.out, inputs.lse, {})

    return Trial(f"{'host' if host else 'device'} descriptors {one.name}", call)


def _block_pointers(one: Config) -> Trial:
    make = _launched(lambda i: block_pointer_forward.launch(i.args(one), i.out, i.lse))
    return Trial(f"block pointers {one.name}", make)


def _triton_fp8(one: Config, **keywords: object) -> Trial:
    words = "".join(f" {name}={value}" for name, value in keywords.items())
    make = _launched(
        lambda i: fp8_forward.launch(i.args(one, eight=True), i.out, i.lse, widen=False), **keywords
    )
    return Trial(f"V by rows {one.name}{words}", make)


def _transposed(promotion: int | str, one: Config, **keywords: object) -> Trial:
    words = "".join(f" {name}={value}" for name, value in keywords.items())
    make = _launched(
        lambda i: fp8_transposed_forward.launch(
            promotion,
            fp8_transposed_forward.SUPPORT,
            i.args(one, columns=True),
            i.out,
            i.lse,
            widen=False,
        ),
        **keywords,
    )
    return Trial(f"V by columns, promoted {promotion}, {one.name}{words}", make)


GRID = [
    config(rows, keys, warps, stages)
    for rows, keys, warps in ((128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 128, 4))
    for stages in (2, 3)
]


def _triton() -> Iterator[Trial]:
    yield from map(_pointers, dict.fromkeys((*flash_forward.VARIANT.configs, *GRID[1:])))
    yield _pointers(GRID[0], enable_fp_fusion=True)
    yield _pointers(config(64, 64, 4, 4))
    for host in (True, False):
        for one in (*descriptor_forward.CONFIGS, *GRID[1:8]):
            made = one if one.options else replace(one, options=(("registers", 0),))
            yield _descriptors(host, made)
    yield from map(_block_pointers, block_pointer_forward.CONFIGS[:2])


def _triton_8() -> Iterator[Trial]:
    yield from map(_pointers, flash_forward.VARIANT.configs)
    yield from map(_triton_fp8, (*fp8_forward.VARIANT.configs, *GRID[1:]))
    for one in (GRID[0], GRID[2]):
        yield _triton_fp8(one, WIDEN=True)
    for promotion in (32, "block"):
        for one in GRID:
            yield _transposed(promotion, one)


# Gluon.


def _gluon() -> Iterator[Trial]:
    """Two CTAs, too, where this Triton has clusters."""
    further = [config(64, 128, 4, 2), config(64, 64, 4, 4), config(128, 64, 8, 3)]
    for one in (*gluon_hopper.CONFIGS, *further):
        yield _of_gluon("Hopper", gluon_hopper.forward, one)
    if cluster.unavailable() is None:
        for one in hopper_cluster_forward.VARIANT.configs:
            yield _of_gluon("two CTAs", hopper_cluster_forward.forward, one)


def _of_gluon(label: str, forward: Callable[..., None], one: Config) -> Trial:
    def call(inputs: Inputs) -> Call:
        return partial(forward, inputs.args(one), inputs.out, inputs.lse, {})

    return Trial(f"{label} {one.name}", call)


def _gluon_8() -> Iterator[Trial]:
    """Beside the 16-bit forward that it is to outrun."""
    yield _of_gluon("16 bits", gluon_hopper.forward, gluon_hopper.TURNSTILE[0])
    for one in (gluon_fp8.VARIANT.configs[0], config(64, 128, 4, 3)):
        yield Trial(f"as shipped, {one.name}", partial(_eight, gluon_fp8, one))
        for label in speed_gluon.EDITS:
            copy = speed_gluon.COPIES.copy_of(label)
            yield Trial(f"{label}, {one.name}", partial(_eight, copy, one))


def _eight(module: ModuleType, one: Config, inputs: Inputs) -> Call:
    run: Call = module.launch(inputs.args(one, columns=True), inputs.out, inputs.lse).run
    return run


# CuTe.


def _cute(
    shipped: Variant,
    label: str,
    one: Config,
    changes: tuple[Edit, ...] = (),
    *,
    wrong: bool = False,
    shared_bytes: int = 0,
) -> Trial:
    def call(inputs: Inputs) -> Call:
        family = edits.family_of(shipped, one, changes, shared_bytes)
        args = inputs.args(one, eight="fp8" in shipped.name)
        return partial(family.forward, args, inputs.out, inputs.lse, {})

    return Trial(f"{label} {one.name}", call, wrong)


def _cute_flash() -> Iterator[Trial]:
    make = partial(_cute, cute_flash.VARIANT)
    for one in cute_flash.CONFIGS:
        yield make("as it is", one)
        yield make("Q stays in registers", one, edits.QUERIES_STAY)
        yield make("lazy rescale", one, edits.rescale(lazy=True))
        for number in (2, 3, 4):
            room = edits.blocks_of_a_multiprocessor(number)
            yield make(f"room for {number} blocks", one, room)
        yield make("no exponentials", one, edits.NO_EXPONENTIALS, wrong=True)
        yield make("two blocks on a multiprocessor", one, shared_bytes=80 << 10)
    two = edits.blocks_of_a_multiprocessor(2)
    yield make("other blocks, room for 2,", config(64, 128, 4, 2), two)


def _cute_d64() -> Iterator[Trial]:
    make = partial(_cute, cute_flash.VARIANT_D64)
    (one,) = cute_flash.CONFIGS_D64
    yield make("as it is", one)
    yield make("O is always rescaled", one, edits.rescale(lazy=False))
    yield make("Q stays in registers", one, edits.QUERIES_STAY)
    yield make("no exponentials", one, edits.NO_EXPONENTIALS, wrong=True)


def _cute_8() -> Iterator[Trial]:
    overlap = cute_hopper.CONFIGS[3]
    yield _cute(cute_hopper.VARIANT, "fp16", overlap)
    yield _cute(cute_hopper.VARIANT, "fp16", cute_hopper.CONFIGS[1])
    for one in cute_fp8.CONFIGS:
        yield _cute(cute_fp8.PROMOTED, "promoted", one)
        yield _cute(cute_fp8.UNPROMOTED, "never promoted", one)
    make = partial(_cute, cute_fp8.PROMOTED)
    for one in cute_fp8.CONFIGS[1:]:
        for of in (2, 4, 8):
            yield make(
                f"one in {of} exponentials by polynomial", one, edits.polynomial_exponentials(of)
            )
        yield make("lazy rescale", one, edits.LAZY_RESCALE)
        yield make("no exponentials", one, edits.NO_EXPONENTIALS_8, wrong=True)
        yield make("no transposition", one, edits.NO_TRANSPOSITION, wrong=True)
        yield make("no conversion of P", one, edits.NO_CONVERSION, wrong=True)
        nothing = (*edits.NO_EXPONENTIALS_8, *edits.NO_TRANSPOSITION, *edits.NO_CONVERSION)
        yield make("none of the three", one, nothing, wrong=True)


GROUPS: dict[str, tuple[Callable[[], Iterator[Trial]], tuple[int, ...]]] = {
    "triton": (_triton, (64, 128)),
    "triton-fp8": (_triton_8, (64, 128)),
    "gluon": (_gluon, (64, 128)),
    "gluon-fp8": (_gluon_8, (64, 128)),
    "cute": (_cute_flash, (64, 128)),
    "cute-d64": (_cute_d64, (64,)),
    "cute-fp8": (_cute_8, (128,)),
}
