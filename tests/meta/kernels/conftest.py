"""What several tests of the kernels need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kernels.cuda import family
from kernels.ptx.tiling import ROOM
from tests.harness.ptx_host import MODULES, Choice, Host


@pytest.fixture
def host(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Makes `forward` run on the CPU: host(choice) gives the `Host` of a build, which forward then
    launches."""
    current: list[Host] = []

    def hosts(choice: Choice, edit: Callable[[str], str] = lambda text: text) -> Host:
        made = MODULES[choice.name].TILING.launch(*choice.build, narrow=choice.narrow)
        current[:] = [Host(made.source, tmp_path_factory.mktemp("host"), edit)]
        return current[0]

    monkeypatch.setattr(family, "loaded", lambda source, arch: current[0])
    monkeypatch.setattr(family, "device_arch", lambda device: "host")
    monkeypatch.setattr(family, "shared_room", lambda device: ROOM)
    monkeypatch.setattr(family, "launch", lambda kernel, *rest: kernel.launch(*rest))
    return hosts
