"""Shipped CUDA sources with one line changed: what a slip of the hand would have made of them.

A patch names a text that must occur exactly once in the shipped file; the patched kernel is
compiled and launched by the shipped kernel's own machinery.
"""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from verify.cuda.compile import Source, cache_directory


@dataclass(frozen=True)
class Patch:
    """`before`, which occurs exactly once in the shipped file, becomes `after`."""

    shipped: Path
    before: str
    after: str

    def apply(self, text: str) -> str:
        """The patched text; raises ValueError if `before` does not occur exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(
                f"{self.before!r} occurs {text.count(self.before)} times in {self.shipped.name}"
            )
        return text.replace(self.before, self.after)

    def source(self, variant: str, shipped: Source) -> Source:
        """The shipped source and the headers beside it, one of them patched, in a folder of the
        variant on disk."""
        folder = cache_directory() / variant
        folder.mkdir(parents=True, exist_ok=True)
        for path in (shipped.path, *shipped.path.parent.glob("*.cuh")):
            text = path.read_text(encoding="utf-8")
            text = self.apply(text) if path == self.shipped else text
            with tempfile.NamedTemporaryFile(
                "w", dir=folder, delete=False, encoding="utf-8"
            ) as file:
                file.write(text)
            os.replace(file.name, folder / path.name)
        return replace(shipped, path=folder / shipped.path.name)
