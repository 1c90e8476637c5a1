"""Edited builds: a CUDA source and its headers with a part of their text replaced, on disk.

A known-bad copy of a kernel and a build with delays at its barriers are edits of the shipped text,
so that they follow it.  An edit says how often its pattern occurs; any other number is an error.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from verify.cuda.compile import HEADERS, Source, cache_directory
from verify.cuda.includes import included


class EditError(ValueError):
    """A pattern does not occur as often as its edit says; nothing was written."""


@dataclass(frozen=True)
class Edit:
    """`pattern`, a regular expression, becomes `after`.

    times: how often it occurs in all of a source's files together; None: at least once.
    """

    pattern: str
    after: str
    times: int | None = 1

    def apply(self, texts: dict[str, str]) -> dict[str, str]:
        """The edited texts, by their keys.  Raises EditError."""
        done = {name: re.subn(self.pattern, self.after, text) for name, text in texts.items()}
        count = sum(times for _, times in done.values())
        if count != self.times and (self.times is not None or not count):
            wanted = "at least once" if self.times is None else f"{self.times} times"
            raise EditError(
                f"{self.pattern!r} occurs {count} times in {', '.join(texts)}; the edit needs it"
                f" {wanted}"
            )
        return {name: text for name, (text, _) in done.items()}


def texts_of(source: Source) -> dict[str, str]:
    """The texts of a source and of its own headers, by the names under which they are included.

    Its own are those beside it and in kernels/cuda; a library's are not.
    """
    files = included(source.path, (source.path.resolve().parent, HEADERS))
    return {file.name: file.path.read_text(encoding="utf-8") for file in files}


def edited(source: Source, edits: Iterable[Edit], before: str = "") -> Source:
    """The source with its texts edited, one edit after the other, in a folder of the cache.

    before: a text that comes before the source's own.  Raises EditError.
    """
    texts = texts_of(source)
    for edit in edits:
        texts = edit.apply(texts)
    texts[source.path.name] = before + texts[source.path.name]
    key = sha256(repr((str(source.path), sorted(texts.items()))).encode()).hexdigest()[:24]
    folder = cache_directory() / "edited" / key
    if not folder.is_dir():
        _write(folder, texts)
    return replace(source, path=folder / source.path.name)


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write the texts into a new folder, which appears with all of them at once.

    A file that another process compiles must not be replaced, even by the same text: the new one
    can get the inode of a header that NVRTC has read, whose `#pragma once` then hides it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as own:
        whole = Path(own, "whole")
        for name, text in texts.items():
            path = whole / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # no other process was first
                raise
