"""What a package documents of its arithmetic, for a function that has its signature."""

from __future__ import annotations

from dataclasses import replace

import torch

from verify.adapters import Adapter
from verify.variant import Variant


def as_documented(adapter: Adapter, own: Variant, backward: Variant | None) -> tuple[Variant, ...]:
    """The variants of a function and of its gradients, with the documented arithmetic; unavailable,
    with the reason, where the adapter says one."""
    if adapter.no_gradients and backward is not None:
        backward = replace(backward, available=lambda: adapter.no_gradients)
    if adapter.numerics is not None:
        gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        documented = adapter.numerics(gpu)
        if isinstance(documented, str):
            reason = documented
            own = replace(own, available=lambda: reason)
        else:
            own = replace(own, numerics=documented)
    return (own,) if backward is None else (own, backward)
