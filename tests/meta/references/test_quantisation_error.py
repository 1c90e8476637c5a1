"""The table of quantisation errors (tests/harness/quantisation_error.py), on small tensors."""

from __future__ import annotations

import pytest
import torch

from references.quantisation import parse_quantisation
from tests.harness.quantisation_error import (
    BLOCKS,
    LARGEST,
    as_stored,
    drawn,
    exact,
    main,
    quantised,
    rms,
    rotated,
)

Q, K, V = drawn(256, 32, "cpu")


@pytest.mark.parametrize("word", BLOCKS)
def test_what_is_stored_is_the_nearest_number(word: str) -> None:
    """Within half a step of e4m3: 2^-4 of the number, or 2^-10 of the factor below 2^-6."""
    made = quantised(Q, word)
    off = (made.exact - Q.double()).abs()
    step = torch.maximum(Q.double().abs() / 16, made.factors.double() / 1024)
    assert bool((off <= step * (1 + 1e-6)).all())
    assert float(made.stored.float().abs().max()) == LARGEST
    assert made.factors.flatten(2).unique(dim=2).shape[2] == max(1, 256 // (BLOCKS[word] or 256))


@pytest.mark.parametrize("word", BLOCKS)
def test_a_kernel_gets_the_factors_of_that_quantisation(word: str) -> None:
    shapes = dict.fromkeys("qkv", tuple(Q.shape))
    kind, made = parse_quantisation(word), quantised(Q, word)
    seen = as_stored(made, word)
    assert tuple(seen.shape) == kind.factors("q", shapes)
    assert torch.equal(kind.spread(seen, "q", shapes).expand(Q.shape), made.factors.expand(Q.shape))


def test_a_rotation_leaves_o_and_spreads_what_is_large() -> None:
    q, k = rotated(Q, K)
    assert rms(exact(q, k, V) - exact(Q, K, V)) < 1e-5
    assert float(q.abs().max()) < float(Q.abs().max())


def test_a_planted_factor_shows() -> None:
    wanted = exact(Q, K, V)
    q, k, v = (quantised(x, "head") for x in (Q, K, V))
    right = rms(exact(q.exact, k.exact, v.exact) - wanted)
    assert right > 1e-3
    assert rms(exact(q.exact, k.exact, 1.5 * v.exact) - wanted) > 3 * right


def test_finer_factors_lose_less(capsys: pytest.CaptureFixture[str]) -> None:
    main(256, 32)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if "fp64" in line]
    found = {parts[1].strip(): float(parts[3]) for parts in lines}
    assert set(found) == {*BLOCKS, *(f"{word}, rotated" for word in BLOCKS)}
    assert found["block64"] <= found["tensor"]
    assert found["block64, rotated"] < found["tensor"]
