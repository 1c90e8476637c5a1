"""Triton kernels compiled without a GPU: that the binary is the one a launch would use, and what
ptxas says of it is read."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from kernels.triton import (
    block_pointer_forward,
    decode_forward,
    descriptor_builds,
    descriptor_forward,
    flash_backward,
    flash_forward,
    fp8_forward,
    fp8_transposed_forward,
)
from kernels.triton.compile import MASKS, arguments, binary, compiled, meta, target
from tests.harness.interpreter_child import in_child
from verify.cuda.sass import listing
from verify.variant import compiled_archs

pytestmark = pytest.mark.for_ci

ROOT = Path(__file__).resolve().parents[3]
ALIGNED, UNALIGNED = True, False


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def launch(aligned, head_dim=64, seqlen=1024):
    args = arguments(
        flash_forward.VARIANT.configs[0], "float16", head_dim, "causal", aligned=aligned
    )
    args = replace(args, **{name: getattr(args, name)[:, :, :seqlen] for name in "qkv"})
    out, lse = (
        meta(tuple(args.q.shape), "float16", aligned=aligned),
        meta(tuple(args.q.shape[:3]), "float32"),
    )
    return flash_forward.launch(args, out, lse)


@pytest.fixture(scope="module")
def kernels():
    return {aligned: compiled(launch(aligned), "sm_90a") for aligned in (ALIGNED, UNALIGNED)}


def test_target_is_the_arch_with_its_own_instructions(kernels):
    assert ".target sm_90a" in kernels[ALIGNED].asm["ptx"]
    assert [target(arch).arch for arch in compiled_archs()] == [80, 86, 89, 90, 100, 120]
    with pytest.raises(ValueError, match="sm_75"):
        target("sm_75")


def test_aligned_build_copies_asynchronously_and_the_general_one_element_by_element(kernels):
    ptx = {aligned: kernel.asm["ptx"] for aligned, kernel in kernels.items()}
    assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", ptx[ALIGNED])
    assert "cp.async.c" not in ptx[UNALIGNED]
    assert "ld.global.b16" in ptx[UNALIGNED]
    assert "ld.global.b16" not in ptx[ALIGNED]


def test_unaligned_builds_keep_to_mma_sync_on_hopper(kernels):
    assert "wgmma.mma_async" in kernels[ALIGNED].asm["ptx"]
    assert "wgmma" not in kernels[UNALIGNED].asm["ptx"]
    assert "mma.sync" in kernels[UNALIGNED].asm["ptx"]


def test_sizes_are_plain_arguments(kernels):
    """No length, head count or scale is baked in: one binary for all of them."""
    parameters = re.search(r"\.entry [^(]*\((.*?)\)", kernels[ALIGNED].asm["ptx"], re.DOTALL)[1]
    # two tables are None; Triton adds scratch pointers of its own
    strides, pointers, head_dims, counts, scale = 12, 5, 2, 6, 1
    assert parameters.count(".param .u64") >= pointers
    assert parameters.count(".param .u32") == strides + head_dims + counts
    assert parameters.count(".param .f32") == scale


@pytest.mark.parametrize("length", [1, 16, 17])
def test_no_length_chooses_a_build(kernels, length):
    """Triton would build again for a 1, and for what 16 divides."""
    for aligned, kernel in kernels.items():
        other = launch(aligned, seqlen=length)
        assert compiled(other, "sm_90a").hash == kernel.hash


def test_resources_repeat_from_the_cache_and_name_spills():
    kernel = launch(ALIGNED, head_dim=16)
    roomy = binary(kernel, "sm_80").resources
    assert binary(kernel, "sm_80").resources == roomy  # assembled again
    assert roomy.registers > 32
    assert roomy.shared == compiled(kernel, "sm_80").metadata.shared > 0
    assert (roomy.stack, roomy.spill_stores, roomy.spill_loads) == (0, 0, 0)
    less = replace(kernel, keywords=kernel.keywords | {"maxnreg": 32})
    cramped = binary(less, "sm_80").resources
    assert cramped.registers == 32
    assert min(cramped.stack, cramped.spill_stores, cramped.spill_loads) > 0


@pytest.mark.parametrize("module", [flash_forward, flash_backward], ids=["forward", "backward"])
def test_builds_are_representative(module):
    of = module.VARIANT.builds
    builds = {arch: [build.name for build in of(arch)] for arch in compiled_archs()}
    names = builds["sm_80"]
    assert all(listed == names for listed in builds.values())
    assert len(set(names)) == len(names) <= 16
    parts = {part for name in names for part in name.split(", ")}
    configs = {config.name for config in module.VARIANT.configs}
    assert (
        configs | set(module.SUPPORT.dtypes) | set(MASKS) | {"d 64", "d 128", "unaligned"} <= parts
    )


@pytest.mark.parametrize(
    ("variants", "budgets"),
    [
        ([flash_forward.VARIANT], {None: flash_forward._SPILL_BUDGETS}),
        (flash_backward.VARIANTS, flash_backward._SPILL_BUDGETS),
        (decode_forward.VARIANTS, {None: decode_forward._SPILL_BUDGETS}),
        ([fp8_forward.VARIANT], {None: fp8_forward._SPILL_BUDGETS}),
        (fp8_transposed_forward.VARIANTS, fp8_transposed_forward.SPILL_BUDGETS),
        (block_pointer_forward.VARIANTS, {None: block_pointer_forward.SPILL_BUDGETS}),
        (descriptor_forward.VARIANTS, descriptor_builds.SPILL_BUDGETS),
    ],
    ids=["forward", "backward", "decode", "fp8", "fp8 transposed", "block pointers", "descriptors"],
)
def test_every_budget_is_of_a_build(variants, budgets):
    """A budget by a name that no build has any more would be a hole for the build of a new name."""
    known = {
        arch: {build.name for variant in variants for build in variant.builds(arch)}
        for arch in compiled_archs()
    }
    for name, by_arch in (each for of in budgets.values() for each in of.items()):
        assert all(name in known[arch] for arch in by_arch), name


def test_backward_builds_are_its_three_kernels():
    builds = flash_backward.VARIANT.builds("sm_80")
    for kernel in ("row sums", "dk dv", "dq"):
        build = next(b for b in builds if b.name.startswith(f"{kernel}, ") and "float16" in b.name)
        found = build.compile().resources
        assert found.spill_stores == 0, build.name
        assert found.shared <= 99 * 1024, build.name


def test_blocks_fit_every_arch():
    """The shared memory that a step needs, two buffers each of Q and dO beside K and V, in the 99
    KiB of sm_86, 89 and 120."""
    for config in flash_backward.VARIANT.configs:
        for dtype in flash_backward.SUPPORT.dtypes:
            for bucket in flash_backward.VARIANT.head_dim_buckets:
                for aligned, owned in product((ALIGNED, UNALIGNED), ("keys", "rows")):
                    use = flash_backward.Use(owned, capability=8)
                    blocks = flash_backward.effective_blocks(config, dtype, bucket, aligned, use)
                    row = bucket * getattr(torch, dtype).itemsize
                    assert 2 * row * (blocks.owned + 2 * blocks.walked) <= 98 * 1024, (
                        config.name,
                        dtype,
                        bucket,
                        aligned,
                    )


@pytest.mark.parametrize("owned", ["keys", "rows"])
def test_hopper_has_blocks_of_its_own(owned):
    def blocks(capability, dtype="float16", bucket=128, aligned=True):
        use = flash_backward.Use(owned, capability=capability)
        config = flash_backward.HOPPER
        return flash_backward.effective_blocks(config, dtype, bucket, aligned, use)

    assert blocks(9) == blocks(None) != blocks(8) == blocks(10) == blocks(12)
    other = flash_backward.CONFIGS[0]
    for case in ({"dtype": "float32"}, {"bucket": 256}, {"aligned": False}):
        use = flash_backward.Use(owned, capability=9)
        given = {"dtype": "float16", "bucket": 128, "aligned": True} | case
        assert blocks(9, **case) == flash_backward.effective_blocks(other, **given, use=use)


@pytest.fixture(scope="module")
def eight_bits():
    """SASS opcodes of the e4m3 builds for sm_90a, head dim 128 and no mask, by variant."""

    def opcodes(variant):
        (build,) = (
            build
            for build in variant.builds("sm_90a")
            if build.name.startswith(("m128", "m64n128")) and build.name.endswith("d 128, full")
        )
        return Counter(re.findall(r" ([A-Z]+)[ .]", listing(build.compile().cubin)))

    variants = (fp8_forward.VARIANT, *fp8_transposed_forward.VARIANTS)
    return {variant.name: opcodes(variant) for variant in variants}


def test_transposed_v_is_copied_asynchronously_and_stays_in_shared_memory(eight_bits):
    rows, columns = (
        eight_bits[name] for name in ("triton-fp8-forward", "triton-fp8-transposed-forward")
    )
    assert columns["LDGSTS"] == 2 * rows["LDGSTS"] > 0  # V as well as K
    assert columns["STS"] < rows["STS"] / 2
    assert columns["QGMMA"] == rows["QGMMA"] > 0


def test_a_block_of_8_bit_products_is_added_once(eight_bits):
    often = eight_bits["triton-fp8-transposed-forward"]
    once = eight_bits["triton-fp8-transposed-block-forward"]
    assert 0 < once["FADD"] < often["FADD"] / 2
    # A warp has as many rows, and a block has twice as many keys.
    assert 0 < eight_bits["triton-fp8-transposed-wide-forward"]["FADD"] < 1.5 * once["FADD"]


def test_where_triton_interprets_nothing_is_compiled():
    script = """
        from kernels.triton import flash_backward
        try:
            flash_backward.VARIANT.builds("sm_80")[0].compile()
        except RuntimeError as error:
            print(error)
    """
    done = in_child("-c", "if True:" + script)
    assert done.returncode == 0, done.stderr
    assert "unset TRITON_INTERPRET" in done.stdout


@pytest.mark.parametrize(
    ("seqlen_kv", "behind", "whole"),
    [(128, 0, True), (116, 0, False), (116, 11, False), (116, 12, True), (116, 100, True)],
)
def test_transposed_v_is_not_read_behind_its_storage(
    seqlen_kv: int, behind: int, whole: bool
) -> None:
    """A piece of 16 keys may reach into the pitch of a row, and the last row may have none."""
    heads, dims, pitch = 2, 32, 128
    elements = (heads * dims - 1) * pitch + seqlen_kv + behind
    storage = torch.empty(elements, dtype=torch.float8_e4m3fn)
    v = storage.as_strided(
        (1, heads, dims, seqlen_kv), (heads * dims * pitch, dims * pitch, pitch, 1)
    )
    assert fp8_transposed_forward.whole_pieces(v) is whole
