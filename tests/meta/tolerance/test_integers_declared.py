"""What may be declared beside integers that a kernel makes of Q and K, and of V in 8 bits."""

from __future__ import annotations

import pytest

from tests.meta.tolerance.test_integers import EIGHT, OURS, PLAIN
from verify.problem import Problem
from verify.tolerance.forward import resolve
from verify.variant import (
    Config,
    DeclarationError,
    GradientNumerics,
    Numerics,
    Quantised,
    Support,
    Variant,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_top": 449.0}, r"value_top, probability_top: .* at most 448"),
        ({"probability_top": 0.0}, r"value_top, probability_top: .* not both above 0"),
        ({"probability": "float16"}, r"value_top, probability_top: .* at most 0|P in float16"),
        ({"accumulator": "float16"}, r"products\.accumulator: .*value_top"),
        ({"normalised": True}, r"output\.normalised: .*value_top"),
        ({"value_top": 0.0, "probability_top": 0.0}, r"output\.probability"),
    ],
    ids=str,
)
def test_what_is_not_derived_of_columns_is_refused(
    changes: dict[str, object], message: str
) -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16")
    with pytest.raises(ValueError, match=message):
        resolve(EIGHT.but(**changes).numerics, Config(), problem, "sm_90")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prescale": "q"}, r"numerics\.products\.prescale"),
        ({"softmax_scores": "input"}, r"numerics\.softmax\.scores"),
        ({"split_keys": True}, r"numerics\.output\.split_keys"),
        ({"maximum_rows": 4}, r"numerics\.softmax\.maximum\.rows"),
        ({"key_order": "ascending"}, r"numerics\.softmax\.maximum\.key_order"),
        ({"order_head_dim": "ascending"}, r"numerics\.order\.head_dim"),
        ({"quantised_products": "none"}, r"numerics\.quantised\.query_tile: nothing is quantised"),
    ],
    ids=str,
)
def test_what_is_not_derived_is_refused(changes: dict[str, object], message: str) -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float16")
    with pytest.raises(ValueError, match=message):
        resolve(PLAIN.but(**changes).numerics, Config(), problem, "sm_90")


def test_inputs_of_8_bits_and_a_missing_step_are_refused() -> None:
    problem = Problem(seqlen_q=1, seqlen_kv=1, head_dim=16, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="float8_e4m3fn inputs"):
        resolve(OURS, Config(), problem, "sm_90")


def test_a_variant_may_not_add_what_is_not_derived() -> None:
    own = {
        "name": "x",
        "family": "x",
        "forward": print,
        "numerics": Numerics(quantised=Quantised(products="int8", centred="input")),
    }
    support = Support(dtypes=("float16",), head_dims=(64,), score_mods=("softcap",))
    with pytest.raises(DeclarationError, match=r"centred: .* softcap"):
        Variant(**own, support=support)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="no bound of gradients"):
        Variant(
            **own,  # type: ignore[arg-type]
            support=Support(dtypes=("float16",), head_dims=(64,)),
            backward=print,
            gradients=GradientNumerics(),
        )
