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
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.harness.gluon_values import (
    SHARED_NAMES,
    Copied,
    Event,
    Int,
    Names,
    Place,
    Shared,
    constant,
)
from tests.harness.ptx_host import convict, run
from verify.arithmetic.dot import mma
from verify.arithmetic.unit import Unit
from verify.bundle import ROOT
from verify.cuda.edits import Edit
from verify.problem import Problem
from verify.variant import AttentionArgs, Config, Variant, Workspace

KERNELS = {  # in the order of their imports
    name: ROOT / "kernels" / folder / f"{name}.py"
    for folder, name in (
        ("triton", "tiles"),
        ("gluon", "ring"),
        ("gluon", "rows"),
        ("gluon", "softmax"),
        ("gluon", "columns"),
        ("gluon", "even_first"),
        ("gluon", "cluster"),
        ("gluon", "partitions"),
        ("gluon", "hopper_turnstile"),
        ("gluon", "hopper_forward"),
        ("gluon", "hopper_fp8_forward"),
        ("gluon", "hopper_cluster_forward"),
        ("gluon", "blackwell_forward"),
    )
}
FAKED = {f"kernels.{path.parent.name}.{name}": name for name, path in KERNELS.items()}


@dataclass
class Machine:
    """The stand-ins of a program, and what it asked for.

    unit: what wgmma adds 8-bit products on; exact products and fp32 sums if None.
    mask: the CTAs that a multicast reaches: Triton finds them by the layout of the tile.
    pending: products that were begun, and their results, NaN until a wait lets them be read.
    """

    program: int = 0
    unit: Unit | None = None
    mask: tuple[int, ...] = (0, 1)
    events: list[Event] = field(default_factory=list)
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    arrays: Iterator[int] = field(default_factory=lambda: iter(range(99)))

    def say(self, kind: str, **about: Any) -> None:
        self.events.append(Event(kind, **about))

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        values = torch.zeros(tuple(shape), dtype=dtype)
        return Shared(self.events, f"array {next(self.arrays)}", tuple(shape), values)

    def copy(
        self,
        tensor: Copied,
        at: Sequence[int],
        barrier: Shared,
        tile: Shared,
        pred: bool = True,
        multicast: bool = False,
    ) -> None:
        if pred:
            about = {"what": (tensor.name, tensor.first(at))}
            about["number"] = tensor.nbytes_per_cta
            about["ctas"] = self.mask if multicast and not tensor.split else ()
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
        left = a.values if isinstance(a, Shared) else a
        start = acc if use_acc else torch.zeros_like(acc)
        if self.unit is not None:
            product = mma(left, b.values, start, self.unit)
        else:
            product = start + left.float() @ b.values.float()
        result = torch.full_like(product, math.nan)
        self.pending.append((result, product))
        if not is_async:
            self.finish(0, ())
        return result

    def finish(self, pending: int, deps: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Products end in the order in which they were begun."""
        self.say("done", number=pending)
        while len(self.pending) > pending:
            result, product = self.pending.pop(0)
            result.copy_(product)
        return deps[0] if len(deps) == 1 else deps

    def modules(self) -> dict[str, Any]:
        """The stand-ins, by the names of the modules that hold them."""
        layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")
        gl = Names(
            **SHARED_NAMES,
            **dict.fromkeys(layouts, constant),
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
            MBarrierLayout=constant,
            init=lambda b, count: self.say("init", barrier=b.key, number=count, leader=True),
            invalidate=lambda b: self.say("invalidate", barrier=b.key, leader=True),
            expect=self.expect,
            wait=self.wait,
            fence_init_release_cluster=lambda: self.say("announce", leader=True),
        )
        hopper = Names(
            cluster=Names(
                arrive=lambda relaxed=False: self.say("arrive"),
                wait=lambda: self.say("await"),
            ),
            fence_async_shared=lambda cluster=False: self.say("fence", number=int(cluster)),
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
            f"{language}.nvidia": Names(hopper=hopper, blackwell=Names()),
            f"{language}.nvidia.hopper": hopper,
            "triton.language": tl,
            "triton": Names(
                jit=jit, language=tl, cdiv=SHARED_NAMES["cdiv"], __version__=triton.__version__
            ),
        }


class Host:
    """The texts of one of KERNELS and of what it imports, edited or as they are; `forward` is the
    entry point on the CPU.

    entry: whose launch and support it has, if they are not of that text.
    """

    def __init__(
        self,
        *edits: Edit,
        kernel: str = "hopper_forward",
        entry: str = "",
        machine: Machine | None = None,
    ) -> None:
        self.machine = machine or Machine()
        self.name = kernel
        texts = {name: path.read_text(encoding="utf-8") for name, path in KERNELS.items()}
        own = [name for name in texts if f"{name} import" in texts[kernel] and "hopper" not in name]
        edited = {name: texts[name] for name in (*own, kernel)}
        for edit in edits:
            edited = edit.apply(edited)
        self.fakes = self.machine.modules()
        for name, text in {**texts, **edited}.items():
            self.fakes[name] = self._module(name, text)
        self.kernel = self.fakes[entry or kernel]

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

    def run(
        self,
        program: int,
        given: Mapping[str, Any],
        keywords: Mapping[str, Any],
        kernel: Any = None,
    ) -> None:
        """One program; its events are `machine.events` afterwards."""
        self.machine.program = program
        self.machine.events.clear()
        self.machine.pending.clear()
        self.machine.arrays = iter(range(99))
        run = kernel or getattr(self.kernel, f"_{self.name}")
        run(*given.values(), **keywords)

    def forward(
        self, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
    ) -> None:
        """What the kernel's `forward` does, with each program run here."""
        self.kernel.SUPPORT.check(args, out)
        if 0 in (args.seqlen_q, args.seqlen_kv):
            self.kernel.forward(args, out, lse, workspace)
            return
        made = self.kernel.launch(args, out, lse)
        options = ("enable_fp_fusion", "num_ctas")
        keywords = {k: v for k, v in made.keywords.items() if k not in options}
        names = iter("qkv")
        given = {str(n): _given(x, names) for n, x in enumerate(made.arguments)}
        for program in range(made.programs):
            self.run(program, given, keywords, made.kernel)


def _given(argument: Any, names: Iterator[str]) -> Any:
    """An argument of a launch as a program sees it; names: of the descriptors, in their order."""
    if isinstance(argument, TensorDescriptor):
        return Copied(next(names), argument)
    if isinstance(argument, tuple):
        return tuple(_given(x, names) for x in argument)
    return Place.of(argument) if isinstance(argument, Tensor) else argument


def convicted_by_bound(
    made: Host, variant: Variant, problem: Problem, config: Config, arch: str = "sm_90a"
) -> str | None:
    """What is wrong with the O and LSE of a text, which declares what the variant does, or None."""
    of_text = replace(variant, forward=made.forward)
    out, lse = run(of_text, problem, config)
    return convict(of_text, problem, config, out, lse, arch=arch)
