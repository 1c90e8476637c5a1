"""How long a test of a campaign takes, roughly: what takes long begins first."""

from __future__ import annotations

import pytest
from hypothesis import settings

_EXAMPLE = 0.04  # seconds of a drawn problem on a GPU, where there are many
_LONG = 2.0  # seconds from which on a test that draws is a long one


def seconds(item: pytest.Item) -> float:
    """As its mark `long` says, or as the profile has it draw many problems; 0 for a short one."""
    mark = item.get_closest_marker("long")
    said = 0.0 if mark is None else float(mark.args[0])
    drawn = settings().max_examples * _EXAMPLE if draws(item) else 0.0
    return max(said, drawn if drawn >= _LONG else 0.0)


def draws(item: pytest.Item) -> bool:
    """Whether Hypothesis draws what the test asks."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
