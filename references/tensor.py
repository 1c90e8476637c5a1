"""torch, imported when it is first used.

The names of masks, score functions and problems can be read without torch, whose import takes more
than a second.  Modules that read or write names import `Tensor` and `torch` from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    Tensor = Any
    torch = _Torch()

__all__ = ["Tensor", "torch"]
