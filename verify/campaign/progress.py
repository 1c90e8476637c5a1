"""Shows how far a campaign has come: tests done and all, cases begun, failing verdicts, and about
how long it still takes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

_FILE = "progress.txt"
_FIRST, _EVERY = 10.0, 30.0  # seconds until the first line without a terminal, and between two
_EARLY = 5.0  # seconds in which no time left is told
_MINUTE = 60.0


@dataclass(frozen=True)
class Counted:
    """Counted of a campaign that have ended, and all of them."""

    done: int
    total: int


def record(directory: Path, tests: Counted) -> None:
    """Write the numbers into a run's directory; without room for them nothing is written."""
    with contextlib.suppress(OSError):
        new = directory / f"{_FILE}.new"
        new.write_text(f"{tests.done} {tests.total}", encoding="utf-8")
        os.replace(new, directory / _FILE)


def recorded(directory: Path) -> Counted | None:
    """The numbers that were written last; None before."""
    try:
        done, total = (directory / _FILE).read_text(encoding="utf-8").split()
        return Counted(int(done), int(total))
    except (OSError, ValueError):
        return None


@dataclass
class Tally:
    """Counts cases begun and failing verdicts by a cheap scan of the evidence's new lines."""

    begun: int = 0
    failing: int = 0
    read_to: dict[Path, int] = field(default_factory=dict)

    def read(self, directory: Path) -> None:
        """Count the lines added since the last call."""
        for path in directory.glob("*.jsonl"):
            begin = self.read_to.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self.read_to[path] = begin + len(text)
            self.begun += text.count(b'"kind":"begin"')
            self.failing += text.count(b'"outcome":"fail"')


@dataclass
class Progress:
    """The progress of one campaign.

    deadline: in seconds of time.monotonic(); no case begins after it.  tests: as `text` read them
    last; None before they are known.
    """

    directory: Path
    deadline: float | None = None
    tally: Tally = field(default_factory=Tally)
    began: float = field(default_factory=time.monotonic)
    tests: Counted | None = None

    def text(self) -> str:
        """What is known now, in words."""
        self.tally.read(self.directory)
        self.tests = tests = recorded(self.directory)
        if tests is None:
            return "starting"
        words = [f"{tests.done} of {tests.total} tests", f"{self.tally.begun} cases"]
        words.append(f"{self.tally.failing} failing verdicts")
        left = self._left(tests)
        return ", ".join(words) + ("" if left is None else f"; about {duration(left)} left")

    def _left(self, tests: Counted) -> float | None:
        """Seconds that the other tests take if they take as long as those that have ended."""
        now = time.monotonic()
        spent = now - self.began
        if spent < _EARLY or not tests.done:
            return None
        left = spent / tests.done * (tests.total - tests.done)
        return left if self.deadline is None else max(min(left, self.deadline - now), 0.0)


def duration(seconds: float) -> str:
    """A time in words, to the second below two minutes."""
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min"


class _Lines:
    """Plain lines on stderr, for a log file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.next = _FIRST

    def show(self, progress: Progress) -> None:
        """Print a line if it is time for one."""
        spent = time.monotonic() - progress.began
        if spent >= self.next:
            self.next = spent + _EVERY
            line = f"verify: {duration(spent)}: {progress.text()}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Bar:
    """One line that changes, on a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Bar(*columns, console=console, transient=True)
        self.task = self.bar.add_task("starting", total=None)

    def show(self, progress: Progress) -> None:
        """Draw the line."""
        text, tests = progress.text(), progress.tests
        if tests is not None:
            self.bar.update(self.task, completed=tests.done, total=tests.total)
        self.bar.update(self.task, description=text)


class _Nothing:
    """For a campaign inside somebody else's program."""

    def show(self, progress: Progress) -> None:
        """Show nothing."""


@contextlib.contextmanager
def shown(console: Console, quiet: bool) -> Iterator[_Lines | _Bar | _Nothing]:
    """What shows a campaign's progress: a bar on a terminal, else plain lines on stderr."""
    if quiet:
        yield _Nothing()
    elif console.is_terminal:
        bar = _Bar(console)
        with bar.bar:
            yield bar
    else:
        yield _Lines(Console(stderr=True))
