"""Adapters: how functions of well-known signatures are called, one file each, by the name of the
function.

`LIKE = "flash_attn_func"` in a kernel file, or `like=` of `verify.check`, says that a function has
such a signature.  The file defines ADAPTER: what the package documents, and nothing that it only
happens to do.  A kernel process imports this package, so it imports nothing of the judge but
`verify.variant` and `references`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from references.tensor import Tensor
from verify.variant import AttentionArgs, Support
from verify.variant.checks import one_of

NAMES = tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))
"""The names of the signatures."""


REFUSED = {
    "sageattn": "SageAttention rounds Q and K to 8-bit integers with a scale for each block, after"
    " it has subtracted the mean of K, and P and V to float8 or float16; no part of Numerics says"
    " so, so no bound of it is derived, and that of another signature would convict a right kernel",
}
"""Signatures that are known and have no adapter, and why."""


def signature(value: object) -> object:
    """The name of a signature.  Raises ValueError that says which there are."""
    if isinstance(value, str) and value in REFUSED:
        raise ValueError(f"{value!r} is not judged: {REFUSED[value]}")
    return one_of(*NAMES)(value)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A public signature.

    layout: of q, k, v and out, "bhsd" (batch, heads, seqlen, head_dim) or "bshd" (batch, seqlen,
    heads, head_dim).  support: what the package documents for it.  call(function, args, q, k, v)
    returns O; q, k and v are those of args in the layout.
    """

    layout: str
    support: Support
    call: Callable[[Callable[..., Any], AttentionArgs, Tensor, Tensor, Tensor], Any]


def adapter_named(name: str) -> Adapter:
    """The adapter of that file.  name: one of NAMES."""
    found: Adapter = importlib.import_module(f"{__name__}.{name}").ADAPTER
    return found
