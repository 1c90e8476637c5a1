"""What several of the judge's own tests need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.harness.kernel_files import ENVIRONMENT, FILL, Writer, kernel
from tests.harness.shared_fork_server import SharedForkServer, end_all
from verify.cell.process import PLAIN_CPU, Cell, ForkServer
from verify.machine import device, starter

# The modules that ask which device kernels run on.  Commands ask too: tests call them as users do.
ASK_FOR_THE_DEVICE = (
    "verify.cell.discovery",
    "verify.oracles.long.lengths",
    "verify.oracles.long.problems",
    "verify.campaign.judge",
    "verify.campaign.run",
    "verify.campaign.targets",
)


@pytest.fixture(autouse=True)
def gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that says what nvidia-smi answers is heard, whatever this session has found out."""
    monkeypatch.setattr(device, "_known", None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch with one thread, while the tests of a module run: their tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def kernels_run_on_the_cpu() -> Iterator[None]:
    """On a machine with a GPU, too: the kernels that these tests put on trial are written for a
    CPU, and what is held against them is on record from one."""
    with contextlib.ExitStack() as patches:
        for place in ASK_FOR_THE_DEVICE:
            patches.enter_context(mock.patch(f"{place}.environment", return_value=PLAIN_CPU))
        yield


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """A function that writes a kernel file (see `kernel_files.kernel`)."""

    def write(body: str = FILL, before: str = "") -> Path:
        path = tmp_path / f"kernel{len(list(tmp_path.glob('kernel*')))}.py"
        path.write_text(kernel(body, before), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose kernel processes may write where these tests keep their files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERIFY_WRITABLE", str(tmp_path_factory.getbasetemp()))
        fork_server = ForkServer(ENVIRONMENT)
        yield fork_server
        fork_server.close()


@pytest.fixture
def cell(fork_server: ForkServer) -> Iterator[Cell]:
    """A cell, closed at the end."""
    cell = Cell(fork_server)
    yield cell
    cell.close()


@pytest.fixture(scope="session")
def _shared() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module", autouse=True)
def courts_share_a_fork_server(_shared: None) -> Iterator[None]:
    """What imports torch is started once for all judges and rosters of a worker."""
    with contextlib.ExitStack() as patches:
        for place in ("verify.cell.discovery", "verify.campaign.judge"):
            patches.enter_context(mock.patch(f"{place}.ForkServer", SharedForkServer))
        yield


@pytest.fixture
def own_starters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No starter, and those that the test starts end with it.  Those of the suite stay."""
    monkeypatch.setattr(starter, "_starters", {})
    yield
    for name in list(starter._starters):
        starter._drop(name)
