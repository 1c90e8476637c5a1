"""Discovery: the variants of kernel files and their declarations.

A cell loads the files; they are never imported into the judge's process.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import torch

from references.quantisation import parse_quantisation
from references.score_mods import mod_kind_of
from verify.bundle import ROOT
from verify.cell import helper_files
from verify.cell.helper_files import Unloadable
from verify.cell.named_imports import named_from
from verify.cell.process import (
    CROWDED,
    PLAIN_CPU,
    PLAIN_CUDA,
    Cell,
    Environment,
    ForkServer,
    InfrastructureError,
    Reply,
)
from verify.cell.untrusted_text import visible
from verify.machine.cores import cores
from verify.machine.extras import advised, lacked_by
from verify.problem import Problem
from verify.problem.storage import storage_kind
from verify.tolerance.backward import resolve as resolve_gradients
from verify.tolerance.forward import resolve
from verify.variant import Config, Declaration, declaration_from
from verify.variant.witness import meaning, witnesses

_LARGEST_SOURCE = 64 << 20  # bytes
_AT_ONCE = 8  # files that are loaded at the same time; each may take as much memory as a kernel
_OTHERS = ("crash", "hang", *CROWDED)  # what another process can cause


@dataclass(frozen=True)
class Roster:
    """The declarations of kernel files, and the files that do not load.

    unmet: files that need a package of an extra that is not installed here, with what to install;
    they are not run, which is no failure of theirs.  helpers: files that are no kernels
    (`helper_files`), with the reason.

    It is JSON-ready data, so that a campaign's workers need not load the files again.
    """

    entries: tuple[dict[str, Any], ...]
    failures: tuple[Unloadable, ...]
    unmet: tuple[Unloadable, ...] = ()
    helpers: tuple[Unloadable, ...] = ()

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        return tuple(
            declaration_from(
                e["data"],
                ref=e["ref"],
                path=e["path"],
                source_hash=e["source_hash"],
                witness=e["witness"],
            )
            for e in self.entries
        )

    @property
    def unusable(self) -> str | None:
        """One line that says why no file loads; None if one does, since each other one then gets a
        failing verdict."""
        if self.entries or not self.failures:
            return None
        return "; ".join(failure.line for failure in self.failures)

    @property
    def lacking(self) -> str | None:
        """One line that says what to install, if there is nothing but files that need a package
        that is not here; else None."""
        if self.entries or self.failures or not self.unmet:
            return None
        return "; ".join(self.needs)

    @property
    def needs(self) -> tuple[str, ...]:
        """One line for each package that files need and that is not here."""
        by_package: dict[str, list[str]] = {}
        for file in self.unmet:
            by_package.setdefault(file.message, []).append(file.ref)
        return tuple(f"not run: {', '.join(refs)}: {said}" for said, refs in by_package.items())

    @property
    def beside(self) -> tuple[str, ...]:
        """One line for each file that is no kernel."""
        return tuple(f"{file.ref}: {file.message}" for file in self.helpers)

    def dumps(self) -> str:
        """As JSON text."""
        return json.dumps(
            {
                "entries": self.entries,
                "failures": [vars(failure) for failure in self.failures],
                "unmet": [vars(file) for file in self.unmet],
                "helpers": [vars(file) for file in self.helpers],
            }
        )

    @staticmethod
    def loads(text: str) -> Roster:
        """The roster in a text of `dumps`."""
        data = json.loads(text)
        return Roster(
            tuple(data["entries"]),
            tuple(Unloadable(**failure) for failure in data["failures"]),
            tuple(Unloadable(**file) for file in data.get("unmet", ())),
            tuple(Unloadable(**file) for file in data.get("helpers", ())),
        )


def collection() -> list[Path]:
    """The kernel files of the collection: every module under kernels/ that declares a variant."""
    files = sorted((ROOT / "kernels").rglob("*.py"))
    return [
        path for path in files if helper_files.DECLARES.search(path.read_text(encoding="utf-8"))
    ]


def environment() -> Environment:
    """The environment of kernels on this machine: CUDA if there is a device, else the CPU and
    Triton's interpreter."""
    return PLAIN_CUDA if torch.cuda.is_available() else PLAIN_CPU


def roster(files: list[Path] | None = None, shared: ForkServer | None = None) -> Roster:
    """Load the files (default: the collection), each in a fresh kernel process, several at once.

    shared: the fork server to use, which stays open; by default a new one.
    """
    fork_server = ForkServer(environment()) if shared is None else shared
    listing = _Listing()
    paths = collection() if files is None else files
    try:
        for path, reply in zip(paths, _loaded(paths, fork_server), strict=True):
            listing.add(path, reply)
    finally:
        if shared is None:
            fork_server.close()
    return listing.roster()


def _loaded(paths: Sequence[Path], fork_server: ForkServer) -> Iterator[Reply | None]:
    """The reply to loading each file, in order; None for one whose path cannot be shown.

    Several are loaded at the same time.  One that ended badly then is loaded again alone, in case
    that it was another's doing, such as that of a file which kills the fork server.
    """

    def load(path: Path) -> Reply | None:
        real = str(path.resolve())
        if visible(real) != real:
            return None
        cell = Cell(fork_server)
        try:
            return cell.load(real)
        finally:
            cell.close()

    def beside(path: Path) -> Reply | None:
        try:
            return load(path)
        except InfrastructureError as error:
            return Reply("crash", str(error))

    count = min(len(paths), cores(), _AT_ONCE)
    if count < 2:
        yield from map(load, paths)
        return
    with ThreadPoolExecutor(count) as pool:
        try:
            replies = list(pool.map(beside, paths))
        except BaseException:  # interrupted: what is being loaded need not come to its end
            pool.shutdown(wait=False, cancel_futures=True)
            fork_server.close()
            raise
    for path, reply in zip(paths, replies, strict=True):
        yield load(path) if reply is not None and reply.status in _OTHERS else reply


@dataclass
class _Listing:
    """A roster in the making.

    undeclared: those of `failures` that declare nothing.  needed: the paths that each other file
    imports, by its ref.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Unloadable] = field(default_factory=list)
    unmet: list[Unloadable] = field(default_factory=list)
    undeclared: list[Unloadable] = field(default_factory=list)
    needed: dict[str, Collection[str]] = field(default_factory=dict)

    def roster(self) -> Roster:
        """The roster of the files that were added."""
        why = helper_files.reasons(self.undeclared, self.needed)
        helpers = [
            replace(each, message=why[each.ref]) for each in self.undeclared if each.ref in why
        ]
        failures = [each for each in self.failures if each.ref not in why]
        return Roster(tuple(self.entries), tuple(failures), tuple(self.unmet), tuple(helpers))

    def add(self, path: Path, reply: Reply | None) -> None:
        """A file and the reply to loading it."""
        real = path.resolve()
        if reply is None:
            shown = visible(str(path))
            reason = "its path has characters that cannot be shown: rename it"
            self.failures.append(Unloadable(shown, shown, reason))
            return
        inside = real.is_relative_to(ROOT / "kernels")
        shown = real.relative_to(ROOT).as_posix() if inside else str(path)
        if reply.ok:
            self._add_loaded(reply, path, shown)
            return
        needs = lacked_by(reply.message)
        failure = Unloadable(shown, str(real), needs or _why(reply))
        (self.failures if needs is None else self.unmet).append(failure)
        if needs is None and helper_files.declares_nothing(reply, real):
            self.undeclared.append(failure)
        else:
            self.needed[shown] = set(map(str, named_from(real, _read)))

    def _add_loaded(self, reply: Reply, path: Path, shown: str) -> None:
        real = path.resolve()
        try:
            self.entries += _entries(reply.data, path, real.is_relative_to(ROOT / "kernels"))
            self.needed[shown] = set(map(str, reply.data.get("needed", ())))
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            reason = f"its declaration: {type(error).__name__}: {error}"
            self.failures.append(Unloadable(shown, str(real), reason))


def _why(reply: Reply) -> str:
    """Why a file does not load; the first line is enough for the author of the file."""
    status = "" if reply.status in ("breach", "raised") else f"{reply.status}: "
    text = f"{status}{reply.message}{reply.data.get('where', '')}"
    return f"{text}\n{reply.data.get('traceback', '')}".strip()


def _entries(reply: dict[str, Any], path: Path, inside: bool) -> list[dict[str, Any]]:
    """The roster's entries of a loaded file.  Raises ValueError for a declaration that cannot be
    judged; malformed data raises other exceptions too."""
    source = _hash(reply["sources"], path)
    found = [one.case for one in witnesses(_read(path))]
    entries = []
    for given in reply["variants"]:
        data = given | {name: advised(given[name]) for name in ("unavailable", "uncompilable")}
        ref = data["name"] if inside else f"{path}@{data['name']}"
        entry = {"ref": ref, "path": str(path.resolve()), "source_hash": source, "data": data}
        entry["witness"] = found
        _check(declaration_from(data, ref=ref, path=entry["path"], source_hash=source))
        entries.append(entry)
    if len({entry["ref"] for entry in entries}) < len(entries):
        raise ValueError("name: two variants have the same")
    return entries


def _check(declaration: Declaration) -> None:
    """Raise ValueError, naming the field, if no case can be made from the declaration."""
    support = declaration.support
    names = [config.name for config in declaration.configs]
    if not re.fullmatch(r"[\w.-]+", declaration.name, re.ASCII):
        raise ValueError(f"name: {declaration.name!r} may hold letters, digits, _ . and - only")
    if (
        not names
        or len(set(names)) < len(names)
        or any(Config.parse(c.name) != c for c in declaration.configs)
        or any(Config.parse(name).name != name for name in declaration.further_configs)
    ):
        raise ValueError(
            f"configs: {', '.join(names) or 'none'}: at least one, each with a unique name that"
            " parses back"
        )
    for word in support.storages:
        storage_kind(word)
    reads = declaration.gradients is not None and declaration.gradients.softmax.source == "saved"
    if reads and declaration.contract.lse is None:
        raise ValueError("contract.lse: a backward needs the LSE that its forward saved")
    mods = [mod_kind_of(word).gallery()[0] for word in {"softcap", *support.score_mods}]
    for dtype, word, mod in product(support.dtypes, support.descalings, mods):
        problem = Problem(
            seqlen_q=1,
            seqlen_kv=1,
            head_dim=max(support.head_dims),
            dtype=dtype,
            score_mod=mod,
            quantisation=parse_quantisation(word),
        )
        for config in declaration.configs:
            try:
                resolve(declaration.numerics, declaration.saved_config or config, problem, "cpu")
                if declaration.gradients is not None:
                    resolve_gradients(declaration.gradients, config, problem, "cpu")
            except KeyError as error:
                raise ValueError(f"numerics: {error} is not known") from None


def _hash(sources: list[str], path: Path) -> str:
    """A hash of a kernel file and of its other source files (`loading.sources_of`)."""
    digest = sha256()
    for source in sorted({str(path.resolve()), *sources}):
        digest.update(os.fsencode(Path(source).name))
        content = _read(Path(source))
        digest.update(meaning(content) if source.endswith(".py") else content)
    return digest.hexdigest()[:16]


def _read(path: Path) -> bytes:
    """A regular file's content; raises OSError for any other kind (a pipe has no end), and for a
    file that is too large to be a source."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_SOURCE:
            raise OSError(
                f"{visible(str(path))}: not a regular file of at most {_LARGEST_SOURCE >> 20} MiB"
            )
        return file.read()
