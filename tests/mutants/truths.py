"""References and bounds, computed once for all mutants of a kernel.

They depend on inputs, declarations and what a saving forward left, which are the key.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from verify.judging import trial
from verify.judging.truth import Clock
from verify.oracles import bound
from verify.tolerance import backward

_MOST = 500  # results kept, of about a megabyte each
# What `bound` measures for reports: it takes a third of its time.
_NUMBERS = ("forward_measures", "gradient_measures", "forward_power", "gradient_power")


@dataclass
class Memory:
    """The results of a function by its arguments, tensors by their bytes; the least recently used
    ones are forgotten."""

    function: Callable[..., Any]
    kept: OrderedDict[str, Any] = field(default_factory=OrderedDict)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The function's result for these arguments."""
        key = hashlib.sha256(repr((key_of(given), key_of(sorted(named.items())))).encode())
        name = key.hexdigest()
        if name not in self.kept:
            self.kept[name] = self.function(*given, **named)
            if len(self.kept) > _MOST:
                self.kept.popitem(last=False)
        self.kept.move_to_end(name)
        return self.kept[name]


def key_of(given: Any) -> object:
    """What tells one argument from another, as something whose repr is complete.  A clock has no
    say."""
    if isinstance(given, Tensor):
        data = given.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return given.dtype, tuple(given.shape), hashlib.sha256(data).hexdigest()
    if isinstance(given, tuple | list):
        return [key_of(each) for each in given]
    if isinstance(given, Clock):
        return None
    if is_dataclass(given) and any(isinstance(each, Tensor) for each in vars(given).values()):
        return [key_of(getattr(given, each.name)) for each in fields(given)]
    return given


@contextmanager
def remembered() -> Iterator[None]:
    """While it is open, trials compute no truth twice, and no numbers that are no verdicts."""
    with ExitStack() as stack:
        for module, name in ((trial, "compute_truth"), (backward, "gradient_truth")):
            stack.enter_context(patch.object(module, name, Memory(getattr(module, name))))
        for name in _NUMBERS:
            stack.enter_context(patch.object(bound, name, lambda *given: {}))
        yield
