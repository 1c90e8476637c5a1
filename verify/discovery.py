"""Discovery: which variants there are and what they declare, read through a cell and never imported here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from verify.cell.cell import PLAIN_CPU, PLAIN_CUDA, ROOT, Cell, Environment, Zygote
from verify.variant import Declaration, declaration_from

_DECLARES = re.compile(r"^VARIANTS?\b", re.MULTILINE)


@dataclass(frozen=True)
class Unloadable:
    """A kernel file that gave no declaration, and why: a verdict in itself."""

    ref: str
    path: str
    message: str


@dataclass(frozen=True)
class Roster:
    """Everything that was found, as JSON-ready data, so that a campaign's workers need not load it all again."""

    entries: tuple[dict[str, Any], ...]
    failures: tuple[Unloadable, ...]

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        return tuple(
            declaration_from(e["data"], ref=e["ref"], path=e["path"], source_hash=e["source_hash"]) for e in self.entries
        )

    def dumps(self) -> str:
        """As JSON text."""
        return json.dumps({"entries": self.entries, "failures": [vars(failure) for failure in self.failures]})

    @staticmethod
    def loads(text: str) -> Roster:
        """From `dumps`'s text."""
        data = json.loads(text)
        return Roster(tuple(data["entries"]), tuple(Unloadable(**failure) for failure in data["failures"]))


def collection() -> list[Path]:
    """The kernel files of the collection: every module under kernels/ that declares a variant."""
    files = sorted((ROOT / "kernels").rglob("*.py"))
    return [path for path in files if _DECLARES.search(path.read_text(encoding="utf-8"))]


def environment() -> Environment:
    """Where kernels run here: on CUDA if there is a device, else on the CPU and in Triton's interpreter."""
    return PLAIN_CUDA if torch.cuda.is_available() else PLAIN_CPU


def roster(files: list[Path] | None = None) -> Roster:
    """Load the files (default: the collection), each in a life of its own."""
    zygote = Zygote(environment())
    entries: list[dict[str, Any]] = []
    failures: list[Unloadable] = []
    try:
        for path in collection() if files is None else files:
            cell = Cell(zygote)
            reply = cell.load(str(path.resolve()))
            cell.close()
            inside = path.resolve().is_relative_to(ROOT / "kernels")
            shown = str(path) if not inside else path.resolve().relative_to(ROOT).as_posix()
            if not reply.ok:
                trace = str(reply.data.get("traceback", ""))
                failures.append(Unloadable(shown, str(path.resolve()), f"{reply.status}: {reply.message}\n{trace}".strip()))
                continue
            source = _hash(reply.data["sources"], path)
            for data in reply.data["variants"]:
                ref = data["name"] if inside else f"{path}@{data['name']}"
                entries.append({"ref": ref, "path": str(path.resolve()), "source_hash": source, "data": data})
    finally:
        zygote.close()
    return Roster(tuple(entries), tuple(failures))


def _hash(sources: list[str], path: Path) -> str:
    """Hash of a kernel file and of the files beside it that it imported."""
    digest = sha256()
    for source in sorted({str(path.resolve()), *sources}):
        digest.update(Path(source).name.encode())
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]
