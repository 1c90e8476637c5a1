"""The Triton forwards that load whole tiles: what a descriptor is made of, which builds there are,
and where block pointers are gone."""

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
import triton

from kernels.triton import block_pointer_forward, descriptor_builds, descriptor_forward
from kernels.triton.compile import arguments, compiled, meta
from kernels.triton.family import effective_blocks
from verify.variant import Config, arch_named, compiled_archs

HOST, DEVICE = True, False
CONFIG = descriptor_forward.CONFIGS[1]


def launch(host, batch=2, heads_kv=2, seqlen=1024, expand=False):
    args = arguments(CONFIG, "float16", 64, "full")
    parts = {"q": args.q, "k": args.k[:, :heads_kv], "v": args.v[:, :heads_kv]}
    if expand:
        parts["k"] = args.k[:, :1].expand(args.k.shape)
    args = replace(args, **{name: part[:batch, :, :seqlen] for name, part in parts.items()})
    out = meta(tuple(args.q.shape), "float16")
    return descriptor_forward.launch(host, args, out, meta(tuple(args.q.shape[:3]), "float32"))


@pytest.mark.parametrize("host", [HOST, DEVICE], ids=["host", "device"])
def test_neither_lengths_nor_strides_choose_a_build(host, tmp_path):
    """Triton would build again for a 1, and for what 16 divides."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        others = (
            {"seqlen": 1},
            {"seqlen": 17},
            {"batch": 1},
            {"heads_kv": 1},
            {"expand": True},
        )
        hashes = {compiled(launch(host, **other), "sm_90a").hash for other in ({}, *others)}
    assert len(hashes) == 1


def test_a_descriptor_has_sizes_and_strides_that_tma_takes():
    """No size is 0 and no stride; a dimension of one element may have any stride in torch."""
    wide = torch.empty(3, 4, 5, 24, dtype=torch.float16)
    rows = descriptor_forward._rows_of
    assert rows(wide) == ((3, 4, 5, 24), (480, 120, 24, 1))
    assert rows(wide.mT[:1].mT) == ((1, 4, 5, 24), (24, 120, 24, 1))
    assert rows(wide[:, :1].expand(3, 4, 5, 24)) == ((3, 1, 5, 24), (480, 24, 24, 1))
    odd = wide.as_strided((3, 1, 5, 24), (480, 7, 24, 1))
    assert rows(odd) == ((3, 1, 5, 24), (480, 24, 24, 1))
    assert descriptor_forward._steps(odd, host=HOST) == (16, 0, 16)
    assert descriptor_forward._steps(odd, host=DEVICE) == (960, 0, 48)


@pytest.mark.parametrize("host", [HOST, DEVICE], ids=["host", "device"])
def test_without_keys_no_descriptor_is_of_nothing(host):
    args = arguments(CONFIG, "float16", 64, "full")
    empty = replace(args, k=args.k[:, :, :0], v=args.v[:, :, :0])
    lse = meta(tuple(args.q.shape[:3]), "float32")
    found = descriptor_forward.launch(host, empty, meta(tuple(args.q.shape), "float16"), lse)
    assert found.programs == 2 * 4 * 1024 // 64
    none = replace(args, q=args.q[:, :, :0])
    nothing = meta((2, 4, 0, 64), "float16"), meta((2, 4, 0), "float32")
    assert descriptor_forward.launch(host, none, *nothing).programs == 0


def test_builds_move_tiles_by_tma_where_there_is_tma():
    for variant in descriptor_forward.VARIANTS:
        for arch in compiled_archs():
            tma = int(arch.removeprefix("sm_").removesuffix("a")) >= 90
            assert all(("UTMALDG" in build.expects) is tma for build in variant.builds(arch))


def test_configs_cover_every_pair_of_choices():
    """All pairs of values of two fields, but those that no architecture has shared memory for."""
    for module, excepted in (
        (descriptor_forward, set()),
        (block_pointer_forward, {(("block_n", 64), ("num_stages", 3))}),
    ):
        fields = ["block_m", "block_n"]
        fields += ["num_stages"] if module is block_pointer_forward else ["options"]
        values = {name: {getattr(config, name) for config in module.CONFIGS} for name in fields}
        for one, other in combinations(fields, 2):
            wanted = {((one, a), (other, b)) for a, b in product(values[one], values[other])}
            found = {
                ((one, getattr(config, one)), (other, getattr(config, other)))
                for config in module.CONFIGS
            }
            assert wanted - found <= excepted


@pytest.mark.parametrize(
    ("version", "gone"), [("3.7.1", False), ("3.8.0", False), ("3.9.0+git1", True), ("4.0", True)]
)
def test_block_pointers_are_gone_from_3_9_on(monkeypatch, version, gone):
    monkeypatch.setattr(triton, "__version__", version)
    found = block_pointer_forward.VARIANT.describe()["unavailable"]
    assert (found is not None and "removed in 3.9" in found) is gone


def test_the_tutorials_grids_are_among_the_configs():
    """Its 21 configs on Hopper, with 2 to 4 stages, and the 28 of versions before, also with 6."""
    grid = {
        Config(block_m=m, block_n=n, num_warps=w, num_stages=s, options=(("registers", 0),))
        for m, n, w, s in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 6))
        if not (m * n < 128 * 128 and w == 8)
    }
    assert len(grid) == 28
    assert sum(config.num_stages <= 4 for config in grid) == 21
    for variant in descriptor_forward.VARIANTS:
        told = variant.describe()["further_configs"]
        assert {config.name for config in grid} <= set(told) | {variant.configs[0].name}
        assert len(told) == len(set(told))


@pytest.mark.for_ci
@pytest.mark.parametrize(
    ("arch", "kibibytes"),
    [("sm_120a", 99), pytest.param("sm_90a", 227, marks=pytest.mark.for_ci)],
)
def test_a_config_that_outgrows_shared_memory_gets_fewer_stages(arch, kibibytes, tmp_path):
    """Triton would refuse to launch it."""
    config = Config.parse("m64n128w4s6-registers_0")
    capability = arch_named(arch).capability
    chosen = effective_blocks(config, "float16", 128)
    blocks = descriptor_builds.fitting(chosen, 128, capability)
    assert chosen.num_stages == 6 > blocks.num_stages >= 2
    assert replace(blocks, num_stages=6) == chosen
    args = arguments(config, "float16", 128, "causal")
    outputs = meta(tuple(args.q.shape), "float16"), meta(tuple(args.q.shape[:3]), "float32")
    fits = descriptor_forward.launch(DEVICE, args, *outputs, capability)
    more = replace(fits, keywords=fits.keywords | {"num_stages": blocks.num_stages + 1})
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        took, takes = (compiled(each, arch).metadata.shared for each in (more, fits))
    assert takes <= kibibytes * 1024 < took


@pytest.mark.parametrize("bucket", [16, 64, 128, 256])
@pytest.mark.parametrize("arch", [None, *compiled_archs()])
def test_every_config_has_a_stage(arch, bucket):
    capability = None if arch is None else arch_named(arch).capability
    for config in descriptor_builds.FURTHER:
        chosen = effective_blocks(config, "float16", bucket, bucket <= 128)
        blocks = descriptor_builds.fitting(chosen, bucket, capability)
        assert 1 <= blocks.num_stages <= chosen.num_stages
        assert arch not in {None, "sm_80", "sm_86", "sm_89"} or blocks == chosen
