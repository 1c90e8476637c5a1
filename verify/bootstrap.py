"""Bootstrap: make `python -m verify` work on a fresh clone that has only Python, pip and git.
Standard library alone.

If a required package is missing, an environment is made in `.venv` beside the sources, with the
versions that constraints.txt pins, and the command is run again there.  VERIFY_BOOTSTRAP=0 turns
this off.  An installed wheel sets up nothing: it says what is missing.

`python -m verify.bootstrap headers` is for tox: it installs CUTLASS's headers into the environment
that tox has made.  `verify setup cute` installs them, and what they include, into any other one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from verify.bundle import INSTALLED, ROOT

_IMPORT_NAMES = {"pytest-xdist": "xdist"}
_CHECKOUT = ("", "triton", "report", "test")


def groups() -> dict[str, list[str]]:
    """What the commands need, as pyproject.toml lists it: the project's dependencies (""), its
    extras and its dependency groups."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)
    project = listed["project"]
    extras = project.get("optional-dependencies", {})
    return {"": project["dependencies"], **extras, **listed["dependency-groups"]}


def requirements() -> list[str]:
    """What must be there: for a wheel what no command can do without, for a checkout what its
    collection and its tests need, too."""
    found = groups()
    wanted = ("",) if INSTALLED else _CHECKOUT
    return [requirement for name in wanted for requirement in found[name]]


def missing() -> list[str]:
    """Required packages that cannot be imported here."""
    names = [_name(requirement) for requirement in requirements()]
    if not sys.platform.startswith("linux"):
        names = [name for name in names if name != "triton"]
    # ml_dtypes is an independent witness in tests only; a machine that lacks it lists those tests
    # as not run.
    needed = [name for name in names if name != "ml_dtypes"]
    return [
        name for name in needed if importlib.util.find_spec(_IMPORT_NAMES.get(name, name)) is None
    ]


def ensure() -> None:
    """Return if everything is here; else set up `.venv`, run this command again in it, and exit
    with its status."""
    absent = missing()
    if not absent:
        return
    if INSTALLED:  # an environment is its owner's, who chose what is in it
        command = " ".join(["pip install", *absent])
        print(f"verify: missing {', '.join(absent)}; install with: {command}", file=sys.stderr)
        raise SystemExit(3)
    home = ROOT / ".venv"
    python = home / "bin" / "python"
    if os.environ.get("VERIFY_BOOTSTRAP") == "0" or os.environ.get("VERIFY_BOOTSTRAPPED") == "1":
        print(
            f"verify: missing {', '.join(absent)}; install them with: pip install -c"
            " constraints.txt -e .",
            file=sys.stderr,
        )
        raise SystemExit(3)
    if not _complete(python):
        print(
            f"verify: {', '.join(absent)} not found; setting up {home.name}/ with the pinned"
            " versions (once) ...",
            flush=True,
        )
        venv.create(home, with_pip=True)
        if not all(map(_run_together, _steps(_pip(str(python))))):
            print("verify: the installation failed; the lines above say why", file=sys.stderr)
            raise SystemExit(3)
        (home / "complete").touch()
    os.environ["VERIFY_BOOTSTRAPPED"] = "1"
    os.execv(python, [str(python), "-m", "verify", *sys.argv[1:]])


def _steps(pip: list[str]) -> list[list[list[str]]]:
    """The commands of an installation, in steps; those of one step run at the same time.

    pip waits for an index, or unpacks on one core.  torch and Triton are two thirds of all that
    there is, so each gets a process of its own; what depends on neither is resolved, which is
    mostly waiting, while these are unpacked.  A last command finds nearly all there: it adds what
    torch depends on, and this project.
    """
    found = groups()
    linux = sys.platform.startswith("linux")
    compilers = [*found["cuda"], *found["cute"]] if linux else []
    # with the extra: its tests run in a clone
    wanted = [*requirements(), *found["campaign"]]
    apart = {"torch": found[""], "triton": found["triton"]} if linux else {}
    own = {name: [each for each in listed if _name(each) == name] for name, listed in apart.items()}
    others = [each for each in wanted if _name(each) not in own]
    alone = [*pip, "--no-deps"]
    # CUTLASS's package asks for what no kernel needs, and pip would complain of that.
    quiet = [*pip, "--no-warn-conflicts"]
    headers = [[*alone, *own["triton"], *found["cutlass"]]] if linux else []
    large = [[*alone, *own["torch"]], *headers] if linux else []
    others_too = [*quiet, *others, *compilers, *_builders()]
    project = ["--editable", f"{ROOT}[campaign]", *requirements(), *compilers]
    whole = [*quiet, "--no-build-isolation", *project]
    return [[*large, others_too], [whole]]


def _builders() -> list[str]:
    """What builds this project, as pyproject.toml lists it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["build-system"]["requires"])


def _run_together(commands: list[list[str]]) -> bool:
    """Run them at the same time; returns whether all have succeeded."""
    processes = [subprocess.Popen(command) for command in commands]
    codes = [process.wait() for process in processes]
    return not any(codes)


def _complete(python: Path) -> bool:
    """Whether an earlier set-up finished, or an environment made by hand has what is needed."""
    if not python.exists():
        return False
    if (ROOT / ".venv" / "complete").exists():
        return True
    probe = "from verify import bootstrap; raise SystemExit(bool(bootstrap.missing()))"
    return (
        subprocess.run(
            [str(python), "-c", probe], cwd=ROOT, check=False, capture_output=True
        ).returncode
        == 0
    )


def headers() -> int:
    """Install CUTLASS's headers, without their package's dependencies; returns an exit code.

    Only into an environment that tox has made and that lacks them: `tox --current-env` installs
    nothing.
    """
    made = os.environ.get("TOX_ENV_DIR")
    wanted = groups()["cutlass"]
    if made is None or Path(sys.prefix).resolve() != Path(made).resolve():
        return 0
    if all(_installed(requirement) for requirement in wanted):
        return 0
    return subprocess.run([*_pip(sys.executable), "--no-deps", *wanted], check=False).returncode


def set_up_cute() -> int:
    """Install what CuTe kernels include into this environment: CUTLASS's headers, without their
    package's dependencies, and those of CUDA that they want.  Returns an exit code."""
    found = groups()
    if importlib.util.find_spec("pip") is None:
        print(
            f"verify: this environment has no pip; install with its own tool"
            f" {', '.join(found['cute'])} and, without its dependencies,"
            f" {', '.join(found['cutlass'])}",
            file=sys.stderr,
        )
        return 3
    for step in (found["cute"], ["--no-deps", *found["cutlass"]]):
        if subprocess.run([*_pip(sys.executable), *step], check=False).returncode:
            print("verify: the installation failed; the lines above say why", file=sys.stderr)
            return 3
    return 0


def _pip(python: str) -> list[str]:
    """The first words of an installation of pinned versions."""
    # Modules are compiled when they are imported: most of what is installed never is.
    words = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    return [*words, "--constraint", str(ROOT / "constraints.txt")]


def _installed(requirement: str) -> bool:
    """Whether any version of a required package is installed."""
    try:
        importlib.metadata.version(_name(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    if sys.argv[1:] != ["headers"]:
        raise SystemExit("usage: python -m verify.bootstrap headers")
    raise SystemExit(headers())
