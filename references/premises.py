"""Premises: properties of attention that an oracle can need and a feature can break.

The vocabulary is closed: a feature (a score mod, a storage, a quantisation) names the premises that
it breaks, an oracle names those that it needs, and the judge compares the two.  A feature breaks
all by default, so no oracle judges a feature that it does not know.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Premise(StrEnum):
    """One property of plain attention, O = softmax(scale Q K^T) V, that a feature can take away."""

    LINEAR_SCORES = "linear_scores"
    """A score is softmax_scale q . k, plus a term that depends on neither q nor k."""

    POSITION_FREE_SCORES = "position_free_scores"
    """A score depends on the values of q and k alone, not on batch, head, row or key."""

    UNBOUNDED_SCORES = "unbounded_scores"
    """A larger q gives larger scores, without a limit."""

    NORM_BOUNDED_SCORES = "norm_bounded_scores"
    """No score is larger in size than |softmax_scale| |q| |k|: with q = 0 every score is 0."""

    SCALE_HOMOGENEOUS = "scale_homogeneous"
    """Multiplying Q by a power of two and dividing K by it changes no bit of a score."""

    ROWS_AVERAGE_VALUES = "rows_average_values"
    """The weights of a row that sees a key are at least 0, and their sum is 1."""

    VISIBLE_MASS_ONLY = "visible_mass_only"
    """A row's O, LSE and gradients depend on the keys that it sees and on nothing else."""

    HIDDEN_HAS_NO_EFFECT = "hidden_has_no_effect"
    """Keys that a row does not see, queries of other rows and other heads do not change the row."""

    LINEAR_IN_VALUES = "linear_in_values"
    """O is linear in V, and the gradients are linear in dO."""

    PLAIN_INPUTS = "plain_inputs"
    """Q, K and V are the stored numbers: they have no factors."""

    FACTORS_BY_HEAD = "factors_by_head"
    """All elements of a key head, and of the query heads that read it, share one factor."""

    FACTORS_BY_ROW = "factors_by_row"
    """All elements of a query share one factor, and so do all elements of a key and of a value."""

    STRIDED_STORAGE = "strided_storage"
    """A kernel sees each tensor as a strided view."""

    EXACT_OUTPUT = "exact_output"
    """O is rounded once to its dtype, and not scaled before."""

    KNOWN_OUTPUT = "known_output"
    """O is rounded once to its dtype; it may be multiplied by one known factor before, and cut to
    the largest finite number."""


class Feature(Protocol):
    """A property beyond plain attention: a score mod, a storage, a quantisation."""

    @property
    def label(self) -> str:
        """One or two words for messages and tables: "softcap", "descales by head"."""

    @property
    def breaks(self) -> frozenset[Premise]:
        """The premises that do not hold with this feature."""


EVERY_PREMISE = frozenset(Premise)
"""The premises that a feature breaks by default."""
