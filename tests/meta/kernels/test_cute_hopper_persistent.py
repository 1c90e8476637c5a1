"""Persistent programs of the Hopper forward, and the overlap of softmax and products: the source on
the CPU, with the rings' phases as mbarriers count them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kernels.cute import hopper_forward as kernel
from tests.harness.cute_hopper_host import (
    BUILDS,
    FAULTS,
    ROLES,
    SOURCE,
    Program,
    compiled,
    encode,
    waits,
)
from tests.harness.cute_host import has_headers, has_host, library_of_all
from verify.problem.inputs import tensors
from verify.variant import Config

PERSISTENT, BOTH = kernel.CONFIGS[2:]
ORDINARY = kernel.BLOCKS[1]


# Declarations.


def test_an_option_is_off_unless_a_config_has_it() -> None:
    assert [kernel.option(config, "persistent") for config in kernel.CONFIGS] == [0, 0, 1, 1]
    assert [kernel.option(config, "overlap") for config in kernel.CONFIGS] == [0, 0, 0, 1]


def test_a_case_can_name_every_block_with_every_option() -> None:
    for name, config in kernel.further_configs().items():
        assert Config.parse(name) == config
    assert {config.name for config in kernel.CONFIGS} <= kernel.further_configs().keys()


@pytest.mark.parametrize(
    ("config", "head_dim", "stages", "queries"),
    [
        (ORDINARY, 128, 2, 1),
        (PERSISTENT, 64, 2, 2),
        (PERSISTENT, 128, 2, 2),
        (PERSISTENT, 256, 1, 1),  # a second Q would not fit
        (replace(PERSISTENT, block_n=64), 256, 2, 1),
    ],
)
def test_persistent_programs_have_two_slots_of_q_where_they_fit(
    config: Config, head_dim: int, stages: int, queries: int
) -> None:
    room = kernel.Room.of(config, head_dim)
    assert (room.stages, room.queries) == (stages, queries)
    tiles = queries * (config.block_m or 0) + 2 * stages * (config.block_n or 0)
    assert 2 * head_dim * tiles < room.bytes <= kernel.ROOM


# The source on the CPU.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library_of_all(tmp_path_factory, "cute-hopper", compiled)


def program_of(name: str, library: ctypes.CDLL, programs: int = 2) -> Program:
    entry = library[f"run_{name}"]
    entry.restype = ctypes.c_char_p
    return Program(library, entry, *BUILDS[name], programs=programs)


# Tiles of rows with many keys, with few, and with none: the first ones of a causal mask, those of a
# batch, and those between documents.
SHAPES = (
    "sq=1,skv=1",
    "hq=2,sq=300,skv=300",
    "b=3,hq=2,hkv=1,sq=70,skv=70",
    "hq=3,sq=400,skv=200,mask=causal",
    "hq=2,sq=400,skv=3,mask=causal",
    "b=4,sq=140,skv=210,mask=lengths.140_130_0_60.0_200_9_0",
    "sq=500,skv=290,mask=window.70.3",
    "b=2,sq=70,skv=0",
    "sq=400,skv=400,mask=documents.5_135_260",
)
FAULTY = "hq=3,sq=400,skv=200,mask=causal"


@has_headers
@has_host
@pytest.mark.for_ci
class TestOnTheHost:
    @pytest.fixture(autouse=True)
    def whole(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(kernel, "encode", encode)
        for _ in self.mended(library):
            yield

    @staticmethod
    def mended(library: ctypes.CDLL) -> Iterator[None]:
        library.weaken(0, -1, False)
        library.plant(-1)
        library.slow(0)
        yield
        library.weaken(0, -1, False)
        library.plant(-1)
        library.slow(0)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["persistent", "both"])
    def test_it_stays_inside_its_bounds(self, library: ctypes.CDLL, name: str, shape: str) -> None:
        assert max(program_of(name, library).verdict(shape)) <= 1
