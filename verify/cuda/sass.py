"""SASS: counts the machine instructions of a compiled kernel, by kind, and of its hottest loop.

nvdisasm takes a quarter of a second for a kernel, so the counts lie beside the compiled kernels
under a hash of the binary.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from verify.cuda.compile import cache_directory, write_whole
from verify.cuda.toolkit import executables
from verify.variant import Binary
from verify.variant.build import INSTRUCTIONS

_VERSION = 1  # of the counts: a change of KINDS or of the loop's choice is a new one
_TIMEOUT = 120.0  # seconds for one binary on a busy machine

KINDS = {
    "HMMA": "HMMA",
    "QMMA": "QMMA|OMMA",  # 8 bits and fewer, floating point
    "IMMA": "IMMA|BMMA",
    "DMMA": "DMMA",
    "HGMMA": "HGMMA",  # of a warpgroup (Hopper)
    "QGMMA": "QGMMA|IGMMA|BGMMA",
    "UTCMMA": "UTC[HQIO]MMA",  # tensor memory (Blackwell)
    "LDSM": "LDSM",
    "STSM": "STSM",
    "LDS": "LDS",
    "STS": "STS",
    "LDGSTS": "LDGSTS",  # cp.async
    "UTMALDG": "UTMALDG",  # tensor copies
    "UBLKCP": "UBLKCP",  # bulk copies
    "LDG": "LDG",
    "STG": "STG",
    "LDL": "LDL",
    "STL": "STL",
    "MUFU": "MUFU",
    "SHFL": "SHFL",
    "BAR": "BAR",
    "FP32": "F(ADD|MUL|FMA|MNMX|SEL|SETP|SET|SWZADD|CHK)[23]?",
    "FP16": "H(ADD|MUL|FMA|MNMX|SETP|SET)2",
    "CONVERT": "F2F|F2FP|F2I|F2IP|I2F|I2FP|I2I|I2IP|FRND",
    "MOVE": r"IMAD\.MOV.*|U?MOV(32I|64)?|R2UR|S2R|S2UR|CS2R|R2P|P2R|U2U|MOVM",
    "UNIFORM": "U(I|LOP|LEA|SHF|SEL|PRMT|PLOP|SGXT|BMSK|FLO|POPC|BREV|P2UR|VIMNMX|VIADD).*",
    "INT": (
        "I(ADD|ADD3|MAD|MUL|ABS|MNMX|MNMX3|SETP|SET|SCADD|SUB|DP|DP4A)(32I|64)?|V(IADD|IMNMX).*"
        "|LEA|P?LOP|P?LOP3|SHF|SHL|SHR|PRMT|SEL|SGXT|BMSK|BFE|BFI|BREV|FLO|POPC|XMAD"
    ),
}
"""What each kind of `verify.variant.build.INSTRUCTIONS` but MMA, their sum, is: a pattern of the
opcode without its modifiers (of MOVE: with them).  FP32 holds comparisons and selections, too."""

_MMA = tuple(kind for kind in KINDS if kind.endswith("MMA"))
assert {"MMA", *KINDS} == set(INSTRUCTIONS)
_KINDS = [(kind, re.compile(pattern)) for kind, pattern in KINDS.items()]
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)")
_LABEL = re.compile(r"^(\.L[\w$]+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L[\w$]+)\)")


class NotReadError(RuntimeError):
    """The instructions of a binary cannot be read here; the message says why."""


@dataclass(frozen=True)
class Counts:
    """How many instructions a kernel has of each kind of INSTRUCTIONS, and in all ("total", padding
    aside); kinds without any are left out.

    kernel: the kernel.  loop: the body of the hottest loop: of the innermost loops with MMA
    instructions the one with most; empty if there is none.
    """

    kernel: dict[str, int]
    loop: dict[str, int]


def counts(binary: Binary, *, disassemble: bool = True) -> Counts:
    """Count the instructions of a binary, or take the counts from the cache.

    disassemble: if false, only the cache is asked.  Raises NotReadError.
    """
    digest = sha256(repr((_VERSION, binary.entry)).encode() + binary.cubin).hexdigest()[:40]
    entry = cache_directory() / "sass" / f"{digest}.json"
    try:
        return Counts(**json.loads(entry.read_bytes()))
    except (OSError, ValueError, TypeError):
        pass  # none yet, or a damaged one
    if not disassemble:
        raise NotReadError("left out, for want of time")
    found = count(listing(binary.cubin), binary.entry)
    entry.parent.mkdir(parents=True, exist_ok=True)
    write_whole(entry, json.dumps(asdict(found)).encode())
    return found


def listing(cubin: bytes) -> str:
    """nvdisasm's text of a cubin.  Raises NotReadError if there is no nvdisasm that can read it."""
    reasons = []
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        for program in executables("nvdisasm"):
            # The analysis of the data flow adds nothing to what is counted.
            command = [program, "--print-code", "--no-dataflow", str(path)]
            try:
                result = subprocess.run(
                    command, check=False, capture_output=True, text=True, timeout=_TIMEOUT
                )
            except (OSError, subprocess.SubprocessError) as error:
                reasons.append(f"{program}: {error}")
                continue
            if result.returncode == 0:
                return result.stdout
            reasons.append(f"{program}: {result.stderr.strip()[:300]}")
    raise NotReadError(
        "; ".join(reasons)
        or "no nvdisasm on PATH, in CUDA_HOME or /usr/local/cuda, in the wheel"
        " nvidia-cuda-nvdisasm or in Triton's"
    )


def count(text: str, entry: str) -> Counts:
    """Count the instructions of one kernel of nvdisasm's text.  Raises NotReadError if it is not in
    there."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}  # to the index of the next instruction
    jumps: list[tuple[int, str]] = []
    inside = False
    for line in text.splitlines():
        if section := _SECTION.match(line):
            inside = section[1] == entry
        elif not inside:
            continue
        elif label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif instruction := _INSTRUCTION.match(line):
            opcode = instruction[2]
            target = _TARGET.search(instruction[3])
            if target is not None and opcode.split(".")[0] == "BRA":
                jumps.append((len(opcodes), target[1]))
            opcodes.append(opcode)
    if not opcodes:
        raise NotReadError(f"the binary has no kernel {entry}")
    loops = [(labels[to], end + 1) for end, to in jumps if labels.get(to, end + 1) <= end]
    bodies = [(first, end, _kinds(opcodes[first:end])) for first, end in loops]
    hot = [body for body in bodies if body[2].get("MMA")]
    innermost = [
        (first, end, kinds)
        for first, end, kinds in hot
        if not any(first <= a and b <= end and (a, b) != (first, end) for a, b, _ in hot)
    ]
    hottest = max(innermost, key=lambda body: body[2]["MMA"], default=(0, 0, {}))
    return Counts(_kinds(opcodes), hottest[2])


def _kinds(opcodes: list[str]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for opcode in opcodes:
        if opcode == "NOP":
            continue
        found["total"] += 1
        kind = _kind(opcode)
        if kind is not None:
            found[kind] += 1
            found["MMA"] += kind in _MMA
    return {kind: number for kind, number in found.items() if number}


def _kind(opcode: str) -> str | None:
    head = opcode.split(".", maxsplit=1)[0]
    for kind, pattern in _KINDS:
        if pattern.fullmatch(opcode if kind == "MOVE" else head):
            return kind
    return None
