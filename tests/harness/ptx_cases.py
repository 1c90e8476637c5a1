"""What the raw-PTX kernels are asked on the CPU: builds, and problems of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from references.masks import Causal, Documents, Lengths, Window
from references.quantisation import parse_quantisation
from tests.harness.ptx_host import Choice, stored
from verify.problem import Layout, Problem

PITCHED, ASIDE = Layout("bshd", pitch=8), Layout(pitch=16, offset=8)
WIDE = {
    "layout_q": Layout("bshd"),
    "layout_k": PITCHED,
    "layout_v": Layout("sbhd", pitch=8),  # rows of V lie as far apart as those of no other tensor
    "layout_out": PITCHED,
}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "full": [
        {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 70, "seqlen_kv": 133, **WIDE},
        {"seqlen_q": 1, "seqlen_kv": 64, "softmax_scale": -0.25, "distribution": "large_logits"},
        {
            "heads_q": 3,
            "heads_kv": 3,
            "seqlen_q": 16,
            "seqlen_kv": 7,
            "softmax_scale": 0.0,
            "layout_k": ASIDE,
        },
        {"seqlen_q": 5, "seqlen_kv": 0},
        {"seqlen_q": 0, "seqlen_kv": 5},
        {"seqlen_q": 33, "seqlen_kv": 70, "distribution": "v_mean"},
    ],
    "band": [
        {
            "batch": 2,
            "heads_q": 4,
            "heads_kv": 2,
            "seqlen_q": 66,
            "seqlen_kv": 150,
            "mask": Causal(),
            **WIDE,
        },
        {"seqlen_q": 130, "seqlen_kv": 65, "mask": Causal(), "distribution": "increasing"},
        {"seqlen_q": 40, "seqlen_kv": 100, "mask": Causal("tl"), "softmax_scale": -0.1},
        {"seqlen_q": 70, "seqlen_kv": 3, "mask": Window(20, 1, "tl")},
        {"seqlen_q": 150, "seqlen_kv": 140, "mask": Window(33, 2)},
        # No row sees a key of the first blocks
        {"seqlen_q": 30, "seqlen_kv": 210, "mask": Window(20, 2)},
    ],
    "table": [
        {"batch": 2, "seqlen_q": 70, "seqlen_kv": 130, "mask": Lengths((70, 31), (0, 99))},
        {"seqlen_q": 140, "seqlen_kv": 140, "mask": Causal() & Lengths((129,), (101,)), **WIDE},
        {"seqlen_q": 100, "seqlen_kv": 160, "mask": Documents((90, 70))},
        # Rows of a tile that begin at different keys and end at the same one
        {"seqlen_q": 100, "seqlen_kv": 150, "mask": Window(30, None) & Lengths((95,), (150,))},
    ],
}
# Where rows of transposed K end in a tile: in bytes multiples of 17, and in chunks 3 and 7.
ENDS = [{"seqlen_q": 3, "seqlen_kv": keys} for keys in (113, 121)]
# Each tiling's choices meet every config, dtype, kind of mask and way to accumulate; the head dims
# are those that differ in how rows lie, and in which warps share them.
CHOICES = [
    Choice("split_q", 0, "float16", 64, "full"),
    Choice("split_q", 1, "bfloat16", 96, "band"),
    Choice("split_q", 2, "float16-narrow", 32, "table"),
    Choice("split_q", 3, "bfloat16", 64, "table"),
    Choice("split_q", 1, "float16", 64, "full", "transposed"),
    Choice("split_q", 2, "bfloat16", 32, "band", "transposed"),
    Choice("split_q_fp8", 0, "float8_e4m3fn", 64, "full"),
    Choice("split_q_fp8", 1, "float8_e5m2", 96, "band"),
    Choice("split_q_fp8", 2, "float8_e4m3fn", 32, "table"),
    Choice("split_q_fp8", 3, "float8_e5m2", 128, "full"),
    Choice("split_kv", 0, "bfloat16", 96, "table"),
    Choice("split_kv", 1, "bfloat16", 96, "full", "transposed"),
    Choice("split_kv", 2, "float16-narrow", 64, "band", "transposed"),
    Choice("split_kv", 1, "float16", 64, "band"),
    Choice("split_kv", 3, "float16", 64, "band"),
    Choice("split_kv", 2, "float16-narrow", 32, "full"),
    Choice("share_kv", 0, "bfloat16", 64, "band"),
    Choice("share_kv", 1, "float16-narrow", 96, "full"),
    Choice("share_kv", 2, "float16", 32, "table"),
    Choice("share_kv", 3, "bfloat16", 64, "full"),
    Choice("share_kv", 0, "float16", 96, "table", "transposed"),
    Choice("share_qkv", 0, "float16", 32, "band"),
    Choice("share_qkv", 1, "bfloat16", 64, "full"),
    Choice("share_qkv", 2, "float16-narrow", 64, "band"),
    Choice("share_qkv", 3, "float16", 96, "table"),
    Choice("share_qkv", 3, "float16-narrow", 64, "full", "transposed"),
    Choice("tiling_qk", 0, "float16", 32, "full"),
    Choice("tiling_qk", 0, "bfloat16", 512, "band"),
    Choice("tiling_qk", 1, "float16-narrow", 96, "band"),
    Choice("tiling_qk", 2, "bfloat16", 64, "table"),
    Choice("tiling_qk", 0, "float16", 512, "full", "transposed"),
    Choice("tiling_qk", 1, "bfloat16", 64, "band", "transposed"),
    Choice("tiling_qk", 3, "float16-narrow", 512, "full"),
    Choice("tiling_qkv", 0, "bfloat16", 64, "table"),
    Choice("tiling_qkv", 1, "float16-narrow", 32, "full"),
    Choice("tiling_qkv", 2, "float16", 96, "band"),
    Choice("tiling_qkv", 3, "float16", 1024, "full"),
    Choice("tiling_qkv", 1, "float16", 96, "table", "transposed"),
    Choice("tiling_qkv", 4, "float16-narrow", 64, "full", "transposed"),
]


def problems(choice: Choice) -> Iterator[Problem]:
    """Those of its kind of mask; 8-bit ones with factors and without, and as many bytes between
    rows as 16-bit ones; transposed K with a pitch and without."""
    eight = choice.format.startswith("float8")
    factors = itertools.cycle(("head", "none", "tensor") if eight else ("none",))
    pitches = itertools.cycle((16, 0))
    ends = ENDS if choice.storage == "transposed" and choice.kind == "full" else []
    for shape in (*SHAPES[choice.kind], *ends):
        layouts = {
            name: replace(layout, pitch=2 * layout.pitch, offset=2 * layout.offset)
            for name, layout in shape.items()
            if eight and isinstance(layout, Layout)
        }
        yield Problem(
            **(shape | layouts | stored(choice, next(pitches))),
            head_dim=choice.head_dim,
            dtype=choice.format,
            quantisation=parse_quantisation(next(factors)),
            seed=choice.config,
        )
