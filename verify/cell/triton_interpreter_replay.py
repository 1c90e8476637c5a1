"""Replays programs of Triton's interpreter: of those on the same path, one is interpreted.

The interpreter runs a kernel's Python source once for each program of the grid.  Most of the time
goes to what is the same in all of them: the language's calls, types, and constants.  What differs
are arrays.  So the operations of one program on arrays are recorded, and made again for the next
program with its own program ids, arguments and memory, without the source.

A *tape* belongs to a kernel and to the types and plain numbers of its arguments.  It is a tree:
where the source asks for the number in a tensor (`if`, `range`), the number decides which branch
goes on.  A program that comes to a branch without a record has had no effect yet, since stores and
atomics are made at its end.  It begins again in the interpreter, and its path is recorded.

The recording sees all of a program's arrays: while it goes on, every read of a handle's array that
is not part of a recorded operation ends it, and so does an operand of unknown origin, or a load
after a store.  Such a kernel is interpreted as ever.  If a replayed program raises, it begins again
in the interpreter, too, which tells the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from verify.cell.triton_interpreter_plans import (
    Array,
    Effect,
    Places,
    Plan,
    Step,
    follow,
    plain,
)

_LONGEST = 3000  # operations of a path: longer ones are interpreted
_LONG = "a long path"
_MOST_PATHS = 32  # of a tape
_CONSTANT = -1  # in place of a register: the handle's array never changes
_UNKNOWN = (None, 0)
_PROGRAM_IDS = 3  # the first registers
_EFFECT = -2  # and of the result of an atomic, which exists at the end of a program alone


class Closed(Exception):  # noqa: N818 - it is no error
    """A program's path is interpreted: it is too long for a record."""


_constants: dict[tuple[str, tuple[int, ...], int], Array] = {}
_MOST_CONSTANTS = 512


def _shared(constant: Array) -> Array:
    """One array for all constants of the same bits: many paths hold the same blocks of zeros."""
    bits = constant.tobytes()
    key = constant.dtype.str, constant.shape, hash(bits)
    found = _constants.get(key)
    if found is not None and found.tobytes() == bits:
        return found
    if len(_constants) < _MOST_CONSTANTS:
        _constants[key] = constant
    return constant


@dataclass(eq=False)
class Branch:
    """Steps up to a decision: the register that decides, how its array is read, and the branches by
    what was read.  A branch at whose end no decision is ends the program.

    closed: programs on this path are interpreted.
    """

    steps: list[Step] = field(default_factory=list)
    decides: int | None = None
    read: Callable[[Array], Any] = bool
    next: dict[Any, Branch] = field(default_factory=dict)
    ended: bool = False
    closed: bool = False
    plan: Plan | None = None


@dataclass(eq=False)
class Tape:
    """The paths of one kernel with arguments of the same types and plain numbers.

    registers: as a program begins: constants, and None.  first: the registers before these are
    those of program ids, sizes of the grid and arguments.  own: registers whose arrays differ
    between the programs of a launch.  base, made: the registers as a program of the present launch
    begins, and the branches whose steps `once` are made in them.
    """

    first: int
    registers: list[Any]
    root: Branch = field(default_factory=Branch)
    launches: int = 0
    replayed: int = 0
    recorded: int = 0
    closed: bool = False
    made_by: dict[int, Branch] = field(default_factory=dict)  # by register
    used_by: dict[int, list[Branch]] = field(default_factory=dict)
    own: set[int] = field(default_factory=lambda: set(range(_PROGRAM_IDS)))
    base: list[Any] = field(default_factory=list)
    made: set[Branch] = field(default_factory=set)

    @property
    def wasteful(self) -> bool:
        """Whether most of its programs took a path of their own."""
        return self.recorded >= _MOST_PATHS or (
            self.recorded >= 12 and self.replayed < self.recorded
        )

    def launch(self, sizes: list[Array], given: list[Array]) -> None:
        """Begin a launch with these sizes of the grid and arguments."""
        self.base = [None] * _PROGRAM_IDS + sizes + given
        self.made.clear()

    def has(self, given: list[Array]) -> bool:
        """Whether the present launch has begun with these very arrays as arguments."""
        begin = self.first - len(given)
        return bool(self.base) and all(map(is_, self.base[begin : self.first], given))

    def replay(self, program: list[Array]) -> list[Effect] | None:
        """Make the operations of a program with these ids; returns its effects, which the caller
        makes, or None if the path is not on record.  Raises `Closed` and `Overlap`."""
        self.base += self.registers[len(self.base) :]  # recorded since the last program
        registers = self.base.copy()
        registers[:_PROGRAM_IDS] = program
        effects: list[Effect] = []
        branch: Branch | None = self.root
        while branch is not None:
            if branch.closed:
                raise Closed
            if not (branch.ended or branch.next):
                return None
            plan = branch.plan or self._planned(branch)
            if plan.once and branch not in self.made:
                self._make_once(branch, plan, registers)
            follow(plan.each, registers, effects)
            if branch.ended:
                self.replayed += 1
                return effects
            branch = branch.next.get(branch.read(registers[branch.decides or 0]))
        return None

    def _make_once(self, branch: Branch, plan: Plan, registers: list[Any]) -> None:
        """Make a branch's steps `once` for the launch, and for the program with these registers."""
        follow(plan.once, self.base, [])
        for each in plan.results:
            registers[each] = self.base[each]
        self.made.add(branch)

    def _planned(self, branch: Branch) -> Plan:
        """The branch's steps as `replay` reads them, without those whose results nothing reads.  A
        register of a program's own that no other branch reads is emptied after the last step that
        does."""
        steps: list[tuple[Step, tuple[int, ...]]] = []
        read = {branch.decides}
        for step in reversed(branch.steps):
            if not (
                step.effect
                or step.reads
                or any(self._is_read(each, branch, read) for each in step.to)
            ):
                continue
            emptied = {each for each in (*step.given, *step.to) if self._ends(each, branch, read)}
            steps.append((step, tuple(emptied)))
            read.update(step.given)
            read.update(step.to)
        once: list[Step] = []
        own: list[tuple[Step, tuple[int, ...]]] = []
        for step, ended in reversed(steps):
            if step.effect or step.reads or not self.own.isdisjoint(step.to):
                own.append((step, ended))
            else:
                once.append(step)
        branch.plan = Plan(
            [plain(step, ()) for step in once],
            [register for step in once for register in step.to],
            [plain(step, ended) for step, ended in own],
        )
        self.made.discard(branch)  # an earlier plan can have had fewer steps
        return branch.plan

    def _is_read(self, register: int, branch: Branch, read: set[int | None]) -> bool:
        """Whether a later step of the branch reads the register, or another branch does."""
        if register in read:
            return True
        return any(user is not branch for user in self.used_by.get(register, ()))

    def _ends(self, register: int, branch: Branch, read: set[int | None]) -> bool:
        """Whether no one reads the register later, which a step of this branch has filled."""
        if register not in self.own or self.made_by.get(register) is not branch:
            return False
        return not self._is_read(register, branch, read)


class Recording:
    """One program while it is interpreted and recorded; along a path that is on record, as far as
    it goes.

    inside: how many recorded operations are under way, one in another.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.branch = tape.root
        self.path = [tape.root]
        self.at = 0
        self.count = 0
        self.inside = 0
        self.changed = False
        self.lost = ""  # why it has ended early
        self.extending = not (tape.root.steps or tape.root.ended or tape.root.next)

    def lose(self, why: str) -> None:
        """End the recording: this kernel is interpreted from now on."""
        self.lost = self.lost or why

    def replaced(self, *, alike: bool) -> None:
        """A handle gets another array; alike: of the same dtype."""
        if not (alike and self.inside):
            self.lose("an array that is replaced")

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Operations within are parts of another one, or none of the program's."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def known(self, handle: Any, register: int) -> None:
        """The handle's array is in that register."""
        handle.__dict__["recorded"] = (self, register)

    def constant(self, handle: Any) -> bool:
        """Whether the handle's array is the same in every program."""
        known: bool = handle.__dict__.get("recorded") == (self, _CONSTANT)
        return known

    def _register(self, handle: Any) -> int | None:
        """The register of a handle's array; `_CONSTANT`; None if its origin is not known, or exists
        only when the program has ended."""
        token, register = handle.__dict__.get("recorded", _UNKNOWN)
        return None if token is not self or register == _EFFECT else register

    def _kept(self, handle: Any) -> int:
        """A register for the array of a constant."""
        token, register = handle.__dict__.get("kept", _UNKNOWN)
        if token is not self:
            register = len(self.tape.registers)
            self.tape.registers.append(_shared(handle.__dict__["data"]))
            handle.__dict__["kept"] = (self, register)
        return int(register)

    def add(
        self,
        made: Callable[..., Any],
        given: list[Any],
        results: list[Any],
        *,
        effect: bool = False,
        reads: bool = False,
        places: Places | None = None,
    ) -> None:
        """Note an operation that made the arrays of the handles `results` of those of `given`."""
        if self.lost:
            return
        registers = []
        for each in given:
            register = self._register(each)
            if register is None:
                self.lose("an operand of unknown origin")
                return
            registers.append(register)
        if results and not (effect or reads) and registers.count(_CONSTANT) == len(registers):
            for each in results:
                self.known(each, _CONSTANT)
            return
        late = reads and self.changed
        if late and (places is None or len(results) != 1):
            self.lose("a load after a store")
            return
        self.changed = self.changed or effect
        self.count += 1
        if self.count > _LONGEST:
            self.lose(_LONG)
            return
        if self.extending:
            kept = [
                self._kept(each) if register == _CONSTANT else register
                for each, register in zip(given, registers, strict=True)
            ]
            begin = len(self.tape.registers)
            to = tuple(range(begin, begin + (0 if effect else len(results))))
            step = Step(made, tuple(kept), to, effect, reads, places, late)
            self._append(step)
        else:
            known = self._on_record(registers, 0 if effect else len(results), effect)
            if known is None:
                self.lose("another order of operations")
                return
            step = known
        for n, each in enumerate(results):
            self.known(each, _EFFECT if effect else step.to[n])

    def _append(self, step: Step) -> None:
        """Put a new step at the end of the branch."""
        tape, branch = self.tape, self.branch
        tape.registers += [None] * len(step.to)
        for each in step.to:
            tape.made_by[each] = branch
        if step.reads or step.effect or not tape.own.isdisjoint(step.given):
            tape.own.update(step.to)
        for each in step.given:
            tape.used_by.setdefault(each, []).append(branch)
        branch.steps.append(step)

    def _on_record(self, given: list[int], count: int, effect: bool) -> Step | None:
        """The branch's next step, if it is one with these registers; a constant has one of its own
        there."""
        if self.at >= len(self.branch.steps):
            return None
        step = self.branch.steps[self.at]
        self.at += 1
        alike = len(given) == len(step.given) and all(
            a in (b, _CONSTANT) for a, b in zip(given, step.given, strict=True)
        )
        return step if alike and step.effect == effect and len(step.to) == count else None

    def decide(self, handle: Any, read: Callable[[Array], Any]) -> Any:
        """What `read` makes of the handle's array: the path depends on it."""
        value = read(handle.__dict__["data"])
        if self.lost or self.inside or self.constant(handle):
            return value
        register = self._register(handle)
        if register is None:
            self.lose("a decision of unknown origin")
            return value
        branch = self.branch
        if self.extending:
            branch.decides = register
            branch.read = read
            self.tape.used_by.setdefault(register, []).append(branch)
        elif branch.decides != register or self.at != len(branch.steps):
            self.lose("another order of decisions")
            return value
        self.extending = value not in branch.next
        self.branch = branch.next.setdefault(value, Branch())
        self.path.append(self.branch)
        self.at = 0
        return value

    def end(self) -> None:
        """Put the path on record; or see to it that it is not tried again."""
        tape = self.tape
        for each in self.path:
            each.plan = None
        if not self.lost and not self.extending and not self.branch.ended:
            self.lose("an end that is no end on record")
        if not self.lost:
            self.branch.ended = True
            tape.recorded += 1
        elif self.lost == _LONG:
            self.branch.closed = True
            self.branch.steps.clear()
            tape.closed = self.branch is tape.root
            tape.recorded += 1
        else:
            tape.closed = True
        tape.closed = tape.closed or tape.wasteful
