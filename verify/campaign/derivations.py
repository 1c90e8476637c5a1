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

An oracle judges one case: a run of a kernel, or two related ones. Each section below is one module
with the oracles that it defines. It says what they construct, what they expect and why that holds,
where the slack comes from, and what is needed: of a kernel, and of a problem's features as premises
(`references/premises.py`). [applicability.md](applicability.md) says which features and variants
each oracle judges. Before any of them, every run must end well and touch nothing but its
outputs (`verify/judging/run_checks.py`).

Exactness comes in grades: bit for bit; one rounding of a number known exactly; a derived bound.
Results that hold bit for bit are compared within bounds where a kernel declares that its runs
differ. A NaN equals any other NaN: IEEE 754 leaves its sign and payload open, and on a CPU they
depend on an element's place in its vector. Rows whose bound is infinite, because the declared
arithmetic can overflow there, are asked nothing. Nor are sums and merges with an element of such
rows, for that can be NaN: if all scores of a row become -inf, a finite stand-in for masked scores
outweighs them, and hidden keys show.

A relation is a pair of related questions in the same cell, whose answers follow from each other.
Both answers are held against one truth, each within its bound, and so against each other within the
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
