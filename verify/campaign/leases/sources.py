"""Sources: one hash of every file that decides about a campaign, which client and workers compare.

The judge, the references, the property tests, the collection's kernels, and the files that the
command names.  Imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from verify.bundle import ROOT, judge_sources
from verify.machine.settings import KIND_FILES

_FOLDERS = ("kernels", "tests/properties")
_FILES = ("conftest.py", "pyproject.toml")
GIVEN = "VERIFY_LEASED_FILES"
"""Internal variable of a worker's session: kernels and oracles that the command names."""


def sources_hash(given: Iterable[Path] | None = None) -> str:
    """The hash of the files here; given: those that the command names, by default those of the
    session's variables.  Raises OSError for one that cannot be read."""
    if given is None:
        given = [Path(each) for each in os.environ.get(GIVEN, "").split(os.pathsep) if each]
    kinds = [Path(each) for each in os.environ.get(KIND_FILES, "").split(os.pathsep) if each]
    named = dict(judge_sources())
    for folder in _FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                named[path.relative_to(ROOT).as_posix()] = path
    named |= {name: ROOT / name for name in _FILES}
    digest = sha256()
    for name in sorted(named):
        digest.update(f"{name}\n".encode() + named[name].read_bytes())
    for path in (*given, *kinds):  # a file of another folder is the same file
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
