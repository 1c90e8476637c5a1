"""Numerics as records and reports of before the parts hold them: one flat table of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED = {
    "operands": "products.operands",
    "float32_products": "products.float32_products",
    "accumulator": "products.accumulator",
    "score_accumulator": "products.score_accumulator",
    "prescale": "products.prescale",
    "exp": "softmax.exp",
    "scale_roundings": "softmax.scale_roundings",
    "softcap_tanh": "softmax.softcap_tanh",
}
FORWARD = _SHARED | {
    "accumulator_rounded": "products.accumulator_rounded",
    "promotion": "products.promotion",
    "scores": "softmax.scores",
    "rescale_exp": "softmax.rescale_exp",
    "block_n": "softmax.block_n",
    "lazy_rescale": "softmax.maximum.lag",
    "maximum_rows": "softmax.maximum.rows",
    "maximum_excess": "softmax.maximum.excess",
    "maximum_step": "softmax.maximum.step",
    "row_sum": "softmax.row_sum.of",
    "row_sum_lanes": "softmax.row_sum.lanes",
    "row_sum_apart": "softmax.row_sum.apart",
    "probability": "output.probability",
    "values": "output.values",
    "probability_scale": "output.probability_scale",
    "normalised": "output.normalised",
    "normaliser": "output.normaliser",
    "split_keys": "output.split_keys",
    "division": "output.division",
    "output_roundings": "output.roundings",
}
BACKWARD = _SHARED | {
    "softmax": "softmax.source",
    "probability": "softmax.probability",
    "score_gradient": "score_gradient.dtype",
    "score_gradient_of": "score_gradient.of",
    "score_gradient_scaled": "score_gradient.scaled",
    "delta": "score_gradient.delta",
    "delta_of": "score_gradient.delta_of",
    "block_m": "sums.block_m",
    "block_n": "sums.block_n",
    "group": "sums.group",
    "atomics": "sums.atomics",
    "atomics_dtype": "sums.atomics_dtype",
    "gradient_roundings": "sums.roundings",
}


def in_parts(recorded: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Recorded numerics with each flat field in its part; what is in parts stays as it is.

    paths: FORWARD or BACKWARD.
    """
    flat = {
        name: value
        for name, value in recorded.items()
        if name in paths and not isinstance(value, Mapping)
    }
    found = {name: value for name, value in recorded.items() if name not in flat}
    for name, value in flat.items():
        at = found
        *parts, last = paths[name].split(".")
        for part in parts:
            inner = at.get(part)
            at[part] = dict(inner) if isinstance(inner, Mapping) else {}
            at = at[part]
        at[last] = value
    return found
