"""A fault, and how it is planted: the kernel's file, edited, in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verify.cell.process import ROOT
from verify.problem import Problem

TRITON_FORWARD = "kernels/triton/flash_forward.py"
TRITON_BACKWARD = "kernels/triton/flash_backward.py"
TRITON_FP8 = "kernels/triton/fp8_forward.py"
KERNEL_MASKS = "kernels/masks.py"
TRITON_COMMON = "kernels/triton/common.py"
BACKWARD_KERNELS = "kernels/triton/flash_backward_kernels.py"
SPLIT_KV = "tests/faults/kernels/split_kv.py"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """file: the kernel on trial; helper: the module beside it that is edited in its place, if one
    is; edits: texts that occur exactly once there, and what replaces them.

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
    def problem(self) -> Problem:
        """The common problem."""
        return Problem.parse(self.common)

    def plant(self, folder: Path) -> Path:
        """Write the faulty kernel into a folder and return its path; raises ValueError if an edit
        does not fit the source."""
        source, helper = ROOT / self.file, self.helper and ROOT / self.helper
        place = folder / self.name
        place.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        if helper:
            package = ".".join(Path(self.helper).parent.parts)
            name = f"planted_{helper.stem}"
            text = self._edited(
                text, ((f"from {package}.{helper.stem} import", f"from {name} import"),)
            )
            edited = self._edited(helper.read_text(encoding="utf-8"), self.edits)
            (place / f"{name}.py").write_text(edited, encoding="utf-8")
        else:
            text = self._edited(text, self.edits)
        path = place / source.name
        path.write_text(text, encoding="utf-8")
        return path

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
