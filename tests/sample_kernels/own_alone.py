"""Backwards alone, each with a softmax of its own, no forward and nothing saved: a right one, and
one without delta."""

from own_softmax import RIGHT, SUPPORT, backward, without_delta

from verify.variant import GradientNumerics, Variant

GRADIENTS = GradientNumerics(
    softmax="own",
    operands="float32",
    exp="vexp",
    probability="float32",
    score_gradient="float32",
    block_m=0,
    block_n=0,
)


def alone(name, entry):
    return Variant(name=name, family="torch", backward=entry, support=SUPPORT, gradients=GRADIENTS)


VARIANTS = [alone("right", backward), alone("without-delta", without_delta)]
assert RIGHT.gradients == GRADIENTS
