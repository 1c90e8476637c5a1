"""Backwards alone, each with a softmax of its own, no forward and nothing saved: a right one, and
one without delta."""

from own_softmax import RIGHT, SUPPORT, backward, without_delta

from verify.variant import (
    GradientNumerics,
    GradientProducts,
    GradientSoftmax,
    GradientSums,
    ScoreGradient,
    Variant,
)

GRADIENTS = GradientNumerics(
    products=GradientProducts(operands="float32"),
    softmax=GradientSoftmax(source="own", exp="vexp", probability="float32"),
    score_gradient=ScoreGradient(dtype="float32"),
    sums=GradientSums(block_m=0, block_n=0),
)


def alone(name, entry):
    return Variant(name=name, family="torch", backward=entry, support=SUPPORT, gradients=GRADIENTS)


VARIANTS = [alone("right", backward), alone("without-delta", without_delta)]
assert RIGHT.gradients == GRADIENTS
