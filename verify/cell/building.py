"""Compiles one build in a kernel process, and reads what its binary holds."""

from __future__ import annotations

import time
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from verify.variant import Binary, Build


def compile_build(build: Build, *, disassemble: bool) -> dict[str, Any]:
    """The compiled build as fields of `verify.evidence.Built`; raises what its compiler raises.

    disassemble: whether to disassemble a binary whose instructions were never counted.
    """
    begun = time.perf_counter()
    result = build.compile()
    seconds = time.perf_counter() - begun
    resources = result.resources if isinstance(result, Binary) else result
    sass, unread = _instructions(result, disassemble)
    broken = build.broken(resources, sass["kernel"] if sass is not None else None)
    return {
        "seconds": seconds,
        "resources": asdict(resources),
        "spill_budget": build.spill_budget,
        "sass": sass,
        "unread": unread,
        "code": sha256(result.cubin).hexdigest()[:16] if isinstance(result, Binary) else "",
        "error": "; ".join(broken),
    }


def _instructions(
    result: object, disassemble: bool
) -> tuple[dict[str, dict[str, int]] | None, str]:
    """Counts of instructions as data, or why there are none."""
    if not isinstance(result, Binary):
        return None, "its compile() returns no binary"
    from verify.cuda.sass import NotReadError, counts  # late: few kernel processes compile

    try:
        return asdict(counts(result, disassemble=disassemble)), ""
    except NotReadError as error:
        return None, str(error)
