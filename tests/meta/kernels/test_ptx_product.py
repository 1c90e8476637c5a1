"""The complete product of the raw-PTX configs: how large it is, what the judged ones cover of it,
and that it compiles."""

from __future__ import annotations

import itertools
import random

import pytest

from kernels.ptx.tiling import REGISTERS, ROOM, STORAGES, config
from tests.harness.ptx_host import MODULES
from verify.cuda.compile import compilable, compile_source
from verify.variant import Config

# Of (fp32, fp16) accumulators; 8-bit inputs have no product.
SIZES = {
    "split_q": (144, 64),
    "split_kv": (152, 152),
    "share_kv": (224, 144),
    "share_qkv": (144, 64),
    "tiling_qk": (640, 576),
    "tiling_qkv": (896, 576),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_product_is_as_large_as_documented_and_fits(name: str) -> None:
    tiling = MODULES[name].TILING
    for narrow, size in zip((False, True), SIZES[name], strict=True):
        found = tiling.product(narrow=narrow)
        assert len(found) == size
        for chosen in random.Random(1).sample([*found.values()], 8):
            assert Config.parse(chosen.name) == chosen
            assert max(tiling.shared_bytes(chosen, each) for each in tiling.head_dims) <= ROOM
            assert tiling.registers(chosen, 128, narrow=narrow) <= REGISTERS


@pytest.mark.parametrize("name", MODULES)
def test_a_judged_config_has_room_at_every_head_dim(name: str) -> None:
    module = MODULES[name]
    for chosen in module.CONFIGS:
        assert max(module.TILING.shared_bytes(chosen, x) for x in module.TILING.head_dims) <= ROOM


def test_what_does_not_fit_is_not_in_the_product() -> None:
    """Too many registers, and at head dim 256 too much shared memory."""
    tiling = MODULES["split_q"].TILING
    spills, large = config(128, 64, 1, 4), config(64, 128, 2)
    assert tiling.registers(spills, 128, narrow=False) > REGISTERS
    assert tiling.shared_bytes(large, 256) > ROOM
    assert not {spills.name, large.name} & tiling.product(narrow=False).keys()


def pairs(name: str, chosen: Config) -> set[tuple[object, object]]:
    """Every two values of a tiling's config."""
    values = {"tiling": name, **dict(chosen.options)}
    parts = ("block_m", "block_n", "num_warps", "num_stages")
    values |= {part: getattr(chosen, part) for part in parts}
    return set(itertools.combinations(sorted(values.items()), 2))


def test_every_two_values_that_can_meet_do_in_a_judged_config() -> None:
    met: set[object] = set()
    wanted: set[object] = set()
    for name in SIZES:
        tiling, judged = MODULES[name].TILING, MODULES[name].CONFIGS
        met = met.union(*(pairs(name, chosen) for chosen in judged))
        product = tiling.product(narrow=False).values()
        wanted = wanted.union(*(pairs(name, chosen) for chosen in product))
    assert wanted <= met, f"no judged config has {sorted(map(str, wanted - met))}"
    assert sum(len(MODULES[name].CONFIGS) for name in SIZES) == 42


@pytest.mark.first_look(1)
@pytest.mark.skipif(compilable() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("name", SIZES)
def test_a_further_config_compiles_without_a_spill(name: str) -> None:
    """One of each tiling, at a head dim up to 128, for which builds have no budget of spills."""
    tiling, draw = MODULES[name].TILING, random.Random(name)
    narrow = draw.random() < 0.5
    chosen = draw.choice([*tiling.product(narrow=narrow).values()])
    kind = draw.choice(("full", "band", "table"))
    head_dim, storage = draw.choice((64, 128)), draw.choice(STORAGES)
    made = tiling.launch(chosen, "float16", head_dim, kind, storage, narrow=narrow)
    resources = compile_source(made.source, "sm_90a").resources
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
