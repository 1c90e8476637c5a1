"""Configs: their names parse back, and nothing else does."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from verify.variant import (
    Config,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=4)))
@pytest.mark.parametrize(
    "options", [(), (("split", 4),), (("acc", "fp16"), ("swizzle", 128)), (("two_words", 3),)]
)
def test_config_names_parse_back(
    present: tuple[bool, ...], options: tuple[tuple[str, int | str], ...]
) -> None:
    names = ("block_m", "block_n", "num_warps", "num_stages")
    numbers = {
        name: value for name, value, has in zip(names, (128, 64, 4, 3), present, strict=True) if has
    }
    config = Config(**numbers, options=options)
    assert Config.parse(config.name) == config
    assert re.fullmatch(r"[a-z0-9_-]+", config.name)


def test_config_names_are_as_documented() -> None:
    assert Config(block_m=128, block_n=64, num_warps=4, num_stages=2).name == "m128n64w4s2"
    assert Config().name == "default"
    assert Config(options=(("split", 4),)).name == "default-split_4"


@pytest.mark.parametrize(
    "name",
    ["", "m", "m128x3", "x3", "128", "m1m2", "m-1", "default-", "m128-split", "m12 8", "M128"],
)
def test_what_is_no_config_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"not a config's name|unpack|not enough"):
        Config.parse(name)
