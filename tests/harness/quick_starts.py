"""Plays a quick start of docs/quick-starts/ as a reader does: writes its files, runs its commands.

A line that ends with "`NAME`:" before a block of code names the file that the block is.  A block
of the language `sh` is commands, one per line; "# exits with N" behind one is its exit code, else
it is 0.  Without a GPU, what needs one exits with 3.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(sorted((ROOT / "docs" / "quick-starts").glob("*.md")))

_BLOCK = re.compile(r"^([^\n]*)\n\n```(\w+)\n(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w./]+\.(?:py|cu))`:\Z")
_EXITS = re.compile(r"\s+# exits with (\d+)$")


class PlayError(Exception):
    """A command that ended with another exit code than its page says; the message has its
    output."""


@dataclass(frozen=True)
class Page:
    """files: text by path.  commands: (words for a shell, exit code), in their order."""

    files: Mapping[str, str]
    commands: tuple[tuple[str, int], ...]


def read(path: Path) -> Page:
    """The files and the commands of a page."""
    files, commands = {}, []
    for before, language, text in _BLOCK.findall(path.read_text(encoding="utf-8")):
        named = _NAMED.search(before)
        if named is not None:
            files[named[1]] = text
        elif language == "sh":
            for line in text.splitlines():
                exits = _EXITS.search(line)
                commands.append((_EXITS.sub("", line), int(exits[1]) if exits else 0))
    return Page(files, tuple(commands))


def play(page: Page, folder: Path, variables: Mapping[str, str], *, device: bool) -> None:
    """Do in `folder` what the page says, with these variables of the environment.

    device: whether there is a GPU.  Commands that install are not run.  Raises PlayError.
    """
    folder.mkdir(exist_ok=True)
    for name, text in page.files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    needs_device = any(name.endswith(".cu") for name in page.files)
    for command, code in page.commands:
        if command.startswith("pip install"):
            continue
        without = needs_device and not device and command.startswith("verify run")
        expected = 3 if without else code
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != expected:
            said = f"exit code {done.returncode}, not {expected}"
            raise PlayError(f"{command}: {said}\n{done.stdout}")
