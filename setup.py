"""What pyproject.toml cannot say: the wheel has the other folders in `verify/_bundled/`, and an
sdist of the same sources is the same bytes.

See verify/bundle.py for how the folders are imported from there.  An editable installation uses the
checkout's own folders.
"""

import gzip
import os
import shutil
import tarfile
import time
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

BUNDLED = (
    "references",
    "kernels",
    "tests/__init__.py",
    "tests/properties",
    "tests/planted",
    "conftest.py",
    "constraints.txt",
    "pyproject.toml",
)


class BuildPy(build_py):
    """build_py, then the bundled folders."""

    def run(self) -> None:
        """Build from nothing, so that no file of an earlier build gets into the wheel."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for name in BUNDLED:
                _copy(Path(name), Path(self.build_lib, "verify", "_bundled", name))


class Sdist(sdist):
    """sdist, whose archive says nothing of the machine: no owner, no order of a directory, and one
    time for all files, SOURCE_DATE_EPOCH if it is set."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **_):
        """Write `base_name`.tar.gz of a folder; returns its path."""
        if format != "gztar":
            raise ValueError(f"--formats: {format!r} is not gztar")
        seconds = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            runs = member.isdir() or member.mode & 0o100
            member.mode = 0o755 if runs else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = seconds
            return member

        folder = Path(root_dir or ".", base_dir or ".")
        target = Path(f"{base_name}.tar.gz")
        with (
            target.open("wb") as file,
            gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted([folder, *folder.rglob("*")]):
                name = path.relative_to(folder.parent).as_posix()
                archive.add(path, name, recursive=False, filter=plain)
        return str(target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


os.umask(0o022)  # setuptools gives copied files the modes that this machine's user likes
setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
