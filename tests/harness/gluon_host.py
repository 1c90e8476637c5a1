"""The Gluon kernels on the CPU: their shipped texts, run by Python over torch tensors.

`Host` executes the texts of a kernel, of the files of kernels/gluon that it imports and of
kernels/triton/tiles.py with stand-ins for `gl`, `tl`, `mbarrier`, `tma` and wgmma. A stand-in
computes what the device computes, and records what one thread asks of barriers, copies and tiles as
an `Event`. The order of these events is the program of each warp: the kernel's branches depend on
no arrival. tests/harness/gluon_interleavings.py tries all orders in which warps and copies run.

A name that has no stand-in is an AttributeError, so that the model cannot overlook a new primitive.
"""

from __future__ import annotations

import builtins
import linecache
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from verify.arithmetic.dot import mma
from verify.arithmetic.unit import Unit
from verify.bundle import ROOT
from verify.cuda.edits import Edit
from verify.variant import AttentionArgs, Workspace

KERNELS = {  # in the order of their imports
    name: ROOT / "kernels" / folder / f"{name}.py"
    for folder, name in (
        ("triton", "tiles"),
        ("gluon", "ring"),
        ("gluon", "columns"),
        ("gluon", "hopper_forward"),
        ("gluon", "hopper_fp8_forward"),
    )
}
FAKED = {f"kernels.{path.parent.name}.{name}": name for name, path in KERNELS.items()}

Name = tuple[str, int]


@dataclass(frozen=True)
class Event:
    """One thing that a thread asks of the machine.

    kind: "init", "fence", "meet", "expect", "copy", "wait", "wgmma" (it begins to read), "done" (at
    most `number` wgmma are left), "load" and "store" (of the thread itself) or "invalidate".
    barrier: its name, as (array, number); tiles: those of tiles in shared memory.
    number: arrivals of an init, bytes of an expect or a copy, the parity of a wait.
    what: the operand and the first row of a copy, or the first column where rows begin at 0.
    leader: one thread does it.
    """

    kind: str
    barrier: Name | None = None
    tiles: tuple[Name, ...] = ()
    number: int = 0
    what: tuple[str, int] = ("", 0)
    leader: bool = False


class Int(int):
    """A number that can be converted, as those of a program can."""

    def to(self, dtype: object) -> Int:
        return self

    def __floordiv__(self, other: int) -> Int:
        return Int(int(self) // other)

    def __mod__(self, other: int) -> Int:
        return Int(int(self) % other)


@dataclass(frozen=True)
class Place:
    """A pointer, or a tensor of pointers, into a tensor's storage."""

    storage: Tensor
    offset: Any

    @staticmethod
    def of(tensor: Tensor) -> Place:
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Place(storage, tensor.storage_offset())

    def __add__(self, step: Any) -> Place:
        return Place(self.storage, self.offset + step)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.storage.dtype)


@dataclass
class Shared:
    """An array of tiles or barriers in shared memory; `number` is None for all of it."""

    events: list[Event]
    name: str
    shape: tuple[int, ...]
    values: Tensor
    number: int | None = None

    def index(self, number: int) -> Shared:
        if not 0 <= number < self.shape[0]:
            raise IndexError(f"{self.name} has no place {number}")
        return Shared(self.events, self.name, self.shape[1:], self.values[number], int(number))

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.number or 0

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.events, self.name, (), self.values.permute(order), self.number)

    def reshape(self, shape: Sequence[int]) -> Shared:
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"{self.name}: {self.shape} is no {shape}")
        return self

    def load(self, layout: object) -> Tensor:
        self.events.append(Event("load", tiles=(self.key,)))
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.events.append(Event("store", tiles=(self.key,)))
        self.values.copy_(values)


@dataclass(frozen=True)
class Copied:
    """A tensor as the copy engine sees it, made of what `hopper_forward.descriptor` gives."""

    name: str
    source: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.source.base.dtype

    @property
    def shape(self) -> list[int]:
        return self.source.shape

    @property
    def block_shape(self) -> list[int]:
        return self.source.block_shape

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=math.prod(self.block_shape) * self.dtype.itemsize)

    def box(self, batch: int, head: int, row: int, dim: int) -> Tensor:
        """The tile whose first element is there; elements out of bounds are zeros."""
        base = self.source.base
        whole = torch.as_strided(base, self.shape, self.source.strides, base.storage_offset())
        _, _, rows, dims = self.block_shape
        if not (0 <= batch < self.shape[0] and 0 <= head < self.shape[1]):
            raise IndexError(f"{self.name}: no head {head} of batch {batch}")
        inside = whole[batch, head, row : row + rows, dim : dim + dims]
        box = torch.zeros(rows, dims, dtype=self.dtype)
        box[: inside.shape[0], : inside.shape[1]] = inside
        return box


class Names(SimpleNamespace):
    """A module's stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the host model has no stand-in for {name!r}: add it there")


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _largest(x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.maximum(torch.as_tensor(x), torch.as_tensor(y))
    return max(x, y)


def _least(x: Any, y: Any) -> Any:
    return -_largest(-x, -y)


def _reduced(reduce: Any) -> Any:
    def over(x: Tensor, axis: int) -> Any:
        values = reduce(x, axis)
        return values if values.ndim else Int(values.item())

    return over


def _load(place: Place) -> Tensor:
    return place.storage[place.offset]


def _store(place: Place, values: Tensor, mask: Tensor) -> None:
    place.storage[torch.broadcast_to(place.offset, mask.shape)[mask]] = values[mask]


def _constant(*shape: Any, **keywords: Any) -> None:
    return None


SHARED_NAMES = {
    "constexpr": object,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "static_range": range,
    "cdiv": lambda x, y: -(-x // y),
    "where": _where,
    "maximum": _largest,
    "minimum": _least,
    "max": _reduced(torch.amax),
    "min": _reduced(torch.amin),
    "sum": _reduced(torch.sum),
    "load": _load,
    "store": _store,
    "exp2": torch.exp2,
    "log2": torch.log2,
}


@dataclass
class Machine:
    """The stand-ins of a program, and what it asked for.

    unit: what wgmma adds 8-bit products on; exact products and fp32 sums if None.
    """

    program: int = 0
    unit: Unit | None = None
    events: list[Event] = field(default_factory=list)
    arrays: Iterator[int] = field(default_factory=lambda: iter(range(99)))

    def say(self, kind: str, **about: Any) -> None:
        self.events.append(Event(kind, **about))

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        values = torch.zeros(tuple(shape), dtype=dtype)
        return Shared(self.events, f"array {next(self.arrays)}", tuple(shape), values)

    def copy(
        self, tensor: Copied, at: Sequence[int], barrier: Shared, tile: Shared, pred: bool = True
    ) -> None:
        if pred:
            about = {"number": tensor.block_type.nbytes, "what": (tensor.name, int(at[2] + at[3]))}
            self.say("copy", barrier=barrier.key, tiles=(tile.key,), leader=True, **about)
            tile.values.copy_(tensor.box(*map(int, at)))

    def expect(self, barrier: Shared, count: int, pred: bool = True) -> None:
        if pred:
            self.say("expect", barrier=barrier.key, number=int(count), leader=True)

    def wait(self, barrier: Shared, phase: int, pred: bool = True) -> None:
        if pred:
            self.say("wait", barrier=barrier.key, number=int(phase))

    def multiply(
        self, a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        self.say("wgmma", tiles=tuple(x.key for x in (a, b) if isinstance(x, Shared)))
        if not is_async:
            self.say("done", number=0)
        left = a.values if isinstance(a, Shared) else a
        if self.unit is not None:
            return mma(left, b.values, acc if use_acc else torch.zeros_like(acc), self.unit)
        product = left.float() @ b.values.float()
        return acc + product if use_acc else product

    def finish(self, pending: int, deps: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        self.say("done", number=pending)
        return deps if len(deps) > 1 else deps[0]

    def modules(self) -> dict[str, Any]:
        """The stand-ins, by the names of the modules that hold them."""
        layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")
        gl = Names(
            **SHARED_NAMES,
            **dict.fromkeys(layouts, _constant),
            NVMMASharedLayout=NVMMASharedLayout,
            arange=lambda first, end, layout: torch.arange(first, end),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            zeros_like=torch.zeros_like,
            convert_layout=lambda x, layout: x,
            barrier=lambda: self.say("meet"),
            allocate_shared_memory=self.allocate,
        )
        tl = Names(**SHARED_NAMES, program_id=lambda axis: Int(self.program))
        mbarrier = Names(
            MBarrierLayout=_constant,
            init=lambda b, count: self.say("init", barrier=b.key, number=count, leader=True),
            invalidate=lambda b: self.say("invalidate", barrier=b.key, leader=True),
            expect=self.expect,
            wait=self.wait,
        )
        hopper = Names(
            fence_async_shared=lambda: self.say("fence"),
            mbarrier=mbarrier,
            tma=Names(async_copy_global_to_shared=self.copy),
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.finish,
        )

        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda f: f

        language = "triton.experimental.gluon.language"
        return {
            "triton.experimental": Names(gluon=Names(jit=jit)),
            "triton.experimental.gluon": Names(language=gl),
            f"{language}.nvidia.hopper": hopper,
            "triton.language": tl,
            "triton": Names(jit=jit, language=tl, cdiv=SHARED_NAMES["cdiv"]),
        }


class Host:
    """The texts of one of KERNELS and of what it imports, edited or as they are; `forward` is the
    entry point on the CPU."""

    def __init__(self, *edits: Edit, kernel: str = "hopper_forward") -> None:
        self.machine = Machine()
        self.name = kernel
        texts = {name: path.read_text(encoding="utf-8") for name, path in KERNELS.items()}
        own = [name for name in texts if f"{name} import" in texts[kernel] and "hopper" not in name]
        edited = {name: texts[name] for name in (*own, kernel)}
        for edit in edits:
            edited = edit.apply(edited)
        self.fakes = self.machine.modules()
        for name, text in {**texts, **edited}.items():
            self.fakes[name] = self._module(name, text)
        self.kernel = self.fakes[kernel]

    def _module(self, name: str, text: str) -> ModuleType:
        module = ModuleType(f"host_{name}")
        file = f"<host {name} {id(self)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)

        def fetch(
            wanted: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0
        ) -> Any:
            if wanted == "triton.language":  # `import triton.language as tl` takes it from triton
                return self.fakes["triton"]
            if wanted == "triton.experimental.gluon.nvidia.hopper":
                return builtins.__import__(wanted, scope, local, names, level)
            if FAKED.get(wanted, wanted) in self.fakes:
                return self.fakes[FAKED.get(wanted, wanted)]
            return builtins.__import__(wanted, scope, local, names, level)

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": fetch}
        exec(compile(text, file, "exec"), module.__dict__)
        return module

    def run(self, program: int, given: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
        """One program; its events are `machine.events` afterwards."""
        self.machine.program = program
        self.machine.events.clear()
        self.machine.arrays = iter(range(99))
        getattr(self.kernel, f"_{self.name}")(*given.values(), **keywords)

    def forward(
        self, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
    ) -> None:
        """What the kernel's `forward` does, with each program run here."""
        self.kernel.SUPPORT.check(args, out)
        if 0 in (args.seqlen_q, args.seqlen_kv):
            self.kernel.forward(args, out, lse, workspace)
            return
        made = self.kernel.launch(args, out, lse)
        keywords = {k: v for k, v in made.keywords.items() if k != "enable_fp_fusion"}
        names = iter("qkv")
        given = {str(n): _given(x, names) for n, x in enumerate(made.arguments)}
        for program in range(made.programs):
            self.run(program, given, keywords)


def _given(argument: Any, names: Iterator[str]) -> Any:
    """An argument of a launch as a program sees it; names: of the descriptors, in their order."""
    if isinstance(argument, TensorDescriptor):
        return Copied(next(names), argument)
    if isinstance(argument, tuple):
        return tuple(_given(x, names) for x in argument)
    return Place.of(argument) if isinstance(argument, Tensor) else argument
