"""Import names and folders, in the checkout and in a wheel's layout.

.ci/wheel builds a real wheel and tries it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from verify import bundle, cli

HUB = 'WHOSE = "hub"\n'


Done = subprocess.CompletedProcess[str]


def python(*words: str, path: tuple[Path, ...], cwd: Path) -> Done:
    """Run Python in a process that imports from `path` and the standard library alone."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VERIFY_")}
    own |= {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", "-P", *words]
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)


def package(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Installed packages: what imports need of a wheel's `verify`, and another's `kernels`."""
    site = tmp_path / "site"
    bundled = site / "verify" / "_bundled"
    bundled.mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "bootstrap.py", "bundle.py"):
        shutil.copyfile(bundle.PACKAGE / name, site / "verify" / name)
    package(bundled / "references", "")
    (bundled / "references" / "masks.py").write_text("HERE = True\n", encoding="utf-8")
    package(bundled / "kernels" / "torch", 'WHOSE = "collection"\n')
    (bundled / "kernels" / "__init__.py").touch()
    package(site / "kernels", HUB)
    return site


def test_importing_the_package_imports_the_standard_library_alone(tmp_path: Path) -> None:
    code = "import sys; before = {*sys.modules}; import verify; print(*{*sys.modules} - before)"
    done = python("-c", code, path=(bundle.ROOT,), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {name.partition(".")[0] for name in done.stdout.split()}
    assert names - sys.stdlib_module_names == {"verify"}


def test_the_checkout_serves_its_own_references(tmp_path: Path) -> None:
    """Whatever the current directory or sys.path hold under that name."""
    package(tmp_path / "references", "raise SystemExit('the wrong references')\n")
    code = "import verify; import references; print(references.__file__)"
    done = python("-c", code, path=(tmp_path, bundle.ROOT), cwd=tmp_path)
    assert done.stdout.strip() == str(bundle.ROOT / "references" / "__init__.py"), done.stderr
    assert not bundle.INSTALLED


def test_an_installed_wheel_serves_references(site: Path, tmp_path: Path) -> None:
    code = "from verify import bundle; from references.masks import HERE;"
    code += "print(bundle.INSTALLED, bundle.ROOT, HERE)"
    done = python("-c", code, path=(site,), cwd=tmp_path)
    assert done.stdout.split() == ["True", str(site / "verify" / "_bundled"), "True"], done.stderr


def test_kernels_is_anothers_until_the_collection_is_used(site: Path, tmp_path: Path) -> None:
    code = "import verify, kernels; print(kernels.WHOSE)"
    other = python("-c", code, path=(site,), cwd=tmp_path)
    assert other.stdout.strip() == "hub", other.stderr
    code = "from verify.bundle import use_collection; use_collection(); use_collection();"
    code += "from kernels.torch import WHOSE; print(WHOSE)"
    ours = python("-c", code, path=(site,), cwd=tmp_path)
    assert ours.stdout.strip() == "collection", ours.stderr


def test_kernels_is_not_found_where_nobody_else_has_it(site: Path, tmp_path: Path) -> None:
    shutil.rmtree(site / "kernels")
    done = python("-c", "import verify, kernels", path=(site,), cwd=tmp_path)
    assert "No module named 'kernels'" in done.stderr


def test_the_collection_says_whose_kernels_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("kernels")
    other.__path__ = ["/elsewhere/kernels"]
    monkeypatch.setitem(sys.modules, "kernels", other)
    with pytest.raises(ImportError, match=r"was imported before \(/elsewhere/kernels\)"):
        bundle.use_collection()


def test_children_of_a_checkout_import_this_very_package(monkeypatch: pytest.MonkeyPatch) -> None:
    both = os.pathsep.join([str(bundle.ROOT), "/other"])
    assert bundle.for_children({"PYTHONPATH": "/other"}) == {"PYTHONPATH": both}
    assert bundle.for_children({}) == {"PYTHONPATH": str(bundle.ROOT)}
    monkeypatch.setattr(bundle, "INSTALLED", True)
    assert bundle.for_children({"PYTHONPATH": "/other"}) == {"PYTHONPATH": "/other"}


def test_a_wheel_sets_up_no_environment(site: Path, tmp_path: Path) -> None:
    """It says what is missing and how to install it."""
    text = '[project]\ndependencies = ["not-there>=1", "triton"]\n[dependency-groups]\ntest = []\n'
    (site / "verify" / "_bundled" / "pyproject.toml").write_text(text, encoding="utf-8")
    (site / "triton.py").touch()
    done = python("-m", "verify", "list", path=(site,), cwd=tmp_path)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line == "verify: missing not-there; install with: pip install not-there"
    assert not list(tmp_path.rglob(".venv"))


def test_the_suite_is_not_in_a_wheel(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("verify.cli.tools.INSTALLED", True)
    monkeypatch.setattr("verify.campaign.applicability.INSTALLED", True)
    for words, said in (("test", "unpacked sdist"), ("oracles --table", "checkout")):
        monkeypatch.setattr(sys, "argv", ["verify", *words.split()])
        assert cli.main() == cli.USAGE
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("verify: ")
        assert said in line


def test_a_report_names_kernels_as_the_checkout_does(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("/home/kernels/site-packages/verify/_bundled")
    monkeypatch.setattr(bundle, "ROOT", root)
    assert bundle.published(f"{root}/kernels/torch/math.py") == "kernels/torch/math.py"
    assert bundle.published("/home/kernels/mine.py") == "mine.py"


def test_the_judges_sources_are_those_of_the_checkout() -> None:
    sources = bundle.judge_sources()
    some = {"verify/__init__.py", "verify/cell/child.py", "references/masks/base.py"}
    assert some <= set(sources)
    assert all(path == bundle.ROOT / name for name, path in sources.items())
    assert list(sources) == sorted(sources, key=Path)
