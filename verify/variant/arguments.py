"""What a kernel is called with, and how it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from references.masks import Mask
from references.score_mods import ScoreMod, cap_of
from references.tensor import Tensor
from verify.variant.config import Config

Workspace = dict[str, Tensor]

STRIDED = "strided"
"""The storage that every kernel takes for Q and outputs, and for K and V unless it says
otherwise."""


class Unsupported(Exception):  # noqa: N818 - a refusal is not an error of the kernel
    """What a kernel raises for an input outside its support, before it touches any buffer; names
    the argument."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason


@dataclass(frozen=True)
class Descales:
    """float32 factors of quantised inputs: the attention is that of q * descale_q, k * descale_k
    and v * descale_v.

    Their shapes are those of `quantisation`, a word of `Support.descalings`.  "head": (batch,
    heads_kv), as FlashAttention-3 has it: a query head takes the factor of its key head's group.
    "tensor": the same, with strides of 0: one factor is stored for all.  "block64" and "block128":
    q (batch, heads_q, blocks of queries), k and v (batch, heads_kv, blocks of keys), with 64 or 128
    rows in a block, but for the last one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    quantisation: str = "head"


@dataclass(frozen=True)
class Stored:
    """A tensor that is no strided view: what its storage hands over in place of it.

    word: the storage, as `Support.storages` lists it.
    name: the storage with its parameters, as case ids show it.
    tensors: by the storage's names for them, on the device of q.
    holds: those of "q", "k" and "v" that can lie so; the others are strided beside it.
    """

    word: str
    name: str
    tensors: Mapping[str, Tensor]
    holds: tuple[str, ...] = ("k", "v")


class Held(Protocol):
    """A tensor that is not strided: `Stored`, or what a problem says of it."""

    @property
    def word(self) -> str: ...
    @property
    def holds(self) -> tuple[str, ...]: ...


def storages_of(stored: Mapping[str, Held]) -> dict[str, str]:
    """The kind of storage of q, k and v, by its word.

    stored: those that are not strided.  A tensor that is missing in the result is strided because
    the storage of another cannot hold it.
    """
    words = {}
    for name in ("q", "k", "v"):
        if name in stored:
            words[name] = stored[name].word
        elif all(name in held.holds for held in stored.values()):
            words[name] = STRIDED
    return words


@dataclass(frozen=True)
class AttentionArgs:
    """What a kernel gets: q (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_kv,
    head_dim) and v (the same with head_dim_v), with any strides; `softmax_scale` may be zero or
    negative; `score_mod` None means none; `descales` come with quantised inputs, or are None;
    `output_scale` is what O is multiplied by before it is rounded to 8 bits and saturates, and 1
    for wider outputs (`references.output_scale`).

    stored: those of "q", "k" and "v" that are not strided.  Such a tensor is here twice: its field
    has its shape and dtype and no memory (device "meta"), and what there is to read is in `stored`.

    Never the Problem: no seed, no distribution, no name of the test.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    softmax_scale: float
    score_mod: ScoreMod | None
    config: Config
    descales: Descales | None = None
    stored: Mapping[str, Stored] = field(default_factory=dict)
    output_scale: float = 1.0

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads_q(self) -> int:
        return self.q.shape[1]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[1]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[2]

    @property
    def seqlen_kv(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3]

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).removeprefix("torch.")

    @property
    def scale(self) -> float:
        return self.softmax_scale

    @property
    def softcap(self) -> float:
        """The cap of a softcap; 0 where the score mod is none."""
        return cap_of(self.score_mod)

    @property
    def descaling(self) -> str:
        return "none" if self.descales is None else self.descales.quantisation

    @property
    def storages(self) -> dict[str, str]:
        """As `storages_of`."""
        return storages_of(self.stored)


@dataclass(frozen=True)
class Saved:
    """What a forward left for its backward, raw: out (batch, heads_q, seqlen_q, head_dim_v) and the
    LSE by its contract."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Where a backward writes: dq, dk and dv, shaped like q, k and v and in their dtype, with any
    strides."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    def by_name(self) -> dict[str, Tensor]:
        """The three, as "dq", "dk" and "dv"."""
        return {"dq": self.dq, "dk": self.dk, "dv": self.dv}

    def copy_(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write these results, as a kernel does that allocates its own."""
        self.dq.copy_(dq)
        self.dk.copy_(dk)
        self.dv.copy_(dv)


def default_dtype_out(dtype: str) -> str:
    """The dtype of O unless a problem says otherwise: that of the inputs, or bfloat16 for 8-bit
    ones."""
    return "bfloat16" if dtype.startswith("float8") else dtype
