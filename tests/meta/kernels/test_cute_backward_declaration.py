"""What the CuTe backwards declare: builds, budgets, shared memory and support."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cute import family, flash_forward
from kernels.cute import flash_backward as kernel
from tests.harness.cute_host import has_headers
from tests.planted import copies
from verify.cuda.compile import CompileError, compilable
from verify.cuda.edits import edited, texts_of
from verify.problem import Problem
from verify.problem.inputs import dout as upstream
from verify.problem.inputs import tensors
from verify.variant import (
    AttentionArgs,
    Config,
    Gradients,
    Saved,
    Unsupported,
    Variant,
    compiled_archs,
)

SMALL, LARGE = kernel.CONFIGS


@pytest.mark.parametrize("variant", kernel.VARIANTS, ids=lambda variant: variant.name)
@has_headers
def test_every_part_of_a_choice_is_built_for_hopper_and_one_build_of_a_walk_elsewhere(
    variant: Variant,
) -> None:
    walks = walks_of(variant)
    names = {arch: [build.name for build in variant.builds(arch)] for arch in compiled_archs()}
    for arch, chosen in names.items():
        assert set(chosen) <= set(names["sm_90a"])
        assert len(set(chosen)) == len(chosen)
        for walk, dims in (
            *((w, (128, 96)) for w in walks.narrow),
            *((w, (256, 160)) for w in walks.wide),
        ):
            own = [
                n
                for n in chosen
                if n.startswith(f"{walk.name}, ") and n.endswith(tuple(f" {d}" for d in dims))
            ]
            assert [int(name.rpartition(" ")[2]) for name in own] == list(
                dims if arch == "sm_90a" else dims[:1]
            )
            if arch == "sm_90a":
                parts = ["bfloat16", "float16"]
                parts += [config.name for config in variant.configs if max(dims) <= kernel.WIDE]
                assert all(any(part in name.split(", ") for name in own) for part in parts)


def walks_of(variant: Variant) -> kernel.Walks:
    return variant.backward.__self__  # type: ignore[union-attr]


def test_every_budget_is_of_a_build() -> None:
    names = {
        kernel.name_of(*choice)
        for variant in kernel.VARIANTS
        for choice in kernel.choices(walks_of(variant), "sm_90a")
    }
    assert set(kernel.SPILL_BUDGETS) <= names


@pytest.mark.parametrize("head_dim", family.HEAD_DIMS)
@pytest.mark.parametrize("variant", kernel.VARIANTS, ids=lambda variant: variant.name)
@has_headers
def test_shared_memory_fits_every_architecture(variant: Variant, head_dim: int) -> None:
    for config in variant.configs:
        for walk in walks_of(variant).of(head_dim):
            made = kernel.walk_launch(walk, config, "float16", head_dim)
            assert made.shared_bytes <= 99 * 1024


def test_every_gradient_is_of_one_walk() -> None:
    for head_dim in family.HEAD_DIMS:
        for variant in kernel.VARIANTS:
            walks = walks_of(variant).of(head_dim)
            atomic = variant is kernel.ATOMIC
            assert [walk.sum_y for walk in walks if walk.keys].count(True) == 1
            assert [walk.sum_x for walk in walks if walk.keys].count(True) == 1
            assert sum(not walk.keys or walk.atomic for walk in walks) == 1
            assert any(walk.atomic for walk in walks) == atomic


def test_without_headers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "headers", lambda: None)
    with pytest.raises(CompileError, match="CUTLASS_PATH"):
        kernel.walk_launch(kernel.KEYS, SMALL, "float16", 64)


@pytest.mark.parametrize(
    ("text", "config", "argument"),
    [
        ("dtype=float32,d=64", SMALL, "dtype"),
        ("dtype=float16,d=80", SMALL, "head_dim"),
        ("dtype=float16,d=176", SMALL, "head_dim"),
        ("dtype=float16,d=288", SMALL, "head_dim"),
        ("dtype=float16,d=64,ldo=bshd.p4", SMALL, "layout_dout"),
        ("dtype=float16,d=64", Config(block_m=48, block_n=64), "config"),
    ],
)
def test_what_it_does_not_support_it_refuses(text: str, config: Config, argument: str) -> None:
    problem = Problem.parse(f"sq=4,skv=4,{text}")
    given = tensors(problem)
    args = AttentionArgs(
        given.q, given.k, given.v, problem.mask, problem.scale, problem.score_mod, config
    )
    layout = problem.layout_dout
    dout = torch.empty(layout.extent(problem.shape_q), dtype=given.q.dtype)
    dout = dout.as_strided(problem.shape_q, layout.strides(problem.shape_q))
    assert dout.shape == upstream(problem).shape
    saved = Saved(torch.empty_like(given.q), torch.empty(problem.shape_q[:3]))
    gradients = Gradients(*map(torch.empty_like, (given.q, given.k, given.v)))
    for variant in kernel.VARIANTS:
        assert variant.backward is not None
        with pytest.raises(Unsupported) as error:
            variant.backward(args, saved, dout, gradients, {})
        assert error.value.argument == argument


def test_what_saves_the_log_sum_exp_takes_all_that_the_backward_does() -> None:
    for variant in kernel.VARIANTS:
        assert variant.saver is flash_forward.VARIANT
        assert variant.saver.support == variant.support
        assert variant.saved_config in variant.saver.configs
        for head_dim in family.HEAD_DIMS:
            assert flash_forward.shared_bytes(variant.saved_config, head_dim) <= 99 * 1024


def test_a_stored_transpose_it_refuses() -> None:
    problem = Problem.parse("sq=4,skv=4,dtype=float16,d=64,lk=transposed.p64")
    for variant in kernel.VARIANTS:
        refusal = variant.support.refusal(problem)
        assert refusal is not None
        assert refusal[0] == "layout_k"


@has_headers
@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
def test_the_sums_of_rows_do_not_spill() -> None:
    builds = [b for b in kernel.VARIANT.builds("sm_80") if b.name.startswith("row_sums")]
    for build in builds:
        assert not list(build.broken(build.compile().resources, None))
    assert len(builds) == len(family.ELEMENTS)


@has_headers
@pytest.mark.parametrize("slip", copies.CUTE_BACKWARD_SLIPS)
def test_each_slip_of_a_known_bad_copy_fits_every_walk(
    slip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFY_CUDA_CACHE", str(tmp_path))
    for walk in (kernel.KEYS, kernel.ROWS, kernel.KEYS_ATOMIC):
        shipped = kernel.walk_launch(walk, SMALL, "float16", 64).source
        source = edited(shipped, [copies.CUTE_BACKWARD_SLIPS[slip]])
        assert texts_of(source) != texts_of(shipped)
