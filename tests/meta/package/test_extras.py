"""Extras: the base installation is light, and what needs a missing package says what to install.

.ci/wheel tries the commands in environments that lack triton, matplotlib and CUDA's packages.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs.site.links import check_site
from tests.harness.fake_campaign import evidence
from tests.harness.finished_runs import PLAIN, command
from verify import bootstrap
from verify.bundle import ROOT
from verify.campaign.builds import Builder
from verify.campaign.run import CampaignRun
from verify.campaign.runner import CLEAN, INFRASTRUCTURE
from verify.cell.discovery import Roster, roster
from verify.evidence import Recorder, load
from verify.machine import extras
from verify.report import build, write

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GONE = "no_such_package_is_installed"
SAID = f"{GONE} is not installed: pip install 'attention-verify[triton]'"


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that stands for triton and is not there."""
    monkeypatch.setitem(extras.EXTRAS, GONE, "triton")


def absent(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these modules be not installed, as far as `extras` looks."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> object:
        return None if name in modules else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


class TestSteps:
    def test_torch_and_triton_are_unpacked_while_the_others_are_resolved(self) -> None:
        (torch, triton, others), (whole,) = bootstrap._steps(["pip"])
        listed = bootstrap.groups()
        assert torch[:2] == triton[:2] == ["pip", "--no-deps"]
        assert [bootstrap._name(each) for each in torch[2:]] == ["torch"]
        assert [*listed["triton"], *listed["cutlass"]] == triton[2:]
        # Two processes that install the same package would meet.
        assert not {bootstrap._name(each) for each in others} & {"torch", "triton"}
        # What was unpacked without its dependencies is asked for again, with them.
        assert set(bootstrap.requirements()) <= set(whole)
        assert not {"--no-deps"} & {*others, *whole}
        # CUTLASS's package, already there or not, lacks what no kernel needs.
        assert all("--no-warn-conflicts" in command for command in (others, whole))

    def test_the_last_step_finds_all_but_what_torch_depends_on(self) -> None:
        first, (whole,) = bootstrap._steps(["pip"])
        there = {each for command in first for each in command}
        wanted = [each for each in whole[1:] if each[0] not in "-/"]
        assert set(wanted) <= there
        assert f"{ROOT}[campaign]" in whole
        assert set(bootstrap.groups()["campaign"]) <= there

    def test_this_project_is_built_by_what_the_first_step_installs(self) -> None:
        (*_, others), (whole,) = bootstrap._steps(["pip"])
        assert "--no-build-isolation" in whole
        built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
        assert set(built["requires"]) <= set(others)

    def test_a_step_fails_if_one_of_its_commands_does(self) -> None:
        good, bad = ([sys.executable, "-c", f"raise SystemExit({code})"] for code in (0, 1))
        assert bootstrap._run_together([good, good])
        assert not bootstrap._run_together([bad, good])
        assert not bootstrap._run_together([good, bad])


class TestLists:
    def test_every_extra_is_in_all_and_brings_its_module(self) -> None:
        optional = dict(PROJECT["optional-dependencies"])
        assert optional.pop("all") == [f"attention-verify[{','.join(optional)}]"]
        assert set(extras.EXTRAS.values()) == set(optional)
        for module, extra in extras.EXTRAS.items():
            assert any(line.startswith(module) for line in optional[extra])

    def test_the_base_is_light(self) -> None:
        heavy = ("triton", "matplotlib", "cuda", "nvidia")
        assert not [line for line in PROJECT["dependencies"] if line.startswith(heavy)]

    def test_a_checkout_wants_what_its_collection_needs_and_a_wheel_does_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absent(monkeypatch, "triton", "matplotlib")
        assert bootstrap.missing() == ["triton", "matplotlib"]
        monkeypatch.setattr(bootstrap, "INSTALLED", True)
        assert bootstrap.missing() == []
        absent(monkeypatch, "click")
        assert bootstrap.missing() == ["click"]


class TestAdvice:
    def test_a_package_that_is_here_is_not_missing(self) -> None:
        assert extras.lacking("triton") is None
        assert extras.lacked_by("ModuleNotFoundError: No module named 'triton.language'") is None
        extras.need("matplotlib")

    def test_one_that_is_not_here_is_named_with_its_extra(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absent(monkeypatch, "matplotlib", "cuda")
        said = "matplotlib is not installed: pip install 'attention-verify[report]'"
        assert extras.lacking("matplotlib") == said
        with pytest.raises(extras.MissingPackageError, match=r"^matplotlib is not installed: "):
            extras.need("matplotlib")
        assert extras.lacked_by("No module named 'numpy_2'") is None
        reason = "no NVRTC through cuda.core: No module named 'cuda'"
        assert extras.advised(reason) == (
            f"{reason} (cuda is not installed: pip install 'attention-verify[cuda]')"
        )

    def test_headers_are_set_up_by_a_command(self) -> None:
        assert extras.advised(None) is None
        assert extras.advised("no CUDA device") == "no CUDA device"
        for reason in ("no CuTe headers: set CUTLASS_PATH", "no CCCL headers, which CuTe includes"):
            assert extras.advised(reason) == f"{reason} (`verify setup cute` installs them)"

    def test_the_reasons_of_the_cute_kernels_are_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kernels.cute import family

        monkeypatch.setattr(family, "headers", lambda: None)
        assert "verify setup cute" in str(extras.advised(family._headers_missing()))


@pytest.mark.usefixtures("gone")
class TestKernelFiles:
    def file(self, folder: Path) -> Path:
        path = folder / "needy.py"
        path.write_text(f"import {GONE}\n\n\ndef attention(q, k, v):\n    return q\n")
        return path

    def test_a_file_that_needs_one_is_not_run_and_no_failure(self, tmp_path: Path) -> None:
        listed = roster([self.file(tmp_path)])
        assert (listed.entries, listed.failures) == ((), ())
        assert listed.lacking == f"not run: {tmp_path / 'needy.py'}: {SAID}"
        assert Roster.loads(listed.dumps()) == listed
        run = CampaignRun(tmp_path / "run", "dev", (self.file(tmp_path), Path(PLAIN)))
        assert [each.ref for each in run.roster.unmet] == [str(tmp_path / "needy.py")]
        assert run.roster.lacking is None
        recorded = load(tmp_path / "run")
        assert [(each.variant, each.reason) for each in recorded.not_run if not each.dtype] == [
            (str(tmp_path / "needy.py"), SAID)
        ]
        assert not recorded.verdicts

    def test_commands_say_it_in_one_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        name = self.file(tmp_path).name
        case = f"{name}@needy:default:accuracy:sq=1,skv=1,d=16,dtype=float32"
        for words in (["list", name], ["bench", "kernels", name], ["replay", case]):
            assert command(monkeypatch, *words) == INFRASTRUCTURE
            (line,) = capsys.readouterr().out.strip().splitlines()
            assert line == f"verify: not run: {name}: {SAID}"


BUILDS = """
from verify.variant import Build, Numerics, Support, Variant


def forward(args, out, lse, workspace):
    raise NotImplementedError


def missing():
    import {gone}


def wrong():
    raise ValueError("a syntax error")


VARIANT = Variant(
    name="needy",
    family="cuda",
    forward=forward,
    support=Support(dtypes=("float32",), head_dims=(64,)),
    numerics=Numerics(),
    builds=lambda arch: [Build("missing", missing), Build("wrong", wrong)],
)
"""


def test_a_compiler_that_is_missing_is_no_fault_of_a_kernel(tmp_path: Path, gone: None) -> None:
    path = tmp_path / "needy.py"
    path.write_text(BUILDS.format(gone=GONE), encoding="utf-8")
    (declaration,) = roster([path]).declarations
    with Recorder(tmp_path, "gw0-builds") as recorder:
        builder = Builder(recorder, "gpu")
        (failure,) = builder.compile(declaration, "sm_90a")
        builder.close()
    assert "wrong does not compile" in failure
    recorded = load(tmp_path)
    (record,) = recorded.not_run
    assert (record.dtype, record.reason) == ("(builds)", SAID)
    assert [built.build for built in recorded.builds] == ["wrong"]


class TestPictures:
    def test_a_report_without_matplotlib_says_so_and_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = build(evidence())
        write(made, tmp_path / "with")
        absent(monkeypatch, "matplotlib")
        write(made, tmp_path / "without")
        drawn, left_out = (
            (tmp_path / name / "report.html").read_text(encoding="utf-8")
            for name in ("with", "without")
        )
        assert "matplotlib" not in drawn.partition("<h2")[2]
        assert check_site(tmp_path / "with") == check_site(tmp_path / "without") == []
        assert "<svg" not in left_out
        assert "could not be drawn: matplotlib is not installed: pip install" in left_out
        for name in ("report.json", "report.md"):
            assert (tmp_path / "with" / name).read_text() == (
                tmp_path / "without" / name
            ).read_text()

    @pytest.mark.parametrize(
        "words", [("report", "--publish"), ("report", "--render", "."), ("recheck", ".")]
    )
    def test_pages_for_others_are_not_written_without_their_pictures(
        self,
        words: tuple[str, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        absent(monkeypatch, "matplotlib")
        assert command(monkeypatch, *words) == INFRASTRUCTURE
        (line,) = capsys.readouterr().out.strip().splitlines()
        assert line.startswith("verify: matplotlib is not installed: pip install")


class TestSetUp:
    def set_up(self, monkeypatch: pytest.MonkeyPatch, status: int) -> tuple[int, list[list[str]]]:
        commands: list[list[str]] = []

        def run(words: list[str], check: bool) -> subprocess.CompletedProcess[str]:
            commands.append(words)
            return subprocess.CompletedProcess(words, status)

        monkeypatch.setattr(subprocess, "run", run)
        return command(monkeypatch, "setup", "cute"), commands

    def test_headers_come_without_the_dependencies_of_cutlass(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, commands = self.set_up(monkeypatch, 0)
        assert status == CLEAN
        cuda, cutlass = commands
        assert all(words[:4] == [sys.executable, "-m", "pip", "install"] for words in commands)
        assert "--no-deps" not in cuda
        assert any(word.startswith("nvidia-cuda-cccl") for word in cuda)
        assert "--no-deps" in cutlass
        assert any(word.startswith("nvidia-cutlass") for word in cutlass)
        assert "headers are installed" in capsys.readouterr().out

    def test_a_failing_installation_is_infrastructure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        status, commands = self.set_up(monkeypatch, 1)
        assert status == INFRASTRUCTURE
        assert len(commands) == 1

    def test_without_pip_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        absent(monkeypatch, "pip")
        status, commands = self.set_up(monkeypatch, 0)
        assert (status, commands) == (INFRASTRUCTURE, [])
        assert "without its dependencies, nvidia-cutlass" in capsys.readouterr().err
