"""Which tile sizes and options a kernel is compiled with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from verify.variant.validation import Declared

_LETTERS = {"m": "block_m", "n": "block_n", "w": "num_warps", "s": "num_stages"}


@dataclass(frozen=True, kw_only=True)
class Config(Declared, path="config"):
    """What an autotuner or a launcher may choose.  `options` holds choices that only one family
    has."""

    block_m: int | None = None
    block_n: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    options: tuple[tuple[str, int | str], ...] = ()

    @cached_property
    def name(self) -> str:
        numbers = {letter: getattr(self, field) for letter, field in _LETTERS.items()}
        text = "".join(f"{letter}{value}" for letter, value in numbers.items() if value is not None)
        return "-".join([text or "default", *(f"{key}_{value}" for key, value in self.options)])

    @staticmethod
    def parse(name: str) -> Config:
        """The config of that name; raises ValueError."""
        text, *options = name.split("-")
        letters = {} if text == "default" else dict(re.findall(r"([mnws])(\d+)", text))
        if text != "default" and (
            not text or "".join(f"{letter}{value}" for letter, value in letters.items()) != text
        ):
            raise ValueError(f"{name!r} is not a config's name")
        numbers = {
            field: int(letters[letter]) for letter, field in _LETTERS.items() if letter in letters
        }
        pairs = (option.rsplit("_", 1) for option in options)
        return Config(
            **numbers,
            options=tuple(
                (key, int(value) if value.isdecimal() else value) for key, value in pairs
            ),
        )
