"""Builds of the raw-PTX kernels that are compiled for the CPU several at once: what a compilation
takes before it comes to a kernel's own text is four fifths of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.host_library import compile_library
from tests.harness.ptx_host import BEFORE, BESIDE, MODULES, Choice, Host, written
from verify.cuda.compile import Source

# One for each build, in a namespace of its own.
BUILD = """#define ENTRY_OF_SOURCE entry_NAME
#define ENTRY entry_NAME
#define run run_NAME
#define KERNEL "FILE"
DEFINES
namespace NAME {
#include "run.cpp"
}
UNDEFS
"""


def unchanged(text: str) -> str:
    """The edit of a build as it is shipped."""
    return text


@dataclass(frozen=True)
class Edited:
    """A build, and what replaces a text of its source."""

    choice: Choice
    edit: Callable[[str], str] = unchanged

    @property
    def source(self) -> Source:
        tiling = MODULES[self.choice.name].TILING
        return tiling.launch(*self.choice.build, narrow=self.choice.narrow).source


@dataclass
class Together:
    """Hosts of builds, compiled `size` at once when the first of them is asked for."""

    builds: Mapping[Hashable, Edited]
    factory: pytest.TempPathFactory
    size: int = 10
    _libraries: dict[int, Path] = field(default_factory=dict)

    def host(self, key: Hashable) -> Host:
        """That build."""
        keys = [*self.builds]
        place = keys.index(key)
        part = place // self.size
        folder = self.factory.getbasetemp()
        if part not in self._libraries:
            folder = self.factory.mktemp("together")
            first = part * self.size
            several = keys[first : first + self.size]
            self._libraries[part] = compiled_together([self.builds[k] for k in several], folder)
        entry = f"run_build{place % self.size}"
        return Host(self.builds[key].source, folder, library=self._libraries[part], entry=entry)


def compiled_together(builds: list[Edited], folder: Path) -> Path:
    """One library of these builds: `run_build0`, `run_build1` and so on."""
    texts = [BEFORE]
    for n, build in enumerate(builds):
        place = folder / f"build{n}"
        place.mkdir()
        kernel = written(build.source, place, build.edit)
        kernel.write_text(kernel.read_text("utf-8").removeprefix(BEFORE), encoding="utf-8")
        texts.append(_program(build.source, place.name, kernel))
    program = folder / "together.cpp"
    program.write_text("".join(texts), encoding="utf-8")
    library = folder / "together.so"
    compile_library(program, library, [f"-DBESIDE={BESIDE}"])
    return library


def _program(source: Source, name: str, kernel: Path) -> str:
    defines = dict(source.defines)
    undefined = (*defines, source.entry, "ENTRY", "run", "KERNEL")
    words = {
        "ENTRY_OF_SOURCE": source.entry,
        "NAME": name,
        "FILE": str(kernel),
        "DEFINES": "\n".join(f"#define {key} {value}" for key, value in defines.items()),
        "UNDEFS": "\n".join(f"#undef {word}" for word in undefined),
    }
    return re.sub("|".join(words), lambda match: words[match[0]], BUILD)
