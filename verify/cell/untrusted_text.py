"""Words of a cell: text that a kernel had a hand in, made fit to be shown and stored."""

from __future__ import annotations

import unicodedata
from typing import Any

_MOST = 16_000  # characters of one text: a page of a traceback, not a flood
# Controls, format characters (among them those that turn the direction of text), lone surrogates,
# line and paragraph ends.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str) -> str:
    r"""`text` with each character that a terminal or a file may not show as it is written as an
    escape: \x1b, \u202e, \udcff.

    Newlines and tabs stay.  What is too long is cut, and says so.
    """
    if len(text) > _MOST:
        text = f"{text[:_MOST]} ... ({len(text) - _MOST} more characters)"
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def visible_data(data: Any) -> Any:
    """JSON data with all its texts `visible`, keys included; for data of a size that wire.receive
    lets through."""
    if isinstance(data, str):
        return visible(data)
    if isinstance(data, list):
        return [visible_data(item) for item in data]
    if isinstance(data, dict):
        return {visible(key): visible_data(value) for key, value in data.items()}
    return data


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
