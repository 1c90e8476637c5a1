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
from verify.variant import Config

PERSISTENT = kernel.CONFIGS[2]
ORDINARY = kernel.BLOCKS[1]


# Declarations.


def test_an_option_is_off_unless_a_config_has_it() -> None:
    for name, wanted in (("persistent", [0, 0, 1, 0]), ("overlap", [0, 0, 0, 1])):
        assert [kernel.option(config, name, 128) for config in kernel.CONFIGS] == wanted
        assert [kernel.option(config, name, 256) for config in kernel.CONFIGS] == [0, 0, 0, 0]


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
        (replace(PERSISTENT, num_stages=3), 128, 3, 1),  # a second Q would not fit
        (PERSISTENT, 256, 1, 1),  # not persistent there
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
# Three tiles of keys or none.
FAULTY = "b=2,hq=2,sq=300,skv=150,mask=lengths.300_300.0_150"
# Short tiles of rows, so that the loader is ahead by whole ones.
SHORT = "hq=7,sq=128,skv=60"


def mend(library: ctypes.CDLL) -> None:
    library.weaken(0, -1, False)
    library.plant(-1)
    library.slow(0)


@has_headers
@has_host
@pytest.mark.for_ci
class TestOnTheHost:
    @pytest.fixture(autouse=True)
    def whole(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(kernel, "encode", encode)
        mend(library)
        yield
        mend(library)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["persistent", "both"])
    def test_it_stays_inside_its_bounds(self, library: ctypes.CDLL, name: str, shape: str) -> None:
        assert max(program_of(name, library).verdict(shape)) <= 1

    @pytest.mark.parametrize("programs", [1, 3, 5])
    def test_any_number_of_programs_shares_the_tiles(
        self, library: ctypes.CDLL, programs: int
    ) -> None:
        program = program_of("persistent", library, programs)
        for shape in ("hq=3,sq=300,skv=65", "hq=3,sq=300,skv=65,mask=causal"):
            assert max(program.verdict(shape)) <= 1

    @pytest.mark.parametrize("role", ROLES)
    def test_whichever_role_is_slow_it_stays_inside_its_bounds(
        self, library: ctypes.CDLL, role: str
    ) -> None:
        library.slow(ROLES[role])
        assert max(program_of("persistent", library).verdict(FAULTY)) <= 1

    @pytest.mark.parametrize("name", ["persistent", "both"])
    def test_nan_that_no_row_sees_stays_out(self, library: ctypes.CDLL, name: str) -> None:
        shape = "b=2,hq=2,sq=140,skv=250,mask=lengths.130_140.67_200"
        assert max(program_of(name, library).verdict(shape, spoiled=True)) <= 1

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_planted_fault_shows(self, library: ctypes.CDLL, fault: str) -> None:
        library.plant([*FAULTS].index(fault))
        assert worst(program_of("persistent", library), library) > 1

    @pytest.mark.parametrize("name", ["persistent", "both"])
    def test_every_wait_is_needed(self, library: ctypes.CDLL, name: str) -> None:
        lines = waits(SOURCE, persistent=True)
        assert len(lines) == 6
        for line in lines:
            library.weaken(line, -1, False)
            assert worst(program_of(name, library), library) > 1, f"without line {line}"
        library.weaken(0, -1, True)
        assert worst(program_of(name, library), library) > 1, "with products still in flight"


def worst(program: Program, library: ctypes.CDLL) -> float:
    """Of the shapes and the slow roles, up to the first that leaves its bounds."""
    for shape in (FAULTY, SHORT):
        for slow in (0, *ROLES.values()):
            library.slow(slow)
            if (ratio := max(program.verdict(shape))) > 1:
                return ratio
    return 0.0
