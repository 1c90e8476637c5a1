"""A fault, and how it is planted: the kernel's file, edited, in a folder of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verify.cell.process import ROOT
from verify.problem import Problem

TRITON_FORWARD = "kernels/triton/flash_forward.py"
TRITON_BACKWARD = "kernels/triton/flash_backward.py"
TRITON_FP8 = "kernels/triton/fp8_forward.py"
TRITON_EIGHT_BITS = "kernels/triton/eight_bits.py"
TRITON_FP8_TRANSPOSED = "kernels/triton/fp8_transposed_forward.py"
TRITON_DECODE = "kernels/triton/decode_forward.py"
TRITON_BLOCK_POINTERS = "kernels/triton/block_pointer_forward.py"
TRITON_DESCRIPTORS = "kernels/triton/descriptor_forward.py"
TRITON_SOFTMAX = "kernels/triton/online_softmax.py"
KERNEL_MASKS = "kernels/masks.py"
TRITON_COMMON = "kernels/triton/common.py"
TRITON_TILES = "kernels/triton/tiles.py"
BACKWARD_KERNELS = "kernels/triton/flash_backward_kernels.py"
SPLIT_KV = "tests/faults/kernels/split_kv.py"


_IMPORT = re.compile(r"^from (kernels\.[\w.]+) import", re.MULTILINE)


def plant(place: Path, file: str, edited: str, edit: Callable[[str], str]) -> Path:
    """Write a kernel's file into a folder, with one of its modules edited, and return its path.

    file: the kernel on trial; edited: that file, or a module of the collection that it imports, or
    that a module does which it imports.  Raises ValueError if none does.
    """
    place.mkdir(parents=True, exist_ok=True)
    path = place / Path(file).name
    text = _planted(file, place, edited, edit)
    if text is None:
        raise ValueError(f"{place.name}: {file} does not import {edited}")
    path.write_text(text, encoding="utf-8")
    return path


def _planted(file: str, place: Path, edited: str, edit: Callable[[str], str]) -> str | None:
    """What that file becomes; None if it stays as it is: it is not the edited one, and imports none
    that does not stay."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file == edited:
        return edit(text)
    changed = None
    for module in _IMPORT.findall(text):
        imported = f"{module.replace('.', '/')}.py"
        if not (ROOT / imported).is_file():
            continue
        planted = _planted(imported, place, edited, edit)
        if planted is not None:
            name = f"planted_{Path(imported).stem}"
            (place / f"{name}.py").write_text(planted, encoding="utf-8")
            changed = (changed or text).replace(f"from {module} import", f"from {name} import")
    return changed


@dataclass(frozen=True, kw_only=True)
class Fault:
    """file: the kernel on trial; helper: the module that is edited in its place, if one is: it
    imports that, or a module that does; edits: texts that occur exactly once there, and what
    replaces them.

    about: what is wrong, in one line; source: where a kernel had a bug of that class, in public.
    common: a problem of normal inputs that the faulty kernel solves within 1e-2, by its name.
    variant: the one on trial, where the file holds several. asked: a problem on which oracles catch
    it, if only campaigns on a GPU are asked it (`verify.oracles.long.problems`). escapes: why no
    oracle catches it, and what would; empty if one does.
    """

    name: str
    about: str
    source: str
    file: str
    edits: tuple[tuple[str, str], ...]
    common: str
    helper: str = ""
    variant: str = ""
    asked: str = ""
    escapes: str = ""

    @property
    def on_trial(self) -> str:
        """The variant that is: of the backward's, unless another is named, the first."""
        first = "triton-flash-backward" if self.file == TRITON_BACKWARD else ""
        return self.variant or first

    @property
    def problem(self) -> Problem:
        """The common problem."""
        return Problem.parse(self.common)

    def plant(self, folder: Path) -> Path:
        """Write the faulty kernel into a folder and return its path; raises ValueError if an edit
        does not fit the source."""
        return plant(
            folder / self.name,
            self.file,
            self.helper or self.file,
            lambda text: self._edited(text, self.edits),
        )

    def plant_pair(self, folder: Path) -> Path:
        """Write the shipped Triton backward so that it is saved by this faulty forward, and return
        its path."""
        forward = self.plant(folder)
        forward.rename(forward.with_name("planted_forward.py"))
        text = (ROOT / TRITON_BACKWARD).read_text(encoding="utf-8")
        behind = (
            "from kernels.triton import flash_forward\n",
            "import planted_forward as flash_forward\n",
        )
        path = forward.with_name(Path(TRITON_BACKWARD).name)
        path.write_text(self._edited(text, (behind,)), encoding="utf-8")
        return path

    def _edited(self, text: str, edits: tuple[tuple[str, str], ...]) -> str:
        for before, after in edits:
            if text.count(before) != 1:
                raise ValueError(f"{self.name}: {before!r} occurs {text.count(before)} times")
            text = text.replace(before, after)
        return text
