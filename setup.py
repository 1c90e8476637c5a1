"""What pyproject.toml cannot say: the wheel has the other folders in `verify/_bundled/`.

See verify/bundle.py for how they are imported from there.  An editable installation uses the
checkout's own folders.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BUNDLED = (
    "references",
    "kernels",
    "tests/__init__.py",
    "tests/properties",
    "tests/planted",
    "conftest.py",
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


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)


setup(cmdclass={"build_py": BuildPy})
