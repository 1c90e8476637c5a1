"""Support: which problems a kernel claims to solve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from references.masks import Intersection, Mask, Window
from references.output_scale import DTYPES as EIGHT_BITS
from references.score_mods import ScoreMod
from references.tensor import Tensor, torch
from verify.variant.arguments import (
    STRIDED,
    AttentionArgs,
    Gradients,
    Saved,
    Unsupported,
    default_dtype_out,
)
from verify.variant.validation import (
    DESCALINGS,
    LAYOUTS,
    MASK_KINDS,
    SCALES,
    WINDOWS,
    DeclarationError,
    Declared,
)

__all__ = [
    "DESCALINGS",
    "LAYOUTS",
    "MASK_KINDS",
    "ROW_ALIGNMENT",
    "SCALES",
    "WINDOWS",
    "Shape",
    "Support",
]

ROW_ALIGNMENT = 16  # bytes: what vector loads and TMA need


def up(length: int, step: int) -> int:
    """The least multiple of the step that is no less than that length."""
    return -(-length // step) * step


def fits(window: Window, kind: str) -> bool:
    """Whether a window is of a kind out of WINDOWS."""
    one_sided = (window.left is None) != (window.right is None)
    of_kind = {
        "any": True,
        "one_sided": one_sided,
        "symmetric": window.left == window.right,
        "causal": window.right == 0,
    }
    return of_kind[kind]


class Shape(Protocol):
    """What `Support` looks at; both `AttentionArgs` and `verify.problem.Problem` have it."""

    @property
    def heads_q(self) -> int: ...
    @property
    def heads_kv(self) -> int: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def descaling(self) -> str: ...
    @property
    def storages(self) -> Mapping[str, str]: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def scale(self) -> float: ...
    @property
    def score_mod(self) -> ScoreMod | None: ...


@dataclass(frozen=True, kw_only=True)
class Support(Declared, path="support"):
    """Inside it the bounds hold; outside it the kernel raises `Unsupported` naming the argument.

    masks: words of `references.masks.mask_words()`.  "causal.square" is causal where seqlen_q ==
    seqlen_kv only (both alignments agree there); "window" covers both alignments, and
    "window.square" is it where the lengths are equal; `intersections` says whether several may be
    combined.
    windows: the sides of a window: "any"; "one_sided" if one side must be open (None) and the other
    not; "symmetric" if both must be equal; "causal" if the right one must be 0.
    grouped_heads: whether several query heads may share a key head; "only" if they must.
    cross_lengths: whether seqlen_q and seqlen_kv may differ.  longer_q: whether seqlen_q may be the
    larger one.  seqlen_q_multiple, seqlen_kv_multiple: what each length must be a multiple of.
    score_mods: words of `references.score_mods.mod_words()`, "softcap" among them.
    scales: softmax_scale may be "any", "nonzero", "positive", or only the "default" head_dim **
    -0.5.
    layouts: strided tensors, head_dim innermost, may have "any" strides besides, "aligned" ones
    (every row begins at a multiple of 16 bytes, so that head dims are multiples of as much), or
    must be "contiguous".  Rows of other storages begin there too, unless it is "any".
    storages: how q, k and v may lie in memory, by the words of `verify.problem.storage`; q may be
    strided in any case, as all outputs are, and v where the storage of k cannot hold it.
    dtypes_out: dtypes of O that may be asked for, where not the default (see `Problem.dtype_out`).
    "float8_e4m3fn" and "float8_e5m2" come with a scale (`references.output_scale`), which the
    kernel gets as `AttentionArgs.output_scale`.
    descalings: which `Descales` may come, by the words of `references.quantisation`: "none", one
    factor per "tensor", per batch and key "head", per "block64" or "block128" of a head's rows.
    capability: the least CUDA compute capability, for kernels that run on "cuda"; max_capability:
    the greatest, for those made of one generation's instructions.
    """

    dtypes: tuple[str, ...]
    head_dims: Sequence[int]
    dtypes_out: tuple[str, ...] = ()
    descalings: tuple[str, ...] = ("none",)
    masks: tuple[str, ...] = ("full", "causal")
    intersections: bool = False
    windows: str = "any"
    grouped_heads: bool | str = False
    separate_head_dim_v: bool = False
    cross_lengths: bool = True
    longer_q: bool = True
    seqlen_q_multiple: int = 1
    seqlen_kv_multiple: int = 1
    min_seqlen: int = 1
    max_seqlen: int | None = None
    scales: str = "any"
    score_mods: tuple[str, ...] = ()
    layouts: str = "any"
    storages: tuple[str, ...] = (STRIDED,)
    devices: tuple[str, ...] = ("cpu", "cuda")
    capability: tuple[int, int] = (7, 0)
    max_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for least, most in (("min_seqlen", "max_seqlen"), ("capability", "max_capability")):
            low, high = getattr(self, least), getattr(self, most)
            if high is not None and low > high:
                raise DeclarationError(f"support.{least}: {low} is more than {most}, {high}")
        step = self.common_multiple
        first = up(max(self.min_seqlen, 1), step)
        if step > 1 and self.max_seqlen is not None and first > self.max_seqlen:
            raise DeclarationError(
                f"support.max_seqlen: {self.max_seqlen} is less than {first}, the first length that"
                f" is a multiple of {step}"
            )

    @property
    def common_multiple(self) -> int:
        """The step of lengths that queries and keys can both have."""
        return math.lcm(self.seqlen_q_multiple, self.seqlen_kv_multiple)

    def has(self, capability: tuple[int, int] | None) -> bool:
        """Whether a device of that compute capability is inside; None, which no device has, is
        not."""
        if capability is None:
            return False
        return self.capability <= capability <= (self.max_capability or capability)

    def check_rows(self) -> None:
        """Raise DeclarationError if "aligned" rows are promised for head dims and dtypes whose
        packed rows are not."""
        eight = tuple(name for name in self.dtypes_out if name in EIGHT_BITS)
        aligned = (*self.dtypes, *eight) if self.layouts == "aligned" else ()
        for dtype in (dtype for dtype in aligned if hasattr(torch, dtype)):
            elements = ROW_ALIGNMENT // getattr(torch, dtype).itemsize
            narrow = [dim for dim in self.head_dims if dim % elements]
            if narrow:
                raise DeclarationError(
                    f"support.head_dims: rows of {narrow[0]} {dtype} cannot all be aligned, only of"
                    f" {elements} n"
                )

    def refusal(self, shape: Shape) -> tuple[str, str] | None:
        """(argument, reason) if that shape is outside this support, else None.  Layouts are checked
        by `check`."""
        for argument, broken, reason in self._rules(shape):
            if broken:
                return argument, reason
        return None

    def _rules(self, shape: Shape) -> list[tuple[str, bool, str]]:
        dims, lengths = (shape.head_dim, shape.head_dim_v), (shape.seqlen_q, shape.seqlen_kv)
        kind = self._mask_outside(shape)
        mod = shape.score_mod.word if shape.score_mod is not None else ""
        default = math.isclose(shape.scale, shape.head_dim**-0.5)
        return [
            (
                "dtype",
                shape.dtype not in self.dtypes,
                f"{shape.dtype} is none of {', '.join(self.dtypes)}",
            ),
            (
                "descales",
                shape.descaling not in self.descalings,
                f"{shape.descaling} is none of {', '.join(self.descalings)}",
            ),
            ("head_dim", dims[0] not in self.head_dims, f"{dims[0]} is not supported"),
            ("head_dim_v", dims[1] not in self.head_dims, f"{dims[1]} is not supported"),
            (
                "head_dim_v",
                dims[0] != dims[1] and not self.separate_head_dim_v,
                f"{dims[1]} differs from head_dim {dims[0]}",
            ),
            (
                "heads_kv",
                shape.heads_q != shape.heads_kv and not self.grouped_heads,
                "grouped heads are not supported",
            ),
            (
                "heads_kv",
                shape.heads_q == shape.heads_kv and self.grouped_heads == "only",
                f"as many key heads as query heads, {shape.heads_q}, are not supported",
            ),
            (
                "seqlen_q",
                lengths[0] < self.min_seqlen,
                f"{lengths[0]} is less than {self.min_seqlen}",
            ),
            (
                "seqlen_kv",
                lengths[1] < self.min_seqlen,
                f"{lengths[1]} is less than {self.min_seqlen}",
            ),
            (
                "seqlen_q",
                bool(lengths[0] % self.seqlen_q_multiple),
                f"{lengths[0]} is no multiple of {self.seqlen_q_multiple}",
            ),
            (
                "seqlen_kv",
                bool(lengths[1] % self.seqlen_kv_multiple),
                f"{lengths[1]} is no multiple of {self.seqlen_kv_multiple}",
            ),
            (
                "seqlen_kv",
                lengths[0] != lengths[1] and not self.cross_lengths,
                "must equal seqlen_q",
            ),
            (
                "seqlen_q",
                lengths[0] > lengths[1] and not self.longer_q,
                f"{lengths[0]} is more than seqlen_kv, {lengths[1]}",
            ),
            (
                "seqlen_kv",
                self.max_seqlen is not None and max(lengths) > self.max_seqlen,
                f"more than {self.max_seqlen}",
            ),
            ("mask", kind is not None, f"{kind} is not supported"),
            (
                "softmax_scale",
                self.scales == "default" and not default,
                "only head_dim ** -0.5 is supported",
            ),
            (
                "softmax_scale",
                self.scales == "nonzero" and shape.scale == 0,
                "0 is not supported",
            ),
            (
                "softmax_scale",
                self.scales == "positive" and shape.scale <= 0,
                f"{shape.scale} is not positive",
            ),
            (mod, mod not in ("", *self.score_mods), "is not supported"),
            *(
                (
                    f"layout_{name}",
                    word not in self.storages and (name, word) != ("q", STRIDED),
                    f"{word} storage is none of {', '.join(self.storages)}",
                )
                for name, word in shape.storages.items()
            ),
        ]

    def _mask_outside(self, shape: Shape) -> str | None:
        if isinstance(shape.mask, Intersection) and not self.intersections:
            return f"the intersection {shape.mask.name}"
        square = shape.seqlen_q == shape.seqlen_kv
        for atom in shape.mask.atoms:
            words = {atom.word, f"{atom.kind}.square"} if square else {atom.word}
            if not words & set(self.masks):
                return atom.brief
            if isinstance(atom, Window) and not fits(atom, self.windows):
                return f"{atom.brief}, a window that is not {self.windows},"
        return None

    def check(self, args: AttentionArgs, out: Tensor, **others: Tensor) -> None:
        """Raise `Unsupported` if these arguments are outside this support.  A kernel's entry point
        begins with it.

        others: further tensors whose layout matters, by name (a backward's `dout`, `dq`...).
        """
        found = self.refusal(args)
        if found is not None:
            raise Unsupported(*found)
        dtype_out = str(out.dtype).removeprefix("torch.")
        if dtype_out not in (default_dtype_out(args.dtype), *self.dtypes_out):
            raise Unsupported("dtype_out", f"{dtype_out} is not supported for {args.dtype}")
        given = {"q": args.q, "k": args.k, "v": args.v, "out": out, **others}
        for name, tensor in given.items():
            if name in args.stored:  # the other rules are for strided tensors
                pieces = args.stored[name].tensors.values()
                self._check_rows(name, [x for x in pieces if x.dtype == tensor.dtype])
                continue
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise Unsupported(
                    f"layout_{name}",
                    f"strides {tuple(tensor.stride())}: head_dim must be innermost",
                )
            if self.layouts == "contiguous" and not tensor.is_contiguous():
                raise Unsupported(
                    f"layout_{name}", f"strides {tuple(tensor.stride())} are not contiguous"
                )
            self._check_rows(name, [tensor])

    def _check_rows(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raise `Unsupported` if a row of these does not begin where `layouts` says."""
        for tensor in tensors if self.layouts == "aligned" else ():
            steps = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            starts = [step * tensor.itemsize for step, size in steps if size > 1]
            if tensor.numel() and any(n % ROW_ALIGNMENT for n in (tensor.data_ptr(), *starts)):
                raise Unsupported(
                    f"layout_{name}", f"rows do not begin at multiples of {ROW_ALIGNMENT} bytes"
                )

    def check_backward(
        self, args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients
    ) -> None:
        """`check` for the entry point of a backward."""
        self.check(args, saved.out, dout=dout, **gradients.by_name())
