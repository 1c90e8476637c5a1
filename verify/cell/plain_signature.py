"""The signature of a plain function: which of its parameters say what it can do, and how it is
called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from references.masks import Causal, Full, Window, mask_words
from verify.variant import AttentionArgs, DeclarationError

# Known names of parameters, by purpose.
_CAUSAL = ("causal", "is_causal")
_SCALE = ("softmax_scale", "sm_scale", "scale")
_MASK = ("attn_mask", "mask")
_WINDOW = ("window_size",)
_SOFTCAP = ("softcap",)
_GROUPED = ("enable_gqa",)
_PURPOSES = ("causal", "scale", "mask", "window", "softcap", "grouped")
_KNOWN = (*_CAUSAL, *_SCALE, *_MASK, *_WINDOW, *_SOFTCAP, *_GROUPED)


@dataclass(frozen=True)
class Signature:
    """A function's parameters other than q, k and v: the name for each purpose, or None."""

    causal: str | None
    scale: str | None
    mask: str | None
    window: str | None
    softcap: str | None
    grouped: str | None
    required: frozenset[str]  # those without a default, which every call passes

    @staticmethod
    def of(function: Callable[..., Any]) -> Signature:
        """The signature of a function.  Raises DeclarationError for an unknown parameter without a
        default."""
        parameters = dict(inspect.signature(function).parameters)
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first = [name for name, each in parameters.items() if each.kind in by_position][:3]
        variadic = [each.kind for each in parameters.values()]
        if len(first) < 3 and inspect.Parameter.VAR_POSITIONAL not in variadic:
            raise DeclarationError(
                f"{function.__name__}: does not take three tensors q, k and v by position"
            )
        others = {name: each for name, each in parameters.items() if name not in first}
        loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        empty = inspect.Parameter.empty
        required = frozenset(name for name, each in others.items() if each.default is empty)
        for name in (name for name in others if name in required):
            if name not in _KNOWN and others[name].kind not in loose:
                raise DeclarationError(
                    f"{function.__name__}: unknown parameter {name!r} has no default (known:"
                    f" {', '.join(_KNOWN)}); give it one, or{how_to_call(list(required))}"
                )
        named = zip(_PURPOSES, (_CAUSAL, _SCALE, _MASK, _WINDOW, _SOFTCAP, _GROUPED), strict=True)
        told = {  # a mask that is named by a text is no tensor
            name
            for name, each in others.items()
            if not (name in _MASK and isinstance(each.default, str))
        }
        by_purpose: dict[str, Any] = {
            purpose: next((name for name in names if name in told), None)
            for purpose, names in named
        }
        return Signature(**by_purpose, required=required)

    @property
    def masks(self) -> tuple[str, ...]:
        """The mask kinds that can be drawn: only square ones, for which both alignments agree."""
        causal = self.causal or self.mask or self.window
        return (
            "full",
            *(("causal.square",) if causal else ()),
            *(("window.square",) if self.window else ()),
        )

    def masks_of(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        """The wanted mask kinds, by default `masks`.  Raises DeclarationError for one that the
        function has no parameter for."""
        if wanted is None:
            return self.masks
        flags = ("causal", "causal.tl") if self.causal or self.mask else ()
        legal = tuple(dict.fromkeys((*self.masks, *flags, *(mask_words() if self.mask else ()))))
        for word in wanted:
            if word not in legal:
                raise DeclarationError(
                    f"MASKS: {word!r} cannot be passed to this function, only {', '.join(legal)}"
                )
        if self.mask is None and {"causal", "causal.tl"} <= set(wanted):
            raise DeclarationError("MASKS: one flag is no two alignments: causal or causal.tl")
        return tuple(wanted)

    def keywords(self, args: AttentionArgs) -> dict[str, Any]:
        """The keyword arguments of a call.  A window is (left, right) as in flash-attn, -1 for an
        open side.

        Flags are always passed: a function may be causal by default.
        """
        keywords: dict[str, Any] = {
            name: False for name in (self.causal, self.grouped) if name is not None
        }
        if self.mask is not None and self.mask in self.required:
            keywords[self.mask] = None
        window = (-1, -1)
        if isinstance(args.mask, Window):
            window = _side(args.mask.left), _side(args.mask.right)
        elif isinstance(args.mask, Causal) and self.causal is not None:
            keywords[self.causal] = True
        elif isinstance(args.mask, Causal) and self.window is not None:
            window = (-1, 0)
        elif not isinstance(args.mask, Full) and self.mask is not None:
            shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
            keywords[self.mask] = args.mask.dense(*shape, device=args.q.device).contiguous()
        if self.window is not None:
            keywords[self.window] = window
        if self.scale is not None:
            keywords[self.scale] = args.softmax_scale
        if self.softcap is not None:
            keywords[self.softcap] = args.softcap
        if self.grouped is not None and args.heads_q != args.heads_kv:
            keywords[self.grouped] = True
        return keywords


def _side(tokens: int | None) -> int:
    return -1 if tokens is None else tokens


def packs(parameters: Sequence[str]) -> bool:
    """Whether the names are those of packed sequences or of a paged cache."""
    return any(name.startswith(("cu_seqlens", "block_table", "page_table")) for name in parameters)


def how_to_call(parameters: Sequence[str]) -> str:
    """What to write around a function that has further parameters."""
    if packs(parameters):
        return (
            " write an attention(q, k, v) around it that packs its tensors, or declare a VARIANT"
            " (docs/adding-a-kernel.md)"
        )
    return " write an attention(q, k, v) around it that passes one"
