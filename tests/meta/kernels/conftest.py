"""What several tests of the kernels need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.cuda import family
from kernels.ptx.tiling import ROOM
from tests.harness.ptx_host import Host


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], Host]:
    """Makes `forward` run on the CPU: launched(host) gives that host back, which forward then
    launches."""
    current: list[Host] = []

    def chosen(made: Host) -> Host:
        current[:] = [made]
        return made

    monkeypatch.setattr(family, "loaded", lambda source, arch: current[0])
    monkeypatch.setattr(family, "device_arch", lambda device: "host")
    monkeypatch.setattr(family, "shared_room", lambda device: ROOM)
    monkeypatch.setattr(family, "launch", lambda kernel, *rest: kernel.launch(*rest))
    return chosen
