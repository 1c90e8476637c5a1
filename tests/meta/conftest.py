"""What several of the judge's own tests need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.meta.zygotes import SharedZygote, end_all
from verify.cell.cell import PLAIN_CPU


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
    places = ("verify.discovery", "verify.court", "verify.long")
    with contextlib.ExitStack() as patches:
        for place in places:
            patches.enter_context(mock.patch(f"{place}.environment", return_value=PLAIN_CPU))
        yield


@pytest.fixture(scope="session")
def _shared() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module", autouse=True)
def courts_share_a_zygote(_shared: None) -> Iterator[None]:
    """What imports torch is started once for all courts and rosters of a worker."""
    with contextlib.ExitStack() as patches:
        for place in ("verify.discovery", "verify.court"):
            patches.enter_context(mock.patch(f"{place}.Zygote", SharedZygote))
        yield
