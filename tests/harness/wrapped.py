"""Markdown of lines of at most 100 columns, for documents that are generated."""

from __future__ import annotations

import re
from collections.abc import Iterator

WIDTH = 100
# A code span is one word: wherever it is cut, its pieces could begin a block of their own.
_WORD = re.compile(r"(?:`[^`]*`|\S)+")
# At the beginning of a line Markdown takes these for a list, a heading, a quote or a table.
_BEGINS_BLOCK = re.compile(r"[-+*]$|#+$|>|\||=+$|\d+[.)]$")


def wrapped(text: str, indent: str = "") -> str:
    """The paragraph in lines; all but the first one begin with `indent`."""
    return "\n".join(_lines(text, "", indent))


def item(text: str) -> str:
    """An item of a list."""
    return "\n".join(_lines(text, "- ", "  "))


def _lines(text: str, first: str, others: str) -> Iterator[str]:
    """Lines that begin with those texts."""
    line, has_word = first, False
    for word in _WORD.findall(text):
        longer = f"{line} {word}" if has_word else f"{line}{word}"
        if has_word and len(longer) > WIDTH and not _BEGINS_BLOCK.match(word):
            yield line
            longer = f"{others}{word}"
        line, has_word = longer, True
    yield line
