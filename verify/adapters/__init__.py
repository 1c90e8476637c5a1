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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from references.tensor import Tensor
from verify.variant import AttentionArgs, Numerics, Support
from verify.variant.checks import one_of

NAMES = tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))
"""The names of the signatures."""


def signature(value: object) -> object:
    """The name of a signature.  Raises ValueError that says which there are."""
    return one_of(*NAMES)(value)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A public signature.

    layout: of q, k, v and out, "bhsd" (batch, heads, seqlen, head_dim) or "bshd" (batch, seqlen,
    heads, head_dim).  support: what the package documents for it.  call(function, args, q, k, v)
    returns O, or O and LSE; q, k and v are those of args in the layout.

    layouts: of a function that takes several, the keywords of a call by layout.

    lse: the parameter that asks for the LSE as a second result, and what that is, as
    `Contract.lse`.  A function without that parameter gives none; neither does any if lse is None.

    numerics(capability): the arithmetic that the package documents for a GPU of that compute
    capability, or for a CPU (None); a text says why it is not judged there.  Without it a function
    is judged by the weakest honest arithmetic.

    no_gradients: why gradients are not judged; "" if they are.
    """

    layout: str
    support: Support
    call: Callable[[Callable[..., Any], AttentionArgs, Tensor, Tensor, Tensor], Any]
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lse: tuple[str, str] | None = None
    numerics: Callable[[tuple[int, int] | None], Numerics | str] | None = None
    no_gradients: str = ""


def adapter_named(name: str) -> Adapter:
    """The adapter of that file.  name: one of NAMES."""
    found: Adapter = importlib.import_module(f"{__name__}.{name}").ADAPTER
    return found
