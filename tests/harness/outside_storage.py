"""Two storages from outside the tree, as a user writes them in one file, and kernels that take
them, right ones and wrong ones."""

from __future__ import annotations

STORAGES = '''
"""Two storages of K and V: pages, and tiles of 16 keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from references.premises import Premise
from verify.problem.storage import Piece, Storage


@dataclass(frozen=True)
class Paged(Storage):
    """Pages of so many keys in an order of their own, and one more; a table (batch, pages)."""

    size: int = 16
    seed: int = 0
    word: ClassVar[str] = "paged"
    breaks: ClassVar[frozenset[Premise]] = frozenset({Premise.STRIDED_STORAGE})

    @property
    def name(self):
        return f"paged.{self.size}.{self.seed}"

    @classmethod
    def parse(cls, text):
        _, size, seed = text.split(".")
        return cls(int(size), int(seed))

    @classmethod
    def draw(cls, choose):
        return cls(choose.one_of((16, 1, 8, 64)), choose.seed())

    def pieces(self, shape):
        batch, heads, keys, dim = shape
        count = -(-keys // self.size)
        pool = (batch * count + 1, heads, self.size, dim)
        return {"pages": Piece.packed(pool), "table": Piece.packed((batch, count), "int32")}

    def write(self, values, views):
        pages, table = views["pages"], views["table"]
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(self.seed))
        for b in range(table.shape[0]):
            for page, part in enumerate(values[b].split(self.size, 1) if table.shape[1] else ()):
                table[b, page] = order[b * table.shape[1] + page]
                pages[table[b, page], :, : part.shape[1]] = part


@dataclass(frozen=True)
class Tiles(Storage):
    """(batch, heads, tiles, head_dim, 16): the keys of a tile lie side by side."""

    word: ClassVar[str] = "tiles"

    @property
    def name(self):
        return "tiles"

    @classmethod
    def parse(cls, text):
        return cls()

    def pieces(self, shape):
        batch, heads, keys, dim = shape
        return {"": Piece.packed((batch, heads, -(-keys // 16), dim, 16))}

    def write(self, values, views):
        for tile, part in enumerate(values.split(16, 2) if values.shape[2] else ()):
            views[""][:, :, tile, :, : part.shape[2]] = part.mT
'''

KERNELS = '''
import math

import torch

from verify.variant import Numerics, Softmax, Support, Variant


def support(*storages):
    return Support(
        dtypes=("float32",),
        head_dims=(8, 16),
        masks=("full", "causal"),
        grouped_heads=True,
        storages=storages,
    )


PAGED, TILED, PLAIN = support("paged"), support("strided", "tiles"), support("strided")


def rows(args, name, table=None):
    """All rows of K or V, those past the last key too."""
    if name not in args.stored:
        return getattr(args, name)
    held = args.stored[name].tensors
    if args.stored[name].word == "tiles":
        return held[""].mT.flatten(2, 3)
    table = held["table"] if table is None else table
    return held["pages"][table.long()].transpose(1, 2).flatten(2, 3)


def answer(args, out, lse, k, v):
    group, keys = args.heads_q // args.heads_kv, args.seqlen_kv
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = args.mask.dense(args.batch, args.heads_q, args.seqlen_q, keys)
    seen = torch.cat([seen, seen.new_ones(*seen.shape[:3], k.shape[2] - keys)], -1)
    scores = (args.q[..., None, :] * k[..., None, :, :]).sum(-1) * args.softmax_scale
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    p = torch.exp(scores - top)
    total = p.sum(-1)
    sums = (p[..., None] * v[..., None, :, :]).sum(-2)
    out.copy_(torch.where(total[..., None] == 0, 0.0, sums / total[..., None]))
    lse.copy_(top[..., 0] + total.log())


def right(args, out, lse, workspace):
    PAGED.check(args, out)
    k, v = (rows(args, name)[:, :, : args.seqlen_kv] for name in "kv")
    answer(args, out, lse, k, v)


def swaps(args, out, lse, workspace):
    PAGED.check(args, out)
    table = args.stored["v"].tensors["table"].clone()
    if table.shape[1] > 1:
        table[:, :2] = table[:, :2].flip(1)
    k, v = rows(args, "k"), rows(args, "v", table)
    answer(args, out, lse, k[:, :, : args.seqlen_kv], v[:, :, : args.seqlen_kv])


def tail(args, out, lse, workspace):
    answer(args, out, lse, rows(args, "k"), rows(args, "v"))


def scribbles(args, out, lse, workspace):
    right(args, out, lse, workspace)
    held = args.stored["k"].tensors
    if args.seqlen_kv % held["pages"].shape[2]:
        held["pages"][held["table"][0, -1].long(), :, -1] = 0.0


def tiled(args, out, lse, workspace):
    TILED.check(args, out)
    k, v = (rows(args, name)[:, :, : args.seqlen_kv] for name in "kv")
    answer(args, out, lse, k, v)


def plain(args, out, lse, workspace):
    PLAIN.check(args, out)
    answer(args, out, lse, args.k, args.v)


def careless(args, out, lse, workspace):
    out.zero_()
    lse.zero_()


VARIANTS = [
    Variant(
        name=entry.__name__,
        family="torch",
        forward=entry,
        support=declared,
        numerics=Numerics(softmax=Softmax(exp="vexp", block_n=0)),
    )
    for entry, declared in (
        *((entry, PAGED) for entry in (right, swaps, scribbles)),
        *((entry, TILED) for entry in (tiled, tail)),
        *((entry, PLAIN) for entry in (plain, careless)),
    )
]
'''
