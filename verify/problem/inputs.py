"""From a Problem to its tensors: the same bits on every machine, in every process, with any number
of threads.

`tensors` and `dout` give logical values; how they lie in memory is the arena's concern.
Values are drawn in float64 by `verify.problem.distributions` and rounded by `cast`, an integer
algorithm, because casts differ between devices (and between the Triton interpreter, torch and
ml_dtypes).  The distributions whose answer an oracle knows are in `verify.problem.known_answers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from references.premises import Premise
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.rounding import cast
from verify.problem import Problem, ProblemError
from verify.problem.distributions import DISTRIBUTIONS, Distribution
from verify.problem.known_answers import GATHERS, gather_possible
from verify.problem.source import FIVE_INTEGERS, NORMAL, Source, stored


@dataclass(frozen=True)
class Inputs:
    """Logical values of q, k and v: contiguous CPU tensors (batch, heads, seqlen, dim) in the
    problem's dtype.

    A dimension that the tensor's layout expands has size 1: it is stored once.  others: what else a
    run reads, by the name of its buffer ("descale_q", "dout"...), stored the same way.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Tensor]:
        """All of them by the name of their buffer."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.others}


def tensors(problem: Problem, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a problem, the factors of its quantisation among them.

    device: where they are made, with the same bits on each.  Raises ProblemError if the problem's
    distribution is unknown or impossible for it.
    """
    place = torch.device(device)
    drawn = _distribution(problem).fill(Source(problem, place))
    q, k, v = (stored(values, problem.format) for values in drawn)
    return Inputs(q, k, v, stored_factors(problem, place))


def stored_factors(problem: Problem, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """float32 factors of the problem's quantisation by the name of their buffer, as stored.

    Of eight significant bits, in [1/4, 4).  Where an oracle must know O bit for bit, powers of two,
    and those of q and k cancel: their product is 1 for a head's own factors, and another head's
    would show.  If a head has several, those of q and k are 1.
    """
    source, exact = Source(problem, torch.device(device)), _distribution(problem).oracle
    several = Premise.FACTORS_BY_HEAD in problem.quantisation.breaks
    found = {}
    for buffer, shape in problem.quantisation.stored(problem.shapes).items():
        name = buffer.removeprefix("descale_")
        stream = "q" if name == "k" and exact else name
        words = source.words(stream, "descale", shape).long()
        powers = [0.25, 0.5, 1.0, 2.0]
        if exact:
            powers = [1 / power for power in powers] if name == "k" else powers
            powers = powers if not several or name == "v" else [1.0] * 4
        mantissa = 128 if exact else 128 + (words >> 2 & 127).double()
        values = source.floats(powers)[words & 3] * mantissa / 128.0
        found[buffer] = cast(values, dtype_named("float32"))
    return found


def unit_factors(problem: Problem) -> dict[str, Tensor]:
    """The factors of the problem's quantisation as stored, all 1."""
    stored = problem.quantisation.stored(problem.shapes)
    return {name: torch.ones(shape) for name, shape in stored.items()}


def dequantised(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v at their full logical shapes: views of what the kernel gets; 8-bit ones in fp64,
    times their factors."""

    def whole(name: str) -> Tensor:
        tensor: Tensor = getattr(inputs, name).expand(problem.shapes[name])
        if tensor.dtype.itemsize == 1:  # torch computes nothing with them
            tensor = tensor.double()
        return problem.quantisation.dequantise(name, tensor, inputs.others, problem.shapes)

    return whole("q"), whole("k"), whole("v")


def check_distribution(problem: Problem) -> None:
    """Raise ProblemError, in one line, if the problem's distribution is unknown or impossible for
    it."""
    _distribution(problem)
    reason = gather_possible(problem) if problem.distribution in GATHERS else None
    if reason is not None:
        raise ProblemError(f"distribution: {problem.distribution} cannot be built: {reason}")


def dout(problem: Problem, device: torch.device | str = "cpu") -> Tensor:
    """The upstream gradient dO, (batch, heads_q, seqlen_q, head_dim_v) in O's dtype, contiguous, on
    that device.

    N(0, 1), or integers in [-2, 2] where the distribution is made of integers.
    """
    source = Source(problem, torch.device(device))
    purpose, table = "normal", NORMAL
    if _distribution(problem).integer_dout:
        purpose, table = "integers", FIVE_INTEGERS
    return stored(source.picked("out", purpose, table), problem.format_out)


def _distribution(problem: Problem) -> Distribution:
    try:
        return DISTRIBUTIONS[problem.distribution]
    except KeyError:
        raise ProblemError(
            f"distribution: {problem.distribution!r} is none of {', '.join(DISTRIBUTIONS)}"
        ) from None
