"""tox.ini: what makes an environment installable, and `tox --current-env` install nothing.

.ci/run runs every environment.
"""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from verify import bootstrap
from verify.bundle import ROOT

TOX = ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini", encoding="utf-8")
ENVIRONMENTS = [name for name in TOX.sections() if name.startswith("testenv")]


def lines(environment: str, setting: str) -> list[str]:
    return TOX.get(environment, setting, fallback="").split("\n")


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_dependencies_are_requirements_and_no_options(environment: str) -> None:
    """To pip a list of nothing but `-c constraints.txt` is an error."""
    assert not [line for line in lines(environment, "deps") if line.startswith("-")]


def test_every_installation_is_constrained() -> None:
    assert "--constraint constraints.txt" in TOX["testenv"]["install_command"]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_commands_run_the_python_of_their_environment(environment: str) -> None:
    """tox-current-env's own `python` is a link, which does not know the virtual environment."""
    for setting in ("commands_pre", "commands"):
        for line in filter(None, lines(environment, setting)):
            assert line.startswith("{env_python} ")


@pytest.mark.parametrize(
    ("made", "there", "installs"),
    [(True, False, True), (True, True, False), (False, False, False)],
    ids=["made by tox", "already there", "current environment"],
)
def test_headers_are_installed_where_tox_made_the_environment(
    made: bool, there: bool, installs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("TOX_ENV_DIR", sys.prefix if made else str(tmp_path))
    monkeypatch.setattr(bootstrap, "_installed", lambda requirement: there)
    monkeypatch.setattr(subprocess, "run", run)
    assert bootstrap.headers() == 0
    assert len(commands) == installs
    for command in commands:
        assert command[0] == sys.executable
        assert {"--no-deps", str(ROOT / "constraints.txt")} <= set(command)
        assert any(word.startswith("nvidia-cutlass") for word in command)


def test_headers_are_for_tox_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOX_ENV_DIR", raising=False)
    monkeypatch.setattr(subprocess, "run", None)
    assert bootstrap.headers() == 0
