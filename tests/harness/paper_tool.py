"""A fake sanitizer ("paper"), and kernels that tell it what to find.

It starts the program like the real one and writes what kernels tell it to: a kernel that runs under
it finds the file PAPER in its environment, and appends records and orders.
"""

from __future__ import annotations

PAPER_TOOL = """
import os, subprocess, sys, tempfile

words, options = sys.argv[1:], {}
mode = open("mode").read() if os.path.exists("mode") else ""
if words == ["--version"]:
    print("Version 2025.3.1.0")
    sys.exit(0)
while words[0].startswith("--"):
    name = words.pop(0)
    options[name] = "" if name == "--xml" else words.pop(0)
if mode == "broken":
    sys.exit("no such option")
report_file = tempfile.NamedTemporaryFile("r")
tool = options["--tool"]
told = {"PAPER": report_file.name, "PAPER_TOOL": tool}
code = subprocess.call(words, env=os.environ | told)
lines = report_file.read().splitlines()
orders = {line[1:] for line in lines if line.startswith("!")}
records = [line.split("|") for line in lines if not line.startswith("!") and mode != "asleep"]
records = [(kernel, text) for for_tool, kernel, text in records if for_tool == tool]
body = "".join(
    f"<record><kind>Precise</kind><level>Error</level><what><text>{text}</text><size>4</size></what>"
    f"<where><func>{kernel}</func></where></record>" for kernel, text in records)
if "no xml" not in orders:
    open(options["--save"], "w").write(f"<ComputeSanitizerOutput>{body}</ComputeSanitizerOutput>")
n = len(records)
summary = f"ERROR SUMMARY: {n} errors"
if tool == "racecheck":
    summary = f"RACECHECK SUMMARY: {n} hazards displayed ({n} errors, 0 warnings)"
open(options["--log-file"], "w").write("========= COMPUTE-SANITIZER\\n========= " + summary + "\\n")
sys.exit(code or (int(options["--error-exitcode"]) if n else 0))
"""
KERNEL = """
import os
from verify.variant import Config, Contract, Numerics, Support, Variant

def tell(line):
    if "PAPER" in os.environ:
        with open(os.environ["PAPER"], "a") as file:
            file.write(line + "\\n")

def variant(name, act, masks=("full",)):
    def forward(args, out, lse, workspace):
        out.fill_(1.0)
        lse.fill_(0.0)
        act(args, out)
    return Variant(name=name, family="paper", forward=forward, support=Support(
        dtypes=("float32",), head_dims=(8,), masks=masks, cross_lengths=False,
        layouts="contiguous"))
"""
PLANTED = """
VARIANTS = [
    variant("right", lambda args, out: None),
    variant("overruns", lambda args, out: tell("memcheck|overruns|Invalid __global__ write")),
    variant("races", lambda args, out: tell("racecheck|races|Race reported")),
]
"""
