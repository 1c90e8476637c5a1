"""Trial: one case while it is judged.  All oracles of the case share one run and one reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from verify.cell.arena import Arena, Plan, negated, side_by_side
from verify.cell.concurrent import LAUNCHES
from verify.cell.process import Cell, Reply
from verify.cell.ways import SHARED
from verify.judging.buffers import plan_of
from verify.judging.gradient_truth import GradientAnswer, GradientQuestion
from verify.judging.history import Hearing
from verify.judging.launch import Launch
from verify.judging.truth import Answer, Clock, Kept, Truth, compute_truth
from verify.problem import Problem
from verify.problem.inputs import Inputs, dequantised, dout, tensors
from verify.tolerance import backward
from verify.tolerance import forward as tolerance
from verify.tolerance.backward import GradientArithmetic, GradientTruth, OwnForward
from verify.tolerance.forward import ForwardArithmetic
from verify.variant import Config, Declaration, GradientNumerics, Numerics

T = TypeVar("T")


@dataclass
class Trial:
    """One case while it is judged.  Inputs, runs and truth are computed when they are first read.

    refuses: the problem is outside the support, so no forward can save O and LSE for a backward.
    hearing: the case in the history of its cell, shared with the trials beside it.
    """

    declaration: Declaration
    config: Config
    problem: Problem
    cell: Cell
    arena: Arena
    arch: str
    entry: str = "forward"
    refuses: bool = False
    with_best: bool = False
    clock: Clock = field(default_factory=Clock)
    hearing: Hearing = field(default_factory=Hearing)
    # results that an oracle will need again, by name
    notes: dict[str, Any] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)
    # truths that were computed together with those of other cases
    answers: list[Answer] = field(default_factory=list)
    gradient_answers: list[GradientAnswer] = field(default_factory=list)
    _plans: dict[str, Plan | Reply] = field(default_factory=dict)
    _beside: dict[str, Trial] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> Inputs:
        """The problem's values."""
        with self.clock.timed("generate"):
            return tensors(self.problem)

    def plan(self, entry: str) -> Plan | Reply:
        """The layout of an entry's buffers (one of `verify.variant.RUNS`), or the reply if its
        request for workspaces failed."""
        if entry not in self._plans:
            ask = partial(self._workspaces, entry) if entry in self.declaration.workspaces else None
            lse = self.declaration.contract.lse is not None
            self._plans[entry] = plan_of(self.problem, entry, lse, ask)
        return self._plans[entry]

    def _workspaces(self, entry: str, where: Plan) -> Reply:
        request = self.request(entry, where)
        return self.hearing.ask(
            self.cell, lambda: self.cell.workspace(self.declaration.path, request)
        )

    @property
    def first(self) -> Launch:
        """The run that most oracles judge."""
        return self.run("first")

    @property
    def own_softmax(self) -> bool:
        """Whether the backward on trial declares that it reads nothing that a forward saved."""
        declared = self.declaration.gradients
        return (
            self.entry == "backward" and declared is not None and declared.softmax.source == "own"
        )

    @property
    def reads_out(self) -> bool:
        """Whether the backward on trial declares that it reads the saved O."""
        declared = self.declaration.gradients
        return self.entry != "backward" or declared is None or declared.reads_out

    @property
    def saved(self) -> Launch:
        """The forward whose raw results the backward on trial gets; NaN without a launch if the
        backward declares to read nothing."""
        if "saved" not in self.launches:
            self.launches["saved"] = (
                self._unread
                if self.own_softmax
                else self._launch("saved", "nan", [self.inputs.named])
            )
        return self.launches["saved"]

    def run(self, tag: str, *, poison: str = "nan", inputs: Inputs | None = None) -> Launch:
        """Launch the entry point on trial, once per tag.  `poison` fills outputs and workspaces;
        `inputs` replace those of the problem.

        A backward gets the outputs of `saved` for any inputs; O is NaN if it declares not to read
        O.  dO is the problem's unless `inputs.others` has another one.
        """
        if tag not in self.launches:
            self.launches[tag] = self._launch(self.entry, poison, [self.given(inputs)])
        return self.launches[tag]

    def given(self, inputs: Inputs | None = None) -> Mapping[str, Tensor]:
        """What a `run` with these inputs gets, by the name of its buffer."""
        return self._for_backward | (self.inputs if inputs is None else inputs).named

    @property
    def concurrent(self) -> Launch:
        """Concurrent launches (see `verify.cell.concurrent`), on CUDA; outputs[side_name(i, "out")]
        is of launch i.

        Every second launch gets the inputs of `negated`.
        """
        if "concurrent" not in self.launches:
            given = self.inputs.named | self._for_backward
            both = (given, given | self._negated)
            self.launches["concurrent"] = self._launch(
                self.entry, "nan", [both[i % 2] for i in range(LAUNCHES)]
            )
        return self.launches["concurrent"]

    @property
    def sharing(self) -> Launch:
        """Concurrent launches that all read one copy of the inputs; outputs as in `concurrent`."""
        if SHARED not in self.launches:
            given = [self.inputs.named | self._for_backward] * LAUNCHES
            self.launches[SHARED] = self._launch(self.entry, "nan", given, SHARED)
        return self.launches[SHARED]

    def going(self, way: str, poison: str = "nan") -> Launch:
        """One launch with the case's inputs, another way (`verify.cell.ways`), once per way."""
        if way not in self.launches:
            given = self.inputs.named | self._for_backward
            self.launches[way] = self._launch(self.entry, poison, [given], way)
        return self.launches[way]

    @property
    def negated(self) -> Launch:
        """One launch with the case's inputs, the sign of every element of Q (for a backward: dO)
        flipped."""
        if "negated" not in self.launches:
            given = self.inputs.named | self._for_backward | self._negated
            self.launches["negated"] = self._launch(self.entry, "nan", [given])
        return self.launches["negated"]

    @property
    def _negated(self) -> dict[str, Tensor]:
        name = "dout" if self.entry == "backward" else "q"
        return {name: negated((self.inputs.named | self._for_backward)[name])}

    def beside(
        self, tag: str, problem: Problem, inputs: Inputs | None = None, dout: Tensor | None = None
    ) -> Trial:
        """The trial of another problem for the same kernel, with the same cell and clock; one per
        tag, which oracles can share.

        `inputs` and `dout` replace the values from its distribution and seed.  It must lie inside
        the support.
        """
        if tag not in self._beside:
            other = replace(
                self,
                problem=problem,
                with_best=False,
                notes={},
                launches={},
                answers=[],
                gradient_answers=[],
                _plans={},
                _beside={},
            )
            given = {"inputs": inputs, "dout": dout}
            # cached properties
            other.__dict__.update(
                {name: values for name, values in given.items() if values is not None}
            )
            self._beside[tag] = other
        return self._beside[tag]

    @cached_property
    def dout(self) -> Tensor:
        """The upstream gradient."""
        return dout(self.problem)

    @cached_property
    def start(self) -> tuple[Tensor, Tensor]:
        """O and natural LSE from which the gradients are computed: as saved, or exact if the
        backward does not read them."""
        if self.own_softmax:
            return self.truth.out, self.truth.lse
        assert self.saved.out is not None
        assert self.saved.lse is not None
        out = self.saved.out if self.reads_out else self.truth.out
        return out, self.natural_lse(self.saved.lse)

    @property
    def _unread(self) -> Launch:
        p = self.problem
        out, lse = (
            torch.full(p.shape_out, math.nan, dtype=p.format_out.torch),
            torch.full(p.shape_q[:3], math.nan),
        )
        return Launch(Reply("ok"), "nan", {"out": out, "lse": lse})

    @property
    def _for_backward(self) -> dict[str, Tensor]:
        if self.entry != "backward":
            return {}
        if self.refuses:
            p = self.problem
            return {
                "dout": self.dout,
                "out": torch.zeros(p.shape_out, dtype=p.format_out.torch),
                "lse": torch.zeros(p.shape_q[:3]),
            }
        found = {"dout": self.dout, **self.saved.outputs}
        if not self.reads_out and "out" in found:
            found["out"] = torch.full_like(found["out"], math.nan)
        return found

    def _launch(
        self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]], way: str = ""
    ) -> Launch:
        """Launch an entry once for each mapping in `given` (inputs by buffer name), all at the same
        time.  way: one of `verify.cell.ways`, or "" for the ordinary one."""
        with self.clock.timed("generate"):
            alone = self.plan(entry)
            if isinstance(alone, Reply):
                return Launch(alone, poison)
            where, inputs = (alone, given[0]) if len(given) == 1 else side_by_side(alone, given)
            self.arena.lay(where, inputs, poison)
        request = self.request(entry, alone)
        request |= {"concurrent": len(given) if len(given) > 1 else 0, "way": way}
        laid = True

        def launched() -> Reply:
            nonlocal laid
            if not laid:  # an earlier try has changed the buffers
                self.arena.lay(where, inputs, poison)
            laid = False
            return self.cell.run(self.declaration.path, request, self.arena)

        with self.clock.timed("run"):
            reply = self.hearing.ask(self.cell, launched)
            if reply.status not in ("ok", "unsupported"):
                return Launch(reply, poison)
            return self.read(where, reply, poison)

    def read(self, where: Plan, reply: Reply, poison: str, begin: int = 0) -> Launch:
        """The launch whose buffers begin at that byte of the arena."""
        outputs = {
            slot.name: self.arena.read(where, slot.name, begin) for slot in where.of("output")
        }
        return Launch(reply, poison, outputs, self.arena.damage(where, poison, begin))

    def request(self, entry: str, where: Plan) -> dict[str, Any]:
        """The request to launch an entry on buffers that lie like that."""
        mod = self.problem.score_mod
        output = self.problem.scaled_output
        return {
            "variant": self.declaration.name,
            "entry": entry,
            "config": self.config.name,
            "slots": where.as_data(),
            "stored": where.stored_as_data(),
            "size": where.size,
            "mask": self.problem.mask.name,
            "softmax_scale": self.problem.scale,
            "score_mod": mod.name if mod is not None else "",
            "descaling": self.problem.descaling,
        } | ({} if output is None else {"output_scale": output.scale})

    def noted(self, name: str, make: Callable[[Trial], T]) -> T:
        """What `make` returns for this trial, made once and kept under that name."""
        if name not in self.notes:
            self.notes[name] = make(self)
        found: T = self.notes[name]
        return found

    @property
    def arithmetic(self) -> ForwardArithmetic:
        """The declared arithmetic of the forward, resolved for this problem."""
        return tolerance.resolve(self.declaration.numerics, self.config, self.problem, self.arch)

    @cached_property
    def truth(self) -> Truth:
        """Reference and bounds of the declared arithmetic, and with `with_best` also the best
        bounds; without the interval of O, unless `known_truth` was read before."""
        return self._truth(self.arithmetic.without_interval)

    @cached_property
    def known_truth(self) -> Truth:
        """The `truth`, and where O lies before its last rounding if the arithmetic declares an
        order of keys."""
        if not self.arithmetic.ordered:
            return self.truth
        found = self._truth(self.arithmetic)
        self.__dict__.setdefault("truth", found)  # the same numbers, and more
        return found

    def _truth(self, arithmetic: ForwardArithmetic) -> Truth:
        return self._computed([arithmetic, *self._best])

    @property
    def asked_arithmetics(self) -> list[ForwardArithmetic]:
        """Those of `known_truth`."""
        return [self.arithmetic, *self._best]

    @property
    def _best(self) -> list[ForwardArithmetic]:
        if not self.with_best:
            return []
        return [tolerance.resolve(tolerance.BEST, self.config, self.problem, self.arch)]

    def truth_under(self, numerics: Numerics, config: Config) -> Truth:
        """The `truth` with the bounds of other numerics, and of a config of them."""
        return self.truth_of(tolerance.resolve(numerics, config, self.problem, self.arch))

    def truth_of(self, arithmetic: ForwardArithmetic) -> Truth:
        """The `truth` with the bounds of another arithmetic."""
        return self._computed([arithmetic])

    def _computed(self, arithmetics: list[ForwardArithmetic]) -> Truth:
        for answer in self.answers:
            if answer.answers(arithmetics):
                return answer.truth
        return compute_truth(self.problem, self.expanded, arithmetics, self.clock, kept=self._kept)

    @cached_property
    def _kept(self) -> Kept:
        """The reference of the problem, shared by all truths of the trial."""
        return {}

    def truth_at(self, rows: Tensor, arithmetic: ForwardArithmetic | None = None) -> Truth:
        """The `truth` of some rows alone, in that order, or that of another arithmetic; rows: int64
        positions in seqlen_q."""
        arithmetic = arithmetic or self.arithmetic.without_interval
        return compute_truth(self.problem, self.expanded, [arithmetic], self.clock, rows)

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v at their full logical shapes, descales applied."""
        return dequantised(self.problem, self.inputs)

    @cached_property
    def gradients(self) -> GradientTruth:
        """Reference gradients and their bounds, from the O and LSE of `start`; without their
        intervals, unless `known_gradients` was read before."""
        declared = self.declaration.gradients
        assert declared is not None
        return self._gradients(declared, intervals=False)

    @cached_property
    def known_gradients(self) -> GradientTruth:
        """The `gradients`, and where they lie before their last rounding."""
        declared = self.declaration.gradients
        assert declared is not None
        found = self.gradients_under(declared)
        self.__dict__.setdefault("gradients", found)  # the same numbers, and more
        return found

    def gradients_under(self, declared: GradientNumerics) -> GradientTruth:
        """The `known_gradients`, with the bounds of other numerics; from the exact O and LSE if
        these have a softmax of their own."""
        return self._gradients(declared, intervals=True)

    def _gradients(self, declared: GradientNumerics, *, intervals: bool) -> GradientTruth:
        arithmetics = self._gradient_arithmetics(declared, intervals=intervals)
        for answer in self.gradient_answers:
            if answer.arithmetics == arithmetics:
                return answer.truth
        question = self._gradient_question(declared, arithmetics)
        with self.clock.timed("bound"):
            return question.computed()

    @property
    def gradient_question(self) -> GradientQuestion:
        """That of `known_gradients`."""
        declared = self.declaration.gradients
        assert declared is not None
        return self._gradient_question(
            declared, self._gradient_arithmetics(declared, intervals=True)
        )

    def _gradient_arithmetics(
        self, declared: GradientNumerics, *, intervals: bool
    ) -> tuple[GradientArithmetic, ...]:
        """The declared arithmetic and with `with_best` also the best one."""
        resolved = backward.resolve(declared, self.config, self.problem, self.arch)
        resolved = replace(resolved, intervals=intervals)
        if self.declaration.undeclared:
            resolved = backward.anyhow(resolved)
        if not self.with_best:
            return (resolved,)
        return resolved, backward.resolve(backward.BEST, self.config, self.problem, self.arch)

    def _gradient_question(
        self, declared: GradientNumerics, arithmetics: tuple[GradientArithmetic, ...]
    ) -> GradientQuestion:
        exact = declared.softmax.source == "own"
        truth = self.truth if self.declaration.undeclared else None
        return GradientQuestion(
            self.problem,
            self.expanded,
            self.dout,
            (self.truth.out, self.truth.lse) if exact else self.start,
            arithmetics,
            None if truth is None else OwnForward(truth.out_bound, truth.lse_bound),
        )

    def natural_lse(self, lse: Tensor) -> Tensor:
        """A raw LSE as an fp64 natural logarithm."""
        factor = math.log(2) if self.declaration.contract.lse == "base2" else 1.0
        return lse.double() * factor
