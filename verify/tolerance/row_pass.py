"""The kernels of row_pass.cu: what a bound asks of whole rows of pairs, in one pass over a GPU's
memory.

They need NVRTC (cuda.core).  Where that is missing, and for small blocks, torch's steps do the same
one after the other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from verify.cuda import compile as cuda

# Pairs from which on a pass over memory takes longer than what torch needs to launch it.
WORTHWHILE = 1 << 22
THREADS = 256
SOURCE = Path(__file__).with_suffix(".cu")


class Arguments(ctypes.Structure):
    """The structure of that name in row_pass.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("magnitudes", "scores", "weights", "common")),
        *((name, ctypes.c_double) for name in "ab"),
        ("keys", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("largest", "grown", "upper")),
        *((name, ctypes.c_void_p) for name in ("total", "moved", "least")),
    )


@dataclass(frozen=True, eq=False)
class Linear:
    """An error of each score S, a G + b |S| + lost; G is `RowBlock.magnitude`, lost (heads, rows,
    1) or None, and 0 where a row sees no key."""

    a: float
    b: float
    lost: Tensor | None = None

    def then(self, factor: float, by_score: float) -> Linear:
        """The error times that, and that times |S| more."""
        lost = None if self.lost is None else self.lost * factor
        return Linear(self.a * factor, self.b * factor + by_score, lost)


@dataclass(frozen=True, eq=False)
class Moved:
    """Of `Weights`: grown, upper (heads, rows, keys); largest, moved, the sum of P exp(-delta), and
    the least `upper` if that is known, (heads, rows, 1)."""

    grown: Tensor
    upper: Tensor
    largest: Tensor
    total: Tensor
    moved: Tensor
    least: Tensor | None = None


class Pairs(Protocol):
    """What the kernels read of a `RowBlock`."""

    @property
    def magnitude(self) -> Tensor: ...

    @property
    def scaled(self) -> Tensor: ...

    @property
    def probabilities(self) -> Tensor: ...


def usable(pairs: Pairs) -> bool:
    """Whether one pass over these pairs is worthwhile, and can be made here."""
    scores = pairs.scaled
    large = scores.is_cuda and scores.numel() >= WORTHWHILE
    return large and _compiler() and proved(scores.device)


@cache
def _compiler() -> bool:
    """Whether CUDA C++ compiles and runs here; asked once, since CUDA is slow to answer."""
    return cuda.available() is None


def largest_errors(pairs: Pairs, error: Linear) -> Tensor:
    """The largest error of each row, (heads, rows, 1)."""
    largest = pairs.scaled.new_empty(*pairs.scaled.shape[:-1], 1)
    given = {"magnitudes": pairs.magnitude, "scores": pairs.scaled, "largest": largest}
    _launch("largest_errors", error, given)
    return largest if error.lost is None else largest + error.lost


def moved_weights(
    pairs: Pairs, delta: Linear, common: Tensor, memory: tuple[Tensor, Tensor]
) -> Moved:
    """Weights that move by delta and by what a row has in common, (heads, rows, 1).

    memory: of two tensors like the scores, which `grown` and `upper` get.
    """
    common = (common if delta.lost is None else common + delta.lost).contiguous()
    rows = {name: torch.empty_like(common) for name in ("largest", "total", "moved", "least")}
    given = {"magnitudes": pairs.magnitude, "scores": pairs.scaled}
    given |= {"weights": pairs.probabilities, "common": common}
    made = dict(zip(("grown", "upper"), memory, strict=True)) | rows
    _launch("moved_weights", delta, given | made)
    return Moved(*memory, **rows)


@dataclass(frozen=True, eq=False)
class _MadeUp:
    """Pairs of no problem."""

    magnitude: Tensor
    scaled: Tensor
    probabilities: Tensor


@cache
def proved(device: torch.device) -> bool:
    """Whether the kernels compile for that device, run, and find what torch finds there, of rows
    that are made up: no bound is taken from a kernel before that."""
    drawn = torch.rand(4, 2, 3, 1000, dtype=torch.float64, generator=torch.Generator())
    magnitude, half, p, common = drawn.to(device)
    common = common[..., :1]
    scaled = (magnitude * (2 * half - 1)).masked_fill(half > 0.9, -torch.inf)
    linear = Linear(0.25, 0.5)
    try:
        pairs = _MadeUp(magnitude, scaled, p)
        error = largest_errors(pairs, linear)
        got = moved_weights(pairs, linear, common, (torch.empty_like(p), torch.empty_like(p)))
    except Exception:  # whatever the toolkit raises: torch's steps need none
        return False
    size = scaled.abs().masked_fill(scaled == -torch.inf, 0.0)
    errors = linear.a * magnitude + linear.b * size
    delta = errors + common
    grown, upper = delta.expm1() * p, delta.exp() * p
    wanted = (
        (error, errors.amax(-1, True)),
        *((got.grown, grown), (got.upper, upper), (got.largest, delta.amax(-1, True))),
        (got.total, ((-delta).exp() * p).sum(-1, True)),
        (got.moved, grown.sum(-1, True)),
        (got.least, upper.amin(-1, True)),
    )
    return all(x is not None and torch.allclose(x, want, 1e-12, 0.0) for x, want in wanted)


def _launch(entry: str, linear: Linear, tensors: dict[str, Tensor]) -> None:
    """One block of threads for each row.  Raises ValueError for a tensor that is not contiguous,
    CompileError and LaunchError."""
    for name, tensor in tensors.items():
        if not (tensor.is_contiguous() and tensor.dtype == torch.float64):
            raise ValueError(f"{name}: row_pass.cu takes contiguous fp64 tensors")
    device = tensors["scores"].device
    with torch.cuda.device(device):
        kernel, rows = _kernel(entry, device), tensors["largest"].numel()
        cuda.launch(kernel, (rows,), (THREADS,), 8 * THREADS, _arguments(linear, tensors))


def _arguments(linear: Linear, tensors: dict[str, Tensor]) -> Arguments:
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return Arguments(a=linear.a, b=linear.b, keys=tensors["scores"].shape[-1], **addresses)


def source(entry: str) -> cuda.Source:
    """That kernel's build."""
    return cuda.Source(SOURCE, entry, (("THREADS", str(THREADS)),))


@cache
def _kernel(entry: str, device: torch.device) -> cuda.Kernel:
    return cuda.load(cuda.compile_source(source(entry), cuda.device_arch(device)))
