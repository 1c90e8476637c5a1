"""Files beside kernels that are no kernels: a folder and a shell's glob name them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands import verify
from verify.campaign.run import CampaignRun
from verify.cell.discovery import Roster, roster
from verify.cell.helper_files import Unloadable, reasons
from verify.cell.process import ForkServer
from verify.cli.options import UsageError, existing
from verify.evidence import NO_KERNEL, load
from verify.report import build

KERNEL = """
import torch
from {helper} import scores


def attention(q, k, v):
    return torch.softmax(scores(q, k), -1) @ v
"""
HELPER = """
def scores(q, k):
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
"""


def folder(tmp_path: Path, **texts: str) -> list[Path]:
    """Files with these texts, in the order of a shell's glob."""
    for stem, text in texts.items():
        (tmp_path / f"{stem}.py").write_text(text)
    return sorted(tmp_path.glob("*.py"))


def refs(found: Roster) -> dict[str, str]:
    return {Path(each.path).name: each.message for each in found.helpers}


def failed(found: Roster) -> list[str]:
    return [Path(each.path).name for each in found.failures]


class TestRoster:
    def test_a_packages_file_and_an_imported_file_are_no_kernels(
        self, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        files = folder(
            tmp_path,
            __init__="from .mine import attention\n",
            mine=KERNEL.format(helper="between"),
            between="from common import scores\n",
            common=HELPER,
        )
        found = roster(files, fork_server)
        by = f"no kernel: imported by {tmp_path / 'mine.py'}"
        assert refs(found) == {
            "__init__.py": "no kernel: a package's __init__.py",
            "between.py": by,
            "common.py": by,
        }
        assert (failed(found), len(found.declarations)) == ([], 1)
        assert Roster.loads(found.dumps()) == found

    def test_an_imported_file_whose_function_cannot_be_called_is_no_kernel(
        self, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        unfit = HELPER + "\n\ndef forward(q, k, v, out):\n    out.copy_(v)\n"
        files = folder(tmp_path, mine=KERNEL.format(helper="common"), common=unfit)
        found = roster(files, fork_server)
        assert (list(refs(found)), failed(found)) == (["common.py"], [])
        (tmp_path / "mine.py").unlink()
        files = folder(tmp_path, common=unfit, alone=KERNEL.format(helper="verify"))
        assert "common.py" in failed(roster(files, fork_server)), "no kernel imports it"

    def test_a_file_that_no_kernel_needs_does_not_load(
        self, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        alone = "from common import scores\n"
        files = folder(
            tmp_path, mine=KERNEL.format(helper="other"), other=HELPER, alone=alone, common=HELPER
        )
        found = roster(files, fork_server)
        assert failed(found) == ["alone.py", "common.py"], "what needs it is no kernel either"
        assert list(refs(found)) == ["other.py"]

    def test_a_file_that_a_kernel_only_may_import_does_not_load(
        self, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        """It can as well be a kernel that declares nothing."""
        computed = "\n\ndef other(name):\n    return __import__(name)\n"
        files = folder(
            tmp_path, mine=KERNEL.format(helper="common") + computed, common=HELPER, other=HELPER
        )
        found = roster(files, fork_server)
        assert (list(refs(found)), failed(found)) == (["common.py"], ["other.py"])

    @pytest.mark.parametrize("stem", ["__init__", "common"])
    def test_a_file_given_alone_is_meant(
        self, stem: str, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        found = roster(folder(tmp_path, **{stem: HELPER}), fork_server)
        assert (failed(found), found.helpers) == ([f"{stem}.py"], ())
        assert "declares no VARIANT" in str(found.unusable)

    def test_kernels_that_do_not_load_need_their_files_too(
        self, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        broken = KERNEL.format(helper="common") + "\nraise RuntimeError\n"
        lacks = "import cuda.core.never_there\n" + KERNEL.format(helper="tiles")
        files = folder(tmp_path, broken=broken, common=HELPER, lacks=lacks, tiles=HELPER)
        found = roster(files, fork_server)
        assert list(refs(found)) == ["common.py", "tiles.py"]

    def test_an_init_that_declares_or_does_not_parse_is_judged_like_any_file(
        self, tmp_path: Path, fork_server: ForkServer
    ) -> None:
        kernel = KERNEL.format(helper="common")
        files = folder(tmp_path, mine=kernel, common=HELPER, __init__="def (")
        assert failed(roster(files, fork_server)) == ["__init__.py"]
        files = folder(tmp_path, __init__="from .mine import attention\nVARIANTS = [attention]\n")
        assert failed(roster(files, fork_server)) == ["__init__.py"]
        files = folder(tmp_path, __init__=kernel)
        assert len(roster(files, fork_server).declarations) == 2


def test_a_packages_file_is_called_so_even_if_a_kernel_imports_it() -> None:
    undeclared = [Unloadable(f"a/{name}.py", f"/a/{name}.py", "") for name in ("__init__", "tile")]
    found = reasons(undeclared, {"k.py": {"/a/__init__.py", "/a/tile.py"}})
    assert [*found.values()] == [
        "no kernel: a package's __init__.py",
        "no kernel: imported by k.py",
    ]


def test_a_run_lists_them_and_its_report_can_hold(tmp_path: Path) -> None:
    files = folder(tmp_path, mine=KERNEL.format(helper="common"), common=HELPER, __init__="")
    run = CampaignRun(tmp_path / "run", "dev", tuple(files))
    assert len(run.here) == 1
    evidence = load(run.directory)
    left = {(Path(each.variant).name, each.dtype) for each in evidence.not_run}
    assert {("common.py", NO_KERNEL), ("__init__.py", NO_KERNEL)} <= left
    assert not evidence.verdicts, "no verdict that they do not load"
    assert build(evidence)["reasons"] == [], "nothing is missing"


def test_the_command_line_says_so(tmp_path: Path) -> None:
    folder(tmp_path, mine=KERNEL.format(helper="common"), common=HELPER, __init__="")
    names = ["__init__.py", "common.py", "mine.py"]
    listed = verify("list", *names, cwd=tmp_path)
    said = (
        "__init__.py: no kernel: a package's __init__.py",
        "common.py: no kernel: imported by mine.py",
    )
    assert listed.returncode == 0
    assert set(said) <= set(listed.stdout.splitlines())
    words = ("--dtype", "float32", "--oracle", "repeat", "-n", "0")
    judged = verify("run", *names, *words, cwd=tmp_path)
    assert judged.returncode == 0, judged.stdout
    assert set(said) <= set(judged.stdout.splitlines())


@pytest.mark.for_ci
def test_a_folder_means_its_python_files(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    (kernels / "within.py").mkdir(parents=True)
    (kernels / ".hidden.py").write_text("")
    folder(kernels, mine=KERNEL.format(helper="common"), common=HELPER, __init__="")
    words = ("--dtype", "float32", "--oracle", "repeat", "-n", "0")
    judged = verify("run", "kernels/", *words, cwd=tmp_path)
    assert judged.returncode == 0, judged.stdout
    said = (
        "kernels/__init__.py: no kernel: a package's __init__.py",
        "kernels/common.py: no kernel: imported by kernels/mine.py",
    )
    assert set(said) <= set(judged.stdout.splitlines())
    listed = verify("list", ".", cwd=kernels)
    assert listed.returncode == 0, listed.stdout
    assert "mine.py@mine" in listed.stdout
    assert "hidden" not in listed.stdout


class TestFolders:
    def test_files_and_folders_are_taken_in_the_order_given_and_once(self, tmp_path: Path) -> None:
        a, b = folder(tmp_path, b="", a="")
        assert existing((b, tmp_path)) == (b, a)
        assert existing((tmp_path, tmp_path)) == (a, b)

    def test_a_folder_without_kernels_says_where_python_files_are(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r": this folder holds no kernel files$"):
            existing((tmp_path,))
        folder(tmp_path, __init__="")
        for name in (".git", *(f"f{number}" for number in range(10))):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x.py").write_text("")
        with pytest.raises(UsageError, match=r"folders in it \(f0, f1, .*, f7, \.\.\.\)$"):
            existing((tmp_path,))

    def test_a_link_to_nothing_is_told(self, tmp_path: Path) -> None:
        folder(tmp_path, a="")
        (tmp_path / "b.py").symlink_to("nowhere.py")
        with pytest.raises(UsageError, match=r"no such kernel file: .*/b\.py$"):
            existing((tmp_path,))
