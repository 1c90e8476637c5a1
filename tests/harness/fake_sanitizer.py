"""A fake compute-sanitizer that finds nothing: it starts the program like the real one, waits for
its end and writes so.  The program's environment has UNDER_TOOL."""

from __future__ import annotations

import sys
from pathlib import Path

_TEXT = """
import os, subprocess, sys

words, options = sys.argv[1:], {}
if words == ["--version"]:
    sys.exit(print("Version 2025.3.1.0"))
while words[0].startswith("--"):
    name = words.pop(0)
    options[name] = "" if name == "--xml" else words.pop(0)
code = subprocess.run(words, env=os.environ | {"UNDER_TOOL": "1"}).returncode
open(options["--save"], "w").write("<ComputeSanitizerOutput></ComputeSanitizerOutput>")
log = "========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: 0 errors\\n"
open(options["--log-file"], "w").write(log)
sys.exit(code)
"""


def fake_tool(folder: Path) -> Path:
    """Write the program into a folder, which is made; returns its path."""
    folder.mkdir()
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n{_TEXT}", encoding="utf-8")
    path.chmod(0o755)
    return path
