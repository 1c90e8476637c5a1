"""A Gluon kernel whose warps are specialised, on the CPU: partitions run at once, in drawn orders.

`gluon_host` runs one thread's text and records it.  Here every partition is a thread of Python that
runs alone between two primitives; at each of them a drawn choice says who is next: a partition that
can go on, or something that was begun and has not happened.  The machine, after the PTX ISA:

- A barrier counts arrivals and bytes, and a wait for a parity goes on when the phase of that parity
  has ended; before its first phase that of parity 1 has.
- A copy's tile holds NaN from its issue until its bytes have come.
- Products of tcgen05 happen in the order of their issue, at any time after it.  They read their
  operands then, and their accumulator holds NaN until then; afterwards each of their barriers has
  one more arrival.
- wgmma happens between its issue and the end of its partition's wait for it, in the order in which
  the partition issued them.  Its result is NaN until then.
- Partitions of one text are partners.  None leaves while a partner can still arrive at a barrier at
  which it alone waits.  `turns_taken` says whether partners issued their products by turns.

So a slip in the protocol shows as NaN or a wrong number, as an arrival too many, or as a deadlock,
in some of the orders.  Fences and proxies are not modelled.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.harness.gluon_host import Machine
from tests.harness.gluon_values import Copied, Names, Shared, constant

_PATIENCE = 60.0  # seconds that a partition may take between two primitives


class PartitionError(Exception):
    """What a program does that the machine does not allow."""


@dataclass
class Phases:
    """A barrier: the arrivals and bytes that its phase still lacks, and how many have ended."""

    count: int
    pending: int
    missing: int = 0
    ended: int = 0

    def change(self, *, arrivals: int = 0, expected: int = 0) -> None:
        self.pending -= arrivals
        self.missing += expected
        if self.pending < 0:
            raise PartitionError("more arrivals in a phase than the count of its barrier")
        if self.pending == 0 and self.missing == 0:
            self.pending = self.count
            self.ended += 1


@dataclass
class Memory(Shared):
    """A tile, or several, of tensor memory."""

    whole: Any = None

    @property
    def layout(self) -> None:
        return None

    def index(self, number: int) -> Memory:
        tile = super().index(number)
        return Memory(
            tile.events, tile.name, tile.shape, tile.values, tile.number, whole=self.whole
        )

    def load(self, layout: object) -> Tensor:
        self.whole.step()
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.whole.step()
        if values.dtype != self.dtype:
            raise PartitionError(f"{self.name}: {values.dtype} into {self.dtype}")
        self.values.copy_(values)


@dataclass
class Turns:
    """A partition, and the two signals by which it gets its turn and gives it back."""

    text: Any = None
    ready: Callable[[], bool] = lambda: True
    mine: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False
    error: BaseException | None = None
    multiplying: list[Callable[[], None]] = field(default_factory=list)  # have not happened yet


@dataclass
class Partitions(Machine):
    """The stand-ins for a kernel with partitions.

    seed: of the order.  Of odd ones, what was begun happens only when every partition waits; of
    each second odd one, the newest first.
    """

    seed: int = 0
    barriers: dict[Any, Phases] = field(default_factory=dict)
    under_way: list[Callable[[], None]] = field(default_factory=list)
    products: list[Callable[[], None]] = field(default_factory=list)
    accumulators: dict[Any, list[Any]] = field(default_factory=dict)
    waiters: dict[Any, list[Turns]] = field(default_factory=dict)
    issued: list[list[int]] = field(default_factory=list)
    running: Turns | None = None
    parts: list[Turns] = field(default_factory=list)
    abandoned: bool = False

    # The order.

    def step(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Give the turn away, and go on when it comes back and `ready` holds."""
        own = self.running
        if own is None:  # before the partitions begin, and after they end
            if not ready():
                raise PartitionError("waits for ever, outside of the partitions")
            return
        own.ready = ready
        own.back.release()
        own.mine.acquire()
        if self.abandoned:
            raise SystemExit

    def specialise(
        self, parts: Sequence[tuple[Any, Sequence[Any]]], warps: object, registers: object
    ) -> None:
        """Run all partitions until each has ended; all that they began must have happened."""
        order = random.Random(self.seed)
        turns = [Turns(text=text) for text, _ in parts]
        self.parts = turns
        self.issued.append([])
        self.waiters.clear()
        threads = [
            threading.Thread(target=self._run, args=(turn, *part), daemon=True)
            for turn, part in zip(turns, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            while not all(turn.ended for turn in turns):
                if not (choices := self._choices(turns)):
                    raise PartitionError("deadlock: every partition waits for ever")
                chosen = order.choice(choices)
                if isinstance(chosen, Turns):
                    self._let(chosen)
                else:
                    chosen()
            if self.under_way or self.products:
                raise PartitionError("all partitions end while something is under way")
        finally:
            self.abandoned = not all(turn.ended for turn in turns)
            for turn in turns:
                turn.mine.release()
            for thread in threads:
                thread.join(_PATIENCE)
            self.abandoned = False

    def _choices(self, turns: Sequence[Turns]) -> list[Any]:
        going: list[Any] = [turn for turn in turns if not turn.ended and turn.ready()]
        begun = [*(self._landing(op) for op in self.under_way), *self.products[:1]]
        if self.seed % 2 == 0:
            return going + begun
        return going or (begun[-1:] if self.seed % 4 == 3 else begun)

    def _landing(self, op: Callable[[], None]) -> Callable[[], None]:
        def land() -> None:
            self.under_way.remove(op)
            op()

        return land

    def _let(self, turn: Turns) -> None:
        self.running = turn
        turn.mine.release()
        if not turn.back.acquire(timeout=_PATIENCE):
            raise PartitionError("a partition never comes to its next primitive")
        self.running = None
        if turn.error is not None:
            raise turn.error

    def _run(self, turn: Turns, function: Any, arguments: Sequence[Any]) -> None:
        turn.mine.acquire()
        try:
            if not self.abandoned:
                function(*arguments)
        except SystemExit:
            pass
        except BaseException as error:
            turn.error = error
        turn.ended = True
        turn.back.release()

    # The primitives.

    def _barrier(self, barrier: Shared) -> Phases:
        if barrier.key not in self.barriers:
            raise PartitionError(f"{barrier.key} is no barrier then")
        return self.barriers[barrier.key]

    def init(self, barrier: Shared, count: int) -> None:
        if barrier.key in self.barriers:
            raise PartitionError(f"{barrier.key} is initialised twice")
        self.barriers[barrier.key] = Phases(count, count)

    def invalidate(self, barrier: Shared) -> None:
        left = self._barrier(barrier)
        if left.pending != left.count or left.missing:
            raise PartitionError(f"{barrier.key} is invalidated in a phase that has begun")
        del self.barriers[barrier.key]

    def expect(self, barrier: Shared, count: int, pred: bool = True) -> None:
        self.step()
        if pred:
            self._barrier(barrier).change(arrivals=1, expected=int(count))

    def arrive(self, barrier: Shared, count: int = 1) -> None:
        self.step()
        waiters, own = self.waiters.get(barrier.key, []), self.running
        left = all(one.ended for one in waiters)
        if own is not None and left and own.text in [one.text for one in waiters]:
            raise PartitionError(f"an arrival at {barrier.key}, whose partner has left")
        self._barrier(barrier).change(arrivals=count)

    def wait(self, barrier: Shared, phase: int, pred: bool = True) -> None:
        if pred:
            if self.running is not None:
                self.waiters.setdefault(barrier.key, []).append(self.running)
            self.step(lambda: self._barrier(barrier).ended % 2 != int(phase))

    def multiply(
        self, a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        """Begin a @ b, added to acc."""
        self.step()
        own = self.running
        if own is None or not is_async:
            raise PartitionError("a product outside of the partitions, or one that waits")
        self.issued[-1].append(self.parts.index(own))
        made = torch.full(acc.shape, torch.nan)

        def happen() -> None:
            left = a.values if isinstance(a, Shared) else a
            product = left.float() @ b.values.float()
            made.copy_(acc + product if use_acc else product)

        def first_happens() -> None:
            own.multiplying.pop(0)()

        own.multiplying.append(happen)
        self.under_way.append(first_happens)
        return made

    def finish(self, pending: int, deps: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        own = self.running
        if own is not None:
            self.step(lambda: len(own.multiplying) <= pending)
        return deps if len(deps) > 1 else deps[0]

    def turns_taken(self) -> bool:
        """Whether in each program two partners issued their products by turns: S of the first
        block, S of a block and O of the one before, and O of the last."""
        for issued in self.issued:
            blocks = issued.count(0) // 2
            if issued != [0, 1, *(blocks - 1) * [0, 0, 1, 1], 0, 1][: 4 * blocks]:
                return False
        return True

    def copy(
        self,
        tensor: Copied,
        at: Sequence[int],
        barrier: Shared,
        tile: Shared,
        pred: bool = True,
        multicast: bool = False,
    ) -> None:
        self.step()
        if not pred:
            return
        box = tensor.box(*map(int, at))
        tile.values.fill_(torch.nan)

        def land() -> None:
            tile.values.copy_(box)
            self._barrier(barrier).change(expected=-tensor.nbytes_per_cta)

        self.under_way.append(land)

    def product(
        self, a: Shared, b: Shared, acc: Memory, use_acc: bool, mbarriers: Sequence[Shared]
    ) -> None:
        """Begin acc = a @ b, or add it."""
        self.step()
        held = self.accumulators.setdefault(acc.key, [0, acc.values.clone()])
        if held[0] == 0:
            held[1] = acc.values.clone()
        held[0] += 1
        acc.values.fill_(torch.nan)

        def happen() -> None:
            self.products.pop(0)
            made = a.values.float() @ b.values.float()
            held[0] -= 1
            held[1] = held[1] + made if use_acc else made
            if held[0] == 0:
                acc.values.copy_(held[1])
            # Each barrier by itself, some time later.
            self.under_way.extend(self._arrival(barrier) for barrier in mbarriers)

        self.products.append(happen)

    def _arrival(self, barrier: Shared) -> Callable[[], None]:
        return lambda: self._barrier(barrier).change(arrivals=1)

    def tensor_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Memory:
        values = torch.full(tuple(shape), torch.nan, dtype=dtype)
        name = f"tensor memory {next(self.arrays)}"
        return Memory(self.events, name, tuple(shape), values, whole=self)

    def modules(self) -> dict[str, Any]:
        found = super().modules()
        language = "triton.experimental.gluon.language"
        hopper = found[f"{language}.nvidia.hopper"]
        hopper.mbarrier.init = self.init
        hopper.mbarrier.invalidate = self.invalidate
        hopper.mbarrier.arrive = self.arrive
        found["triton.experimental.gluon"].language.warp_specialize = self.specialise
        found[f"{language}.nvidia"].blackwell = Names(
            TensorMemoryLayout=constant,
            allocate_tensor_memory=self.tensor_memory,
            get_tmem_reg_layout=constant,
            tcgen05_mma=self.product,
        )
        return found
