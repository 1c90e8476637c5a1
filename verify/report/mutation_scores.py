"""Mutants of the kernels' sources, by variant: the kernel's source hash, and how many
are killed, counted, judged and chosen (`verify.report.campaign_schema.MutationReport`).

`python -m tests.mutants` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping

SCORES: Mapping[str, tuple[str, tuple[int, int, int, int]]] = {
    "cute-flash-forward": ("222518f2299ae02d", (72, 74, 100, 100)),
    "ptx-share-kv": ("1be9bdd018e2f361", (178, 184, 240, 240)),
    "ptx-share-kv-f16": ("1be9bdd018e2f361", (178, 184, 240, 240)),
    "ptx-share-qkv": ("bf490d3984a9adfb", (178, 184, 240, 240)),
    "ptx-split-kv": ("595ca07842039ace", (178, 184, 240, 240)),
    "ptx-split-q": ("65988fe47dd362e2", (178, 184, 240, 240)),
    "ptx-split-q-f16": ("65988fe47dd362e2", (178, 184, 240, 240)),
    "ptx-split-q-fp8": ("fa68a1e07cf297fd", (178, 184, 240, 240)),
    "ptx-tiling-qk": ("8c33bd98f4a63a6b", (178, 184, 240, 240)),
    "ptx-tiling-qk-f16": ("8c33bd98f4a63a6b", (178, 184, 240, 240)),
    "ptx-tiling-qkv": ("057a0f693ae49568", (178, 184, 240, 240)),
    "ptx-tiling-qkv-f16": ("057a0f693ae49568", (178, 184, 240, 240)),
    "triton-block-pointer-forward": ("1b945b34628f1264", (37, 41, 50, 50)),
    "triton-decode-forward": ("67f0a11b08fe957b", (38, 40, 50, 50)),
    "triton-device-descriptor-forward": ("3354df2deca219d5", (15, 15, 22, 22)),
    "triton-flash-backward": ("1bcf0281d4d90661", (46, 52, 76, 76)),
    "triton-flash-backward-atomic": ("1bcf0281d4d90661", (5, 5, 9, 9)),
    "triton-flash-backward-prescaled": ("1bcf0281d4d90661", (5, 5, 5, 5)),
    "triton-flash-forward": ("0f97d2b0414f98ce", (87, 91, 127, 127)),
    "triton-fp8-forward": ("46318ee4a8a17c10", (34, 45, 60, 60)),
    "triton-fp8-transposed-forward": ("6ebe9a711e551a2f", (21, 25, 35, 35)),
    "triton-host-descriptor-forward": ("3354df2deca219d5", (1, 1, 3, 3)),
}
