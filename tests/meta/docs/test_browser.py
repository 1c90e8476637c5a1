"""A headless browser opens a report and the site: pages show, scripts run, dark is dark.

Where no Chromium is installed these tests are listed as not run; links and the form of the pages
are checked everywhere (test_site.py, `tox -e docs`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site.build import build
from docs.site.links import read_html
from tests.harness.fake_campaign import evidence
from tests.meta.docs.test_site import GROUPS, PAGE, README
from verify.bundle import ROOT
from verify.report import build as build_report
from verify.report import write

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(_NAMES)} is installed"),
    pytest.mark.for_ci,
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(build_report(evidence()), tmp_path_factory.mktemp("report"))[-1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small site in the style of the real one."""
    folder = tmp_path_factory.mktemp("site")
    root = folder / "repository"
    for name in ("verify/document/page.css", "docs/site/site.css"):
        (root / name).parent.mkdir(parents=True)
        shutil.copyfile(ROOT / name, root / name)
    for name, text in {"README.md": README, "docs/page.md": PAGE, "verify/x.py": "a\nb\n"}.items():
        (root / name).write_text(text, encoding="utf-8")
    (root / "plot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>', encoding="utf-8")
    build(root, folder / "out", GROUPS)
    return folder / "out" / "index.html"


@pytest.fixture
def profile() -> Iterator[Path]:
    """A folder for the browser's own files.  Its helpers can still write when it has ended."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


def browser(profile: Path, page: Path, *options: str, dark: bool = False) -> tuple[str, str]:
    """What the browser prints, and what it and the page complain about."""
    # Alone of all settings this one says which colours a page is asked for: 0 is dark, 1 light.
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            f"--user-data-dir={profile}",
            "--window-size=600,400",
            scheme,
            *options,
            page.as_uri(),
        ],
        env={**os.environ, "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def corner(profile: Path, page: Path, *, dark: bool) -> float:
    """The brightness of a picture's corner, 0 to 1."""
    from matplotlib.image import imread

    picture = profile / "page.png"
    browser(profile, page, f"--screenshot={picture}", dark=dark)
    return float(imread(picture)[2, 2, :3].mean())


def test_a_report_shows_and_its_script_runs(report: Path, profile: Path) -> None:
    shown, complaints = browser(profile, report, "--dump-dom")
    assert complaints == ""
    assert "<h1>" in shown
    assert 'type="search"' not in report.read_text(encoding="utf-8")
    assert 'type="search"' in shown, "page.js adds the box that filters rows"
    assert read_html(shown).faults == []


def test_a_script_that_is_not_the_reports_does_not_run(report: Path, profile: Path) -> None:
    planted = report.with_name("planted.html")
    text = report.read_text(encoding="utf-8")
    bad = "<script>document.title = 'planted'</script></body>"
    planted.write_text(text.replace("</body>", bad), encoding="utf-8")
    shown, complaints = browser(profile, planted, "--dump-dom")
    assert "<title>planted</title>" not in shown
    assert "Content Security Policy" in complaints


def test_the_site_shows(site: Path, profile: Path) -> None:
    shown, complaints = browser(profile, site, "--dump-dom")
    assert complaints == ""
    assert '<nav id="pages"' in shown
    assert 'href="docs/page.html#two-words"' in shown


@pytest.mark.parametrize("name", ["report", "site"])
def test_dark_is_dark_and_light_is_light(
    name: str, profile: Path, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(name)
    assert corner(profile, page, dark=True) < 0.2
    assert corner(profile, page, dark=False) > 0.8
