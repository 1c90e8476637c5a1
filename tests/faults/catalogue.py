"""All faults, and the classes of bugs that cannot be planted here."""

from tests.faults import (
    arithmetic,
    backward,
    described,
    fp8,
    fp8_transposed,
    gradients,
    layouts,
    masks,
    split,
)
from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *masks.FAULTS,
    *layouts.FAULTS,
    *arithmetic.FAULTS,
    *backward.FAULTS,
    *gradients.FAULTS,
    *fp8.FAULTS,
    *fp8_transposed.FAULTS,
    *split.FAULTS,
    *described.FAULTS,
)
