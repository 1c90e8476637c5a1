"""Mutants of the kernels' sources, by variant: the source hash of the mutated kernel, and how many
are killed, counted, judged and chosen (`verify.report.campaign_schema.MutationReport`).

`python -m tests.mutants` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping

SCORES: Mapping[str, tuple[str, tuple[int, int, int, int]]] = {
    "ptx-share-kv": ("5e7d7c101487fcf5", (37, 38, 57, 240)),
    "ptx-share-kv-f16": ("5e7d7c101487fcf5", (37, 38, 57, 240)),
    "ptx-share-qkv": ("438a60e109d070e1", (37, 38, 57, 240)),
    "ptx-split-kv": ("12b0b2cc4609eff5", (37, 38, 57, 240)),
    "ptx-split-q": ("38f03d337b376d26", (37, 38, 57, 240)),
    "ptx-split-q-fp8": ("269fc085f6249fdb", (37, 38, 57, 240)),
    "ptx-tiling-qk": ("9b833705654b610d", (37, 38, 57, 240)),
    "ptx-tiling-qk-f16": ("9b833705654b610d", (37, 38, 57, 240)),
    "ptx-tiling-qkv-f16": ("a87f6e81f0a50d63", (37, 38, 57, 240)),
    "triton-block-pointer-forward": ("d4787c26a4d7feb4", (32, 35, 44, 50)),
    "triton-decode-forward": ("445932598e18727c", (18, 19, 21, 50)),
    "triton-device-descriptor-forward": ("fc9fbf6c467a158f", (15, 17, 21, 25)),
    "triton-flash-backward": ("ec70b6ae9a25ff83", (8, 13, 15, 79)),
    "triton-flash-backward-atomic": ("ec70b6ae9a25ff83", (3, 3, 5, 8)),
    "triton-flash-backward-prescaled": ("ec70b6ae9a25ff83", (1, 1, 1, 3)),
    "triton-flash-forward": ("373d9ae546e8cc2f", (35, 45, 54, 127)),
    "triton-fp8-forward": ("b3e1ae6399d5ed8b", (9, 11, 13, 45)),
    "triton-fp8-transposed-forward": ("a21534b3b99153d7", (10, 13, 16, 35)),
}
