"""Completion in a shell: click's own, as docs/command-line.md says how to switch it on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class

from verify import cli
from verify.bundle import ROOT

VARIABLE = "_VERIFY_COMPLETE"
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


def completed(*words: str) -> set[str]:
    """What a shell offers for the last word."""
    *before, last = words
    shell = get_completion_class("bash")
    assert shell is not None
    found = shell(cli.app, {}, "verify", VARIABLE).get_completions(before, last)
    return {item.value if item.type == "plain" else item.type for item in found}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("",), set(cli.app.commands)),
        (("re",), {"replay", "report", "recheck"}),
        (("bench", ""), {"kernels", "mutants", "suite"}),
        (("run", "--dt"), {"--dtype"}),
        (("run", "--dtype", "b"), {"bfloat16"}),
        (("run", "--profile", "n"), {"nightly"}),
        (("run", "my_"), {"file"}),
        (("nonsense", ""), set(cli.app.commands)),
    ],
)
def test_commands_options_and_values_are_offered(words: tuple[str, ...], offered: set[str]) -> None:
    assert completed(*words) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_page_says_how_for_each_shell(shell: str) -> None:
    assert f"{VARIABLE}={shell}_source verify" in PAGE


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_the_line_for_bash_works_there(tmp_path: Path) -> None:
    script = tmp_path / "verify"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m verify "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    (line,) = re.findall(r'^eval "\$\(_VERIFY_COMPLETE=bash_source verify\)"$', PAGE, re.MULTILINE)
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{line}\nCOMP_WORDS=(verify rech); COMP_CWORD=1\n"
            "_verify_completion verify rech verify; echo ${COMPREPLY[@]}; complete -p verify",
        ],
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "VERIFY_BOOTSTRAP": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert (first, second.split()[-1]) == ("recheck", "verify"), done.stderr
