"""What a CUDA source includes: its binary, its edits and its source hash depend on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)


@dataclass(frozen=True)
class Included:
    """A file of a source.

    path: without symbolic links.  name: as the first `#include` of it says.  digest: SHA-256 of its
    text.
    """

    path: Path
    name: str
    digest: bytes


def included(source: Path, directories: Sequence[Path]) -> list[Included]:
    """The source and all headers that it includes, directly or not, even under a false `#if`.

    A header is looked for beside the file that includes it, then in `directories`, in their order;
    one that is nowhere is left out.  Raises OSError if the source cannot be read.
    """
    pending, found = [(source.resolve(), source.name)], dict[Path, Included]()
    while pending:
        file, name = pending.pop()
        if file in found:
            continue
        status = file.stat()
        digest, names = _scan(file, status.st_mtime_ns, status.st_size)
        found[file] = Included(file, name, digest)
        for header in names:
            places = (directory / header for directory in (file.parent, *directories))
            pending += [(place.resolve(), header) for place in places if place.is_file()][:1]
    return list(found.values())


@cache
def _scan(file: Path, modified: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    """A file's digest and the headers that it includes; cached per modification time and size."""
    text = file.read_bytes()
    return sha256(text).digest(), tuple(name.decode() for name in _INCLUDE.findall(text))
