"""Descriptions of declarations: they survive JSON, and every field is tried."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace

import pytest
import torch

from tests.harness.declared import flat_gradients, flat_numerics
from tests.harness.problem_tensors import NARROW
from verify.variant import (
    AttentionArgs,
    Config,
    Contract,
    GradientNumerics,
    Numerics,
    Support,
    Variant,
    declaration_from,
)

torch.set_num_threads(1)


def test_rows_that_cannot_all_be_aligned_are_not_promised() -> None:
    for dtypes, dims in (
        (("float16",), range(16, 257)),
        (("float32", "bfloat16"), (64, 68)),
        (("float8_e4m3fn",), (64, 72)),
    ):
        with pytest.raises(
            ValueError,
            match=r"support\.head_dims: rows of (17|68|72) (float16|bfloat16|float8_e4m3fn) cannot",
        ):
            replace(ODD, support=Support(dtypes=dtypes, head_dims=dims, layouts="aligned"))
        replace(ODD, support=Support(dtypes=dtypes, head_dims=dims))
    replace(ODD, support=Support(dtypes=("float32",), head_dims=(64, 68), layouts="aligned"))


def nothing(
    args: AttentionArgs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: dict[str, torch.Tensor],
) -> None:
    """No kernel at all."""


ODD = Variant(
    name="odd",
    family="triton",
    forward=nothing,
    configs=[Config(block_m=64, block_n=32), Config(options=(("split", 2), ("acc", "fp16")))],
    support=Support(
        dtypes=("float16", "bfloat16"),
        head_dims=range(16, 257, 8),
        masks=("full", "causal.square", "dense"),
        intersections=True,
        windows="symmetric",
        grouped_heads="only",
        separate_head_dim_v=True,
        cross_lengths=False,
        longer_q=False,
        seqlen_q_multiple=8,
        seqlen_kv_multiple=12,
        min_seqlen=0,
        max_seqlen=4096,
        scales="positive",
        score_mods=("softcap",),
        layouts="aligned",
        devices=("cuda",),
        capability=(9, 0),
        max_capability=(9, 9),
        dtypes_out=("float32",),
        descalings=("tensor", "head"),
        storages=("strided", "tiles"),
    ),
    numerics=flat_numerics(
        operands="float32",
        float32_products="tf32",
        prescale="sqrt",
        scores="input",
        probability="bfloat16",
        normalised=True,
        normaliser="lse",
        split_keys=True,
        exp="expf",
        block_n=0,
        softcap_tanh="tanh.approx",
        scale_roundings=3,
        probability_scale=256.0,
        promotion=128,
        output_roundings=1,
        score_accumulator="float16",
        rescale_exp="exp2f",
        maximum_lag=8.0,
        row_sum_of="rounded",
        row_sum_lanes=4,
        row_sum_apart=True,
        division="div.rn",
        accumulator="bfloat16",
        accumulator_rounded="block",
        order_head_dim="ascending",
        values="input",
        maximum_rows=16,
        maximum_excess=1.0,
        maximum_step=0.5,
        query_tile=128,
        key_tile=None,
        floor=1e-7,
        query_scaled=True,
        centred="input",
        value_top=448.0,
        probability_top=447.5,
    ),
    gradients=flat_gradients(
        accumulator="bfloat16",
        score_accumulator="bfloat16",
        softmax_source="own",
        prescale="k",
        delta="input",
        delta_of="weights",
        score_gradient_of="rounded",
        score_gradient_scaled=True,
        atomics_dtype="input",
        operands="float32",
        float32_products="tf32",
        exp="expf",
        scale_roundings=3,
        softcap_tanh="tanh.approx",
        probability="float32",
        score_gradient_dtype="bfloat16",
        block_m=0,
        block_n=32,
        group="cast",
        atomics=("dq",),
        sums_roundings=2,
        order_head_dim="ascending",
    ),
    backward=lambda *tensors: None,
    contract=Contract(
        lse="base2",
        empty_row_out=1.0,
        empty_row_lse=math.inf,
        deterministic=False,
        masked_values="any",
        nan="any",
        batch_invariant=True,
        deterministic_backward=False,
        masked_values_backward="padding",
    ),
    workspace=lambda args: {},
    allocates_outputs=True,
    available=lambda: "not today",
    builds=lambda arch: (),
    compilable=lambda: "no compiler",
    head_dim_buckets=(64, 128, 256),
)


@pytest.mark.parametrize(
    "variant",
    [ODD, Variant(name="plain", family="torch", forward=nothing, support=NARROW)],
    ids=lambda v: v.name,
)
def test_a_description_survives_json(variant: Variant) -> None:
    data = json.loads(json.dumps(variant.describe()))
    found = declaration_from(data, ref="ref", path="/x.py", source_hash="abc")
    assert (found.ref, found.path, found.source_hash) == ("ref", "/x.py", "abc")
    assert found.support == replace(variant.support, head_dims=tuple(variant.support.head_dims))
    for name in (
        "name",
        "family",
        "numerics",
        "gradients",
        "contract",
        "allocates_outputs",
        "head_dim_buckets",
    ):
        assert getattr(found, name) == getattr(variant, name)
    assert found.configs == tuple(variant.configs)
    assert found.workspaces == (("forward", "saved") if variant.workspace is not None else ())
    assert found.unavailable == (variant.available() if variant.available else None)
    assert found.compiles is (variant.builds is not None)
    assert found.uncompilable == (variant.compilable() if variant.compilable else None)
    assert (found.undeclared, found.interpreted) == (False, False)
    assert found.config(found.configs[-1].name) == found.configs[-1]
    assert hash(found.support) == hash(found.support), "hashable: strategies are cached by it"
    with pytest.raises(KeyError):
        found.config("no-such-config")


def test_where_triton_interprets_builds_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes compile them, in which it does not; another reason stays one."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interprets = {"0": None, "1": "Triton interprets here"}

    def compilable() -> str | None:
        return interprets[os.environ["TRITON_INTERPRET"]]

    assert replace(ODD, compilable=compilable).describe()["uncompilable"] is None
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert (
        replace(ODD, compilable=lambda: "no compiler").describe()["uncompilable"] == "no compiler"
    )
    assert "TRITON_INTERPRET" not in os.environ


def test_every_declared_field_is_tried_above() -> None:
    """A field added to a declaration must be added to ODD, or the round trip proves nothing of
    it."""
    for declared, plain in (
        (ODD.support, Support(dtypes=("float32",), head_dims=(1,))),
        (ODD.numerics, Numerics()),
        (ODD.contract, Contract()),
        (ODD.gradients, GradientNumerics()),
    ):
        same = [
            f.name for f in fields(declared) if getattr(declared, f.name) == getattr(plain, f.name)
        ]
        assert same == []


def test_not_a_number_is_a_possible_promise() -> None:
    variant = replace(ODD, contract=Contract(empty_row_out=math.nan, lse=None))
    found = declaration_from(
        json.loads(json.dumps(variant.describe())), ref="", path="", source_hash=""
    )
    assert math.isnan(found.contract.empty_row_out)
    assert found.contract.lse is None


def test_a_backward_names_what_saves_its_tensors() -> None:
    """Without a forward of its own it is judged by the numerics and the contract of the forward
    that it names."""
    saver = Variant(
        name="saver",
        family="torch",
        forward=nothing,
        support=NARROW,
        contract=Contract(lse="base2"),
    )
    alone = {
        "name": "alone",
        "family": "torch",
        "support": NARROW,
        "backward": nothing,
        "gradients": GradientNumerics(),
    }
    variant = Variant(**alone, saved_by=saver, contract=Contract(deterministic_backward=False))
    found = declaration_from(
        json.loads(json.dumps(variant.describe())), ref="", path="", source_hash=""
    )
    assert found.entries == ("backward",)
    assert (found.contract.lse, found.contract.deterministic_backward) == ("base2", False)
    assert found.saved_config == saver.configs[0]
    assert variant.entry("saved") == (nothing, None)
    assert variant.entry("backward") == (nothing, None)
    for wrong in ({"saved_by": None}, {"gradients": None}):
        with pytest.raises(ValueError, match="alone: "):
            Variant(**(alone | {"saved_by": saver} | wrong))
    with pytest.raises(ValueError, match="alone: "):
        Variant(name="alone", family="torch", support=NARROW)
