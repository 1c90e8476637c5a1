"""Brief: values cut short for one-line messages.  Imports nothing, so that cells and commands can
have it alike."""

from __future__ import annotations


def shown(value: object) -> str:
    """A value for a message, on one line and no longer than that takes."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
