"""Untrusted text: makes text from a kernel process safe to show and to store."""

from __future__ import annotations

import unicodedata
from typing import Any

_MAX_CHARACTERS = 16_000  # in one text: a long traceback fits
# Control characters, format characters (they can change the direction of text), lone surrogates,
# line and paragraph separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str) -> str:
    r"""The text with every unsafe character written as an escape: \x1b, \u202e, \udcff.

    A character is unsafe if a terminal or a file could show it as something else.  Newlines and
    tabs stay.  A text that is too long is cut, and ends with the number of missing characters.
    """
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]} ... ({len(text) - _MAX_CHARACTERS} more characters)"
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


def visible_data(data: Any) -> Any:
    """JSON data with `visible` applied to all texts and keys.  `protocol.receive` limits its size
    and its depth."""
    if isinstance(data, str):
        return visible(data)
    if isinstance(data, list):
        return [visible_data(item) for item in data]
    if isinstance(data, dict):
        return {visible(key): visible_data(value) for key, value in data.items()}
    return data


def _escaped(character: str) -> str:
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
