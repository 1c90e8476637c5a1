"""The configs and builds of the forwards through tensor descriptors, what each build may spill, and
where Triton specialises warps.

Triton 3.7.1, compiled without a GPU, flag on beside flag off (tests/meta/kernels/
test_triton_specialise.py compiles it again):

| arch | `tl.range(warp_specialize=True)` |
|---|---|
| sm_80, sm_86, sm_89 | no warps of their own; with 3 stages another binary in some builds |
| sm_90a, 8 warps | the same binary |
| sm_90a, 4 warps | its passes fail |
| sm_100a, head dims up to 128 | warps of their own for copies, products and softmax |
| sm_100a, head dims above | its passes fail |
| sm_120a | its passes fail |

Where its passes fail the launch leaves the flag off, so that the binary is the same there, too.
"""

from dataclasses import replace
from itertools import product

from kernels.triton.common import Blocks
from verify.variant import Config

# Every pair of two values of block_m, block_n (with its stages) and registers.
CONFIGS = (
    Config(block_m=128, block_n=64, num_warps=8, num_stages=2, options=(("registers", 0),)),
    Config(block_m=64, block_n=32, num_warps=4, num_stages=3, options=(("registers", 0),)),
    Config(block_m=128, block_n=32, num_warps=8, num_stages=3, options=(("registers", 128),)),
    Config(block_m=64, block_n=64, num_warps=4, num_stages=2, options=(("registers", 128),)),
)

# Not m128n32w8s3-registers_128: its 20 warps of 128 registers are more than sm_100a has.
SPECIALISED = tuple(
    Config(
        block_m=config.block_m,
        block_n=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        options=(*config.options, ("warp_specialize", 1)),
    )
    for config in (CONFIGS[0], CONFIGS[1], CONFIGS[3])
)

# What Triton's public tutorial of fused attention tunes over: today 2 to 4 stages, in versions
# before also 6.  8 warps only for tiles of 128 by 128, as it has it on Hopper: 21 and 28 configs.
TUTORIAL = tuple(
    Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        options=(("registers", 0),),
    )
    for block_m, block_n, num_stages, num_warps in product(
        (64, 128), (32, 64, 128), (2, 3, 4, 6), (4, 8)
    )
    if num_warps == 4 or block_m * block_n == 128 * 128
)
FURTHER = tuple(dict.fromkeys((*CONFIGS, *SPECIALISED, *TUTORIAL)))


def fitting(blocks: Blocks, bucket: int, capability: tuple[int, int] | None) -> Blocks:
    """The blocks with as many stages as shared memory holds; the tutorial's tuner passes over a
    config that does not fit.

    A stage is a tile of K and one of V.  With wgmma and tcgen05 all stages and Q lie in shared
    memory; with mma.sync all but one stage; without TMA Triton copies into registers.
    capability: of the device; None: no device, which has no stages.
    """
    stage, tile = 4 * blocks.block_n * bucket, 2 * blocks.block_m * bucket
    match capability:
        case (9 | 10, _):
            most = ((227 << 10) - tile) // stage
        case (12, _):
            most = 1 + (99 << 10) // stage
        case _:
            most = blocks.num_stages
    return replace(blocks, num_stages=min(blocks.num_stages, most))


def specialises(config: Config, bucket: int, capability: tuple[int, int] | None) -> bool:
    """Whether a launch asks Triton to specialise warps: if the config does, and Triton's passes
    take it.  capability: of the device; None: no device, which specialises nothing."""
    if not dict(config.options).get("warp_specialize", 0) or capability is None:
        return False
    return {8: True, 9: config.num_warps == 8, 10: bucket <= 128}.get(capability[0], False)


# Of builds with specialised warps, for sm_100a, with Triton 3.7: what one kind of warps spills.
_SPECIALISED_BUDGETS = {
    "m128n64w8s2-registers_0-warp_specialize_1, float16, d 64, causal": {"sm_100a": 80},
    "m128n64w8s2-registers_0-warp_specialize_1, bfloat16, d 128, full": {"sm_100a": 92},
    "m64n32w4s3-registers_0-warp_specialize_1, bfloat16, d 64, window": {"sm_100a": 100},
    "m64n64w4s2-registers_128-warp_specialize_1, float16, d 64, full": {"sm_100a": 100},
}


def spill_budget(name: str, host: bool, arch: str) -> int:
    """Bytes per thread that a build may spill: as named, or as its twin whose warps are not
    specialised."""
    budgets = SPILL_BUDGETS[host]
    twin = name.replace("-warp_specialize_1", "")
    return budgets.get(name, {}).get(arch, budgets.get(twin, {}).get(arch, 0))


# Bytes per thread, by whether the host makes the descriptors: the most of Triton 3.6 and 3.7.
# Without TMA the addresses of a tile, in four dimensions of the host's, take registers.
SPILL_BUDGETS: dict[bool, dict[str, dict[str, int]]] = {
    True: {
        **_SPECIALISED_BUDGETS,
        "m128n64w8s2-registers_0, bfloat16, d 128, full": {
            "sm_80": 1604,
            "sm_86": 1536,
            "sm_89": 1536,
            "sm_120a": 8,
        },
        "m128n32w8s3-registers_128, float16, d 128, interval": {
            "sm_80": 2168,
            "sm_86": 2172,
            "sm_89": 2172,
            "sm_120a": 988,
        },
        "m64n64w4s2-registers_128, float16, d 64, full": {
            "sm_80": 1624,
            "sm_86": 1624,
            "sm_89": 1624,
            "sm_120a": 352,
        },
        "m128n64w8s2-registers_0, float16, d 256, causal": {
            "sm_80": 3468,
            "sm_86": 2268,
            "sm_89": 2268,
            "sm_120a": 8,
        },
        "m128n64w8s2-registers_0, float16, d 64, causal": {
            "sm_86": 72,
            "sm_89": 72,
            "sm_100a": 24,
            "sm_120a": 8,
        },
        "m64n32w4s3-registers_0, bfloat16, d 64, window": {"sm_120a": 8},
        "m128n128w8s3-registers_0, float16, d 128, causal": {"sm_120a": 236},
        "m64n128w4s4-registers_0, bfloat16, d 128, full": {"sm_120a": 2076},
        "m128n64w4s6-registers_0, float16, d 64, window": {"sm_120a": 164},
    },
    False: {
        **_SPECIALISED_BUDGETS,
        # Below sm_90 Triton 3.6 gives another binary with the flag, without warps of their own.
        "m64n64w4s2-registers_128-warp_specialize_1, float16, d 64, full": {
            "sm_80": 188,
            "sm_86": 224,
            "sm_89": 224,
            "sm_100a": 100,
        },
        "m128n32w8s3-registers_128, float16, d 128, interval": {
            "sm_80": 156,
            "sm_86": 156,
            "sm_89": 156,
            "sm_120a": 668,
        },
        "m64n64w4s2-registers_128, float16, d 64, full": {
            "sm_80": 92,
            "sm_86": 64,
            "sm_89": 64,
            "sm_100a": 48,
            "sm_120a": 308,
        },
        "m128n64w8s2-registers_0, float16, d 256, causal": {"sm_80": 16, "sm_120a": 8},
        "m128n64w8s2-registers_0, float16, d 64, causal": {"sm_120a": 8},
        "m128n64w8s2-registers_0, bfloat16, d 128, full": {"sm_120a": 8},
        "m64n32w4s3-registers_0, bfloat16, d 64, window": {"sm_120a": 8},
        "m128n128w8s3-registers_0, float16, d 128, causal": {"sm_120a": 152},
        "m64n128w4s4-registers_0, bfloat16, d 128, full": {"sm_120a": 1952},
        "m128n64w4s6-registers_0, float16, d 64, window": {"sm_120a": 240},
    },
}

# A config, dtype, head dim and kind of mask; those with specialised warps beside their twins.
BUILDS = (
    (CONFIGS[0], "float16", 64, "causal"),
    (CONFIGS[0], "bfloat16", 128, "full"),
    (CONFIGS[1], "bfloat16", 64, "window"),
    (CONFIGS[2], "float16", 128, "interval"),
    (CONFIGS[3], "float16", 64, "full"),
    (CONFIGS[0], "float16", 256, "causal"),
    (SPECIALISED[0], "float16", 64, "causal"),
    (SPECIALISED[0], "bfloat16", 128, "full"),
    (SPECIALISED[1], "bfloat16", 64, "window"),
    (SPECIALISED[2], "float16", 64, "full"),
    (SPECIALISED[0], "float16", 256, "causal"),
)
# Of the tutorial's, which tune copies by TMA.
TUTORIAL_BUILDS = (
    (Config.parse("m128n128w8s3-registers_0"), "float16", 128, "causal"),
    (Config.parse("m64n128w4s4-registers_0"), "bfloat16", 128, "full"),
    (Config.parse("m128n64w4s6-registers_0"), "float16", 64, "window"),
)
