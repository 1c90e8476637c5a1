"""The commands that documents name, and the places where they are run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from verify.bundle import ROOT

SHELL = ("", "sh", "bash", "console", "text")

# "python3 -m verify run", "verify run", "tox -e gpu", "pytest -n auto", "pip install -e .", ...
COMMAND = re.compile(
    r"(?:\$ )?(?:[A-Z_]+=\S* )*"
    r"(?P<words>(?:(?:\S*/)?python3? -m )?(?:verify|pytest|tox|pip|build)(?= |$).*)"
    r"|(?P<module>python3? -m (?:tests|references)\.\w+(?= |$).*)"
)


@dataclass(frozen=True)
class Place:
    """Where a command is run.  shows: a text that must be there, in `function` of `file` if it is
    given."""

    file: str
    shows: str
    function: str = ""

    def holds(self) -> bool:
        """Whether the text is there."""
        path = ROOT / self.file
        if not path.is_file():
            return False
        text = path.read_text(encoding="utf-8")
        return self.shows in (_functions(text).get(self.function, "") if self.function else text)


def ci(shows: str) -> Place:
    """A step of .ci/run."""
    return Place(".ci/run", shows)


def wheel(shows: str) -> Place:
    """A step of .ci/wheel, which .ci/run calls."""
    return Place(".ci/wheel", shows)


def of(file: str, function: str, shows: str) -> Place:
    """A test, or a function that it calls."""
    (path,) = (ROOT / "tests" / "meta").rglob(f"{file}.py")
    return Place(path.relative_to(ROOT).as_posix(), shows, function)


@cache
def _functions(text: str) -> dict[str, str]:
    """The source of every function, methods included, by name."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in nodes}


def documented(text: str) -> Iterator[str]:
    """The commands of a page, from its code blocks and its inline code, without their comments."""
    text = re.sub(r"\\\n\s*", "", text)  # a line that goes on
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if language in SHELL for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    for line in lines:
        match = COMMAND.fullmatch(re.sub(r"\s+#.*", "", line.strip()))
        if match is not None:
            yield match["words"] or match["module"]


def parts(command: str) -> list[str]:
    """The parts of a command that must be run: its program and subcommand, and these with each
    option, and with a folder.

    `python3 -m verify run k.py -k x` gives `verify run` and `verify run -k`; `tox -e gpu` itself.
    """
    words = shlex.split(re.sub(r"^(?:\S*/)?python3? -m ", "", command))
    program, *rest = words
    if program in ("verify", "pip") and rest and re.fullmatch(r"[a-z]+", rest[0]):
        program, rest = f"{program} {rest[0]}", rest[1:]
    if program == "tox" and "-e" in rest:
        name = rest[rest.index("-e") + 1]
        program, rest = f"tox -e {name}", [word for word in rest if word not in ("-e", name)]
    options = [word for word in rest if re.fullmatch(r"-{1,2}[a-zA-Z][\w-]*", word)]
    if any(word.endswith("/") for word in rest):
        options.append("FOLDER/")
    return [program, *(f"{program} {option}" for option in options)]
