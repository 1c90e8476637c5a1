"""Binaries: what Triton builds in a process under an instrumenting tool, and whether the
instrumentation is in there.

An older Triton, a cache that does not know the mode, or a pass that finds nothing to watch gives
the ordinary kernel, without a word: such a process would prove nothing.  So each source is built
twice in the process, with and without instrumentation and with the same other options, and the
ledger says whether the PTX differs.  (A cubin can differ where the PTX does not: Triton 3.8 gives
such ones in its mode "fpsan" to kernels that compute no floating-point number.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.cuda.telling import telling
from verify.sanitizers import ledger
from verify.sanitizers.tool import CONSAN, FPSAN

MODE = "TRITON_INSTRUMENTATION_MODE"
# An operation on floating-point numbers in PTX; loads, stores and moves are none.
_FLOATS = re.compile(
    r"^\s*(?:@!?%p\d+ )?(?:add|sub|mul|fma|div|min|max|neg|abs|ex2|lg2|rcp|sqrt|rsqrt|cvt|w?g?mma)"
    r"[\w.:]*\.(?:bf16|f16|f32|f64|e4m3|e5m2|bf16x2|f16x2)\b",
    re.MULTILINE,
)
_NOT_OPTIONS = frozenset({"extern_libs"})  # of a build's metadata: parsed again from nothing


@dataclass(frozen=True)
class Built:
    """One binary.  shared: bytes of shared memory of the ordinary one.  changed: whether
    instrumentation changed its PTX.  floats: whether the ordinary one computes with floating-point
    numbers."""

    kernel: str
    shared: int
    changed: bool
    floats: bool = False

    def watched_by(self, tool: str) -> bool:
        """Whether that tool has something to watch there."""
        return self.floats if tool == FPSAN else bool(self.shared)


def watch() -> None:
    """Write what Triton builds from now on to the ledger.  Called in the process under the tool."""
    from triton import knobs

    before = knobs.compilation.listener
    knobs.compilation.listener = _Listener(before)


class _Listener:
    """Builds the same source without instrumentation, and writes whether the binaries differ."""

    def __init__(self, before: Callable[..., None] | None) -> None:
        self._before = before
        self._busy = False  # while it builds itself

    def __call__(self, *, src: Any, metadata: dict[str, Any], **rest: Any) -> None:
        if self._before is not None:
            self._before(src=src, metadata=metadata, **rest)
        if self._busy or not metadata.get("instrumentation_mode"):
            return
        self._busy = True
        try:
            with telling():
                ordinary = self._ordinary(src, metadata)
            changed = ordinary.asm["ptx"] != _ptx(rest["metadata_group"])
            shared = int(ordinary.metadata.shared or 0)
            floats = _FLOATS.search(ordinary.asm["ptx"]) is not None
            ledger.write_binary(str(metadata["name"]), shared, changed=changed, floats=floats)
        finally:
            self._busy = False

    @staticmethod
    def _ordinary(src: Any, metadata: dict[str, Any]) -> Any:
        """The build of the same source without instrumentation."""
        import triton
        from triton import knobs
        from triton.compiler import make_backend

        target = metadata["target"]
        known = make_backend(target).parse_options({}).__dict__
        options = {
            name: metadata[name] for name in known if name in metadata and name not in _NOT_OPTIONS
        }
        # What was read from Triton's cache has lists for tuples, which its options are hashed with.
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
        }
        options |= {"instrumentation_mode": ""}
        with knobs.compilation.scope():
            knobs.compilation.instrumentation_mode = ""  # up to 3.7 the compiler reads it there
            return triton.compile(src, target=target, options=options)


def _ptx(files: dict[str, str]) -> str:
    """The PTX among the files of a build."""
    paths = (path for name, path in files.items() if name.endswith(".ptx"))
    return Path(next(paths)).read_text(encoding="utf-8")


def read(path: Path) -> tuple[Built, ...] | None:
    """The binaries in a process's ledger; None if that cannot be read."""
    built = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            if "binary" in said:
                floats = bool(said.get("floats"))
                shared, changed = int(said["shared"]), bool(said["changed"])
                built.append(Built(str(said["binary"]), shared, changed, floats))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return tuple(built)


def doubts(built: tuple[Built, ...] | None, tool: str = CONSAN) -> list[str]:
    """Why these binaries do not show that a tool has watched the kernels.

    One without shared memory (FPSan: without a floating-point operation) can have nothing to watch,
    unless no other was watched either.
    """
    if built is None:
        return ["the process left no readable ledger of its builds"]
    if not any(one.changed for one in built):
        names = ", ".join(dict.fromkeys(one.kernel for one in built)) or "none was built"
        return [f"no kernel was instrumented: the binaries are the ordinary ones ({names})"]
    same = dict.fromkeys(o.kernel for o in built if o.watched_by(tool) and not o.changed)
    return [f"{kernel} was not instrumented: its binary is the ordinary one" for kernel in same]
