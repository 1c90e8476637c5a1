"""Trial: one case while it is judged.  All oracles of the case share its launches and truths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from verify.judging.gradient_truth import GradientAnswer, GradientQuestion
from verify.judging.launched import Launched
from verify.judging.truth import Answer, Kept, Truth, compute_truth
from verify.problem import Problem
from verify.problem.inputs import Inputs
from verify.tolerance import backward
from verify.tolerance import forward as tolerance
from verify.tolerance.backward import GradientArithmetic, GradientTruth, OwnForward
from verify.tolerance.forward import ForwardArithmetic
from verify.variant import Config, GradientNumerics, Numerics

T = TypeVar("T")


@dataclass
class Trial(Launched):
    """A case, its launches (`Launched`) and its truths: references and bounds, each computed when
    it is first read.

    answers, gradient_answers: truths that were computed together with those of other cases.
    """

    answers: list[Answer] = field(default_factory=list)
    gradient_answers: list[GradientAnswer] = field(default_factory=list)
    _beside: dict[str, Trial] = field(default_factory=dict)

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

    def noted(self, name: str, make: Callable[[Trial], T]) -> T:
        """What `make` returns for this trial, made once and kept under that name."""
        if name not in self.notes:
            self.notes[name] = make(self)
        found: T = self.notes[name]
        return found

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

    def truth_under(self, numerics: Numerics, config: Config) -> Truth:
        """The `truth` with the bounds of other numerics, and of a config of them."""
        return self.truth_of(tolerance.resolve(numerics, config, self.problem, self.arch))

    def truth_of(self, arithmetic: ForwardArithmetic) -> Truth:
        """The `truth` with the bounds of another arithmetic."""
        return self._computed([arithmetic])

    def truth_at(self, rows: Tensor, arithmetic: ForwardArithmetic | None = None) -> Truth:
        """The `truth` of some rows alone, in that order, or that of another arithmetic; rows: int64
        positions in seqlen_q."""
        arithmetic = arithmetic or self.arithmetic.without_interval
        return compute_truth(self.problem, self.expanded, [arithmetic], self.clock, rows)

    @property
    def asked_arithmetics(self) -> list[ForwardArithmetic]:
        """Those of `known_truth`."""
        return [self.arithmetic, *self._best]

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

    @property
    def gradient_question(self) -> GradientQuestion:
        """That of `known_gradients`."""
        declared = self.declaration.gradients
        assert declared is not None
        return self._gradient_question(
            declared, self._gradient_arithmetics(declared, intervals=True)
        )

    def _truth(self, arithmetic: ForwardArithmetic) -> Truth:
        return self._computed([arithmetic, *self._best])

    @property
    def _best(self) -> list[ForwardArithmetic]:
        if not self.with_best:
            return []
        return [tolerance.resolve(tolerance.BEST, self.config, self.problem, self.arch)]

    def _computed(self, arithmetics: list[ForwardArithmetic]) -> Truth:
        for answer in self.answers:
            if answer.answers(arithmetics):
                return answer.truth
        return compute_truth(self.problem, self.expanded, arithmetics, self.clock, kept=self._kept)

    @cached_property
    def _kept(self) -> Kept:
        """The reference of the problem, shared by all truths of the trial."""
        return {}

    def _gradients(self, declared: GradientNumerics, *, intervals: bool) -> GradientTruth:
        arithmetics = self._gradient_arithmetics(declared, intervals=intervals)
        for answer in self.gradient_answers:
            if answer.arithmetics == arithmetics:
                return answer.truth
        question = self._gradient_question(declared, arithmetics)
        with self.clock.timed("bound"):
            return question.computed()

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
