"""The derivations of the oracles: writes docs/oracles.md from the docstrings of the modules in
verify/oracles/."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from types import ModuleType

from references.premises import Premise
from verify.bundle import ROOT
from verify.oracles import Oracle, by_module, groups

PATH = ROOT / "docs" / "oracles.md"
COMMAND = "python -m verify oracles --table"
_WIDTH = 100

_INTRODUCTION = f"""# What is asked of a kernel

Made by `{COMMAND}` from the docstrings of `verify/oracles/`.

An oracle judges one case: one run of a kernel, or two related runs. Each section below describes
one module and the oracles that it defines: what they construct, what they expect, why the
expectation holds, and which errors they allow for. A section also lists what an oracle needs of a
kernel, and the premises that it needs of a problem's features (`references/premises.py`).
[applicability.md](applicability.md) says which features and variants each oracle judges. Every run
must first end without an error and write to nothing but its outputs
(`verify/judging/run_checks.py`).

There are three grades of exactness: equal bit for bit; within one rounding of a number that is
known exactly; within a derived bound. If a kernel declares that its runs differ, results that would
be equal bit for bit are compared within bounds instead. All NaNs are equal: IEEE 754 does not
define their sign and payload, and on a CPU these depend on the element's place in its vector. A row
has an infinite bound if the declared arithmetic can overflow there; such a row is not judged. Sums
and merges that contain an element of such a row are not judged either, because they can be NaN: if
all scores of a row become -inf, the finite value that stands for a masked score is the largest, and
masked keys get weight.

A relation is a pair of problems whose results follow from each other. The same cell runs both. Each
result is compared with the truth within its own bound, and so the two results differ by at most the
sum of both bounds (`verify/judging/metamorphic.py`).

Notation as in [tolerance.md](tolerance.md): s is softmax_scale, u = 2^-24, u_P and u_o the unit
roundoffs of P and of the output, kappa(n) the error of a product-sum, g the growth of *Small P*,
n_b the number of key blocks, ls the error of the row sum."""


def page() -> str:
    """Markdown: the introduction, and one section per module that defines oracles."""
    sections = (_section(module, oracles) for module, oracles in by_module().items())
    return "\n\n".join((_INTRODUCTION, *sections)) + "\n"


def _section(module: ModuleType, oracles: Sequence[Oracle]) -> str:
    path = module.__name__.replace(".", "/")
    lines = "\n".join(_line(oracle) for oracle in oracles)
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    text = "\n\n".join(map(_linked, paragraphs))
    return f"## {oracles[0].name}\n\nModule: `{path}.py`\n\n{lines}\n\n{text}"


def _line(oracle: Oracle) -> str:
    """Name, group, entry, what it catches and what it needs, as one item of a list."""
    entry = groups()[oracle.group].entry
    text = f"- **{oracle.name}** (group {oracle.group}, {entry}) catches {oracle.catches}."
    if oracle.needs:
        text += f" Needs {', '.join(premise for premise in Premise if premise in oracle.needs)}."
    return filled(text, indent="  ")


def _linked(paragraph: str) -> str:
    """Replace the paths of pages in a docstring by links, and wrap the paragraph again."""
    linked, links = re.subn(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", paragraph)
    return filled(linked) if links else paragraph


def filled(text: str, indent: str = "") -> str:
    """A paragraph or an item of a list, wrapped to the width of the pages."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
