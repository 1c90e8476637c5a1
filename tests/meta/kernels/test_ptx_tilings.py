"""The raw-PTX kernels without a GPU: the promises of their tilings' names, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cuda import family
from kernels.ptx import split_q
from kernels.ptx.tiling import ELEMENT, HEAD_DIMS, STORAGES, config
from references.masks import Full
from references.score_mods import Softcap
from tests.harness.ptx_host import MODULES
from verify.variant import AttentionArgs, Config, Unsupported

torch.set_num_threads(1)


def shared_bytes(name: str, config: Config, head_dim: int) -> int:
    return int(MODULES[name].TILING.shared_bytes(config, head_dim))


def test_one_tile_of_share_qkv_holds_what_four_of_split_q_hold() -> None:
    """At the same blocks and one stage, where a block has twice as many rows as keys."""
    for head_dim in HEAD_DIMS:
        sizes = [
            shared_bytes(name, config(128, 64, 1), head_dim) for name in ("share_qkv", "split_q")
        ]
        assert sizes[1] == 4 * sizes[0]


def test_slices_of_tiling_qk_do_not_grow_with_head_dim() -> None:
    """All that grows is V's tile."""
    chosen = config(64, 32, 2, depth=16)
    rest = {
        shared_bytes("tiling_qk", chosen, head_dim) - 32 * head_dim * ELEMENT
        for head_dim in HEAD_DIMS
    }
    assert len(rest) == 1


def test_tiling_qkv_does_not_grow_with_head_dim() -> None:
    """But P's tile, the maxima and the sums, where several warps share a row."""
    chosen = config(64, 64, 2, depth=16)
    sizes = [shared_bytes("tiling_qkv", chosen, head_dim) for head_dim in HEAD_DIMS]
    assert len(set(sizes)) == 1
    v_slices = 2 * 64 * 64 * ELEMENT  # four warps divide 64 columns
    assert shared_bytes("tiling_qkv", chosen, 512) == v_slices + 64 * (64 * ELEMENT + 4 * 4)
    assert shared_bytes("tiling_qkv", chosen, 1024) == v_slices + 32 * (64 * ELEMENT + 4 * 4)


@pytest.mark.parametrize("name", MODULES)
def test_few_builds_meet_every_pair_of_choices(name: str) -> None:
    """Both storages of K in every config, head dim, dtype and kind of mask."""
    module = MODULES[name]
    for variant in getattr(module, "VARIANTS", [module.VARIANT]):
        support = variant.support
        names = [build.name for build in variant.builds("sm_90a")]
        configs = [config.name for config in variant.configs]
        assert len(names) == len(set(names)) <= 1.4 * len(configs) * len(support.head_dims)
        parts = (
            *(f"{config}-" for config in configs),
            *(f"-d{head_dim}-" for head_dim in support.head_dims),
            *(f"-{dtype}-" for dtype in support.dtypes),
            *(f"-{kind}" for kind in ("full", "band", "table")),
        )
        for part in parts:
            storages = {build.endswith("-transposed") for build in names if part in build}
            assert storages == {word != "strided" for word in support.storages}, part


def test_padded_rows_of_keys_take_their_own_room() -> None:
    """A slice of transposed K has a row for each column."""
    for swizzle, more in (("qkv", 0), ("none", 16 * (128 - 64))):
        chosen = config(64, 64, 1, swizzle=swizzle)
        sizes = [split_q.TILING.shared_bytes(chosen, 128, word) for word in STORAGES]
        assert sizes[1] - sizes[0] == 2 * more  # two slots


def test_a_config_that_the_device_has_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "shared_room", lambda device: 24 * 1024 - 1)
    out = torch.full((1, 1, 8, 64), 7.0, dtype=torch.float16)
    assert split_q.VARIANT.forward is not None
    with pytest.raises(Unsupported, match="24576 bytes of shared memory") as refusal:
        split_q.VARIANT.forward(arguments(), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == "config"
    assert (out == 7.0).all()


# Refusals.


def arguments(**changes: Any) -> AttentionArgs:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    given = {
        "q": q,
        "k": q,
        "v": q,
        "mask": Full(),
        "softmax_scale": 0.125,
        "score_mod": None,
        "config": split_q.CONFIGS[0],
    }
    return AttentionArgs(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"config": Config(block_m=64, block_n=16, num_warps=4, num_stages=2)}, "config"),
        ({"k": torch.zeros(1, 1, 8, 65, dtype=torch.float16)[..., 1:]}, "layout_k"),
        ({"v": torch.zeros(1, 1, 64, 8, dtype=torch.float16).mT}, "layout_v"),
        ({"score_mod": Softcap(1.0)}, "softcap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_outside_the_support_is_refused(changes: dict[str, Any], argument: str) -> None:
    out = torch.full((1, 1, 8, 64), 7.0, dtype=torch.float16)
    assert split_q.VARIANT.forward is not None
    with pytest.raises(Unsupported) as refusal:
        split_q.VARIANT.forward(arguments(**changes), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == argument
    assert (out == 7.0).all()
