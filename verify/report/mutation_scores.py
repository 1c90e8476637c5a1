"""Mutants of the kernels' sources, by variant: the kernel's source hash, and how many
are killed, counted, judged and chosen (`verify.report.campaign_schema.MutationReport`).

`python -m tests.mutants` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping

SCORES: Mapping[str, tuple[str, tuple[int, int, int, int]]] = {
    "cute-flash-forward": ("353b177e141d2c70", (15, 15, 22, 100)),
    "ptx-share-kv": ("5e7d7c101487fcf5", (178, 184, 240, 240)),
    "ptx-share-kv-f16": ("5e7d7c101487fcf5", (178, 184, 240, 240)),
    "ptx-share-qkv": ("438a60e109d070e1", (178, 184, 240, 240)),
    "ptx-split-kv": ("12b0b2cc4609eff5", (178, 184, 240, 240)),
    "ptx-split-q": ("38f03d337b376d26", (178, 184, 240, 240)),
    "ptx-split-q-f16": ("38f03d337b376d26", (178, 184, 240, 240)),
    "ptx-split-q-fp8": ("269fc085f6249fdb", (178, 184, 240, 240)),
    "ptx-tiling-qk": ("9b833705654b610d", (178, 184, 240, 240)),
    "ptx-tiling-qk-f16": ("9b833705654b610d", (178, 184, 240, 240)),
    "ptx-tiling-qkv": ("a87f6e81f0a50d63", (178, 184, 240, 240)),
    "ptx-tiling-qkv-f16": ("a87f6e81f0a50d63", (178, 184, 240, 240)),
    "triton-block-pointer-forward": ("d60ce5be2ad847f0", (38, 40, 50, 50)),
    "triton-decode-forward": ("bbe28d12260da837", (38, 40, 50, 50)),
    "triton-device-descriptor-forward": ("ea53de240ea5af09", (15, 16, 21, 21)),
    "triton-flash-backward": ("9dc82e8a6be08d1c", (40, 44, 61, 77)),
    "triton-flash-backward-atomic": ("9dc82e8a6be08d1c", (4, 4, 7, 9)),
    "triton-flash-backward-prescaled": ("9dc82e8a6be08d1c", (4, 4, 4, 4)),
    "triton-flash-forward": ("fe1e8b70ba3315a5", (87, 90, 126, 127)),
    "triton-fp8-forward": ("2c440b35c95a329f", (32, 35, 44, 45)),
    "triton-fp8-transposed-forward": ("6d31e8f5194e8f90", (26, 30, 35, 35)),
    "triton-host-descriptor-forward": ("ea53de240ea5af09", (2, 2, 4, 4)),
}
