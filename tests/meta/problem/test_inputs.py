"""Inputs are the same bits everywhere."""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from verify.arithmetic import rounding
from verify.arithmetic.dtypes import DTYPES
from verify.problem import Problem, ProblemError, philox, source
from verify.problem.distributions import DISTRIBUTIONS
from verify.problem.inputs import dout, tensors

by_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)

# sha256 of the bytes of q, k, v and dO.  A change here changes what every committed case id means:
# it needs a reason.
KNOWN = {
    "normal": "ff21c263d1679be6",
    "small_integers": "3053f0014f8a6aae",
    "outliers": "fcc26d0eef5d210d",
    "large_logits": "a63b895fe686f5aa",
    "negative_lse": "d3e20b1f8f724d32",
    "below_sentinel": "537f99f92f95620a",
    "equal_rows": "1097c30dd2d05709",
    "tied_maxima": "60646912d2999053",
    "increasing": "a41326f67974cfde",
    "decreasing": "a4ab7ecd85b7c91a",
    "sink": "18a7f7a31742a986",
    "same_sign_v": "cdbedac32a4b01a9",
    "v_mean": "6205eb8030b7cf5c",
    "ones_v": "ae32e19093c5df2a",
    "one_hot_v": "8701497f02fca41c",
    "zero_v_columns": "0448810db9aa5a02",
    "low_rank": "7fc8bd9eb0047f8d",
    "subnormals": "e6fbba05954123c6",
    "range_edges": "85fb44001c542735",
    "counting": "1cb642d3b4c93e90",
    "gather": "ea9557f2c386ef36",
    "integer_scores": "5b73d080b7c4af67",
    "dyadic": "2e85d96669c52435",
    "octaves": "c8b2ee3ecb4398fc",
    "gather_integers": "39a92af10cf3121e",
}
KNOWN_TOGETHER = {
    (
        "b=3,hq=3,hkv=1,sq=17,skv=129,d=64,dtype=bfloat16,mask=causal+dense.30.2,scale=-0.5,"
        "seed=4294967295,lk=bhsd.xb,lv=bshd.xh,dist="
    ): "af6c029308dcd459",
    "hq=2,hkv=2,sq=130,skv=31,d=17,dtype=float32,mask=window.3.0,scale=1.0,lq=bhsd.xh,dist=": (
        "ecb5b6786d7d2212"
    ),
    "sq=5,skv=9,d=16,dtype=float64,dist=": "37b48b4f4feb1135",
}
# Of all inputs and dO of SHAPES in every dtype, as they were when torch did not make them yet.
KNOWN_EVERYWHERE = {
    "normal": "1b8db4a7d8a0f2e9",
    "small_integers": "8b3b844a4eb740fd",
    "outliers": "16370f8f7e0f27fc",
    "large_logits": "1d13146a1fc6c1a4",
    "negative_lse": "c8300aa921bed992",
    "below_sentinel": "e5ad26a62092090d",
    "equal_rows": "857e620ceacdd4e2",
    "tied_maxima": "b4d950a3a90424aa",
    "increasing": "ff5539c6dd350f10",
    "decreasing": "f713148991ce9055",
    "sink": "64b52132269de645",
    "same_sign_v": "bc2ab3428c55eee4",
    "v_mean": "4daa8a6695571937",
    "ones_v": "9f6170013c5f6469",
    "one_hot_v": "1fe0144964fac914",
    "zero_v_columns": "25d3a32f005be99a",
    "low_rank": "5884868a20ceaecb",
    "subnormals": "740ddf7261e5feaa",
    "range_edges": "8e3873ebd845ddeb",
    "counting": "39bed5ae22ccaf5d",
    "integer_scores": "e5dedcca2d1ae19d",
    "dyadic": "7568442ea7c1a325",
    "octaves": "3eda55ff94d1ce9b",
    "gather": "6646eab1eb43bf30",
    "gather_integers": "b34b0774f7f7fff0",
}
SHAPES = (
    "b=2,hq=4,hkv=2,sq=33,skv=65,d=40,dv=24,seed=7",
    (
        "b=3,hq=6,hkv=3,sq=5,skv=70,d=17,dv=9,mask=lengths.5_3_1.70_9_64,scale=-0.3,seed=9,"
        "lq=bshd.p8.o1,lk=transposed.p8,lv=sbhd.xh"
    ),
    "b=2,hq=2,hkv=1,sq=1,skv=300,d=64,scale=4.0,seed=4294967295,lq=bhsd.xb,lk=bhsd.xbh,lv=bhsd.xb",
    "hq=1,hkv=1,sq=17,skv=0,d=16,seed=2",
    "hq=3,hkv=3,sq=0,skv=9,d=8,scale=1e-9,seed=3",
)


def problem(**changes: object) -> Problem:
    fields = {
        "batch": 2,
        "heads_q": 4,
        "heads_kv": 2,
        "seqlen_q": 70,
        "seqlen_kv": 130,
        "head_dim": 64,
        "dtype": "float16",
    }
    return Problem(**(fields | changes))  # type: ignore[arg-type]


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def digest(case: Problem) -> str:
    inputs = tensors(case)
    found = hashlib.sha256()
    for tensor in (inputs.q, inputs.k, inputs.v, dout(case)):
        found.update(raw_bytes(tensor))
    return found.hexdigest()[:16]


# The same bits everywhere


HALF_PRECISION = "b=2,hq=4,hkv=2,sq=33,skv=65,d=40,dv=24,dtype=float16,seed=1,dist="


@by_distribution
def test_known_bits(name: str) -> None:
    assert digest(Problem.parse(HALF_PRECISION + name)) == KNOWN[name]


@pytest.mark.parametrize("text", KNOWN_TOGETHER)
def test_known_bits_of_other_dtypes(text: str) -> None:
    assert together(text) == KNOWN_TOGETHER[text]


def together(text: str) -> str:
    return hashlib.sha256(
        " ".join(digest(Problem.parse(text + name)) for name in DISTRIBUTIONS).encode()
    ).hexdigest()[:16]


@by_distribution
def test_known_bits_of_every_dtype_and_storage(name: str) -> None:
    assert everywhere(name) == KNOWN_EVERYWHERE[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_known_bits_made_by_a_gpu() -> None:
    assert {name: everywhere(name, "cuda") for name in DISTRIBUTIONS} == KNOWN_EVERYWHERE


def everywhere(name: str, device: str = "cpu") -> str:
    """A digest of a distribution's bytes in every dtype, made on a device."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for text in SHAPES:
            try:
                case = Problem.parse(f"{text},dtype={dtype},dist={name}")
                inputs = tensors(case, device)
            except ProblemError:
                found.update(b"none")
                continue
            for tensor in (*inputs.named.values(), dout(case, device)):
                found.update(raw_bytes(tensor.cpu()))
    return found.hexdigest()[:16]


@pytest.mark.parametrize("key", [0, 1, 3 << 90, (1 << 128) - 1])
def test_a_device_draws_the_words_that_numpy_does(key: int) -> None:
    for count in (0, 1, 4, 5, 4097):
        asked = [(key, count), (5, 9)]
        for (other, many), words in zip(asked, philox.words(asked, "cpu"), strict=True):
            drawn = np.random.Philox(key=other, counter=0).random_raw(many)
            assert np.array_equal(words.numpy(), np.asarray(drawn, dtype=np.uint64).view(np.int64))


@pytest.mark.first_look(5)
@by_distribution
def test_a_device_makes_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words by torch, and casts that see no range, as on a device where it would have to wait."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(source, "numpy_words", lambda asked: source.torch_words(asked, cpu))
    monkeypatch.setattr(rounding, "seen_range", lambda magnitude: (0, (1 << 63) - 1))
    assert everywhere(name) == KNOWN_EVERYWHERE[name]


def test_bits_do_not_depend_on_process_or_threads() -> None:
    names = [
        problem(distribution=name, seed=5, dtype=dtype).name
        for name in DISTRIBUTIONS
        for dtype in ("float16", "bfloat16")
    ]
    script = (
        "import sys, torch\n"
        "from tests.meta.problem.test_inputs import digest\n"
        "from verify.problem import Problem\n"
        "for threads in (4, 1):\n"
        "    torch.set_num_threads(threads)\n"
        "    print(' '.join(digest(Problem.parse(name)) for name in sys.argv[1:]))"
    )
    here = " ".join(digest(Problem.parse(name)) for name in names)
    root = Path(__file__).parents[3]
    other = next(seed for seed in "12" if seed != os.environ.get("PYTHONHASHSEED"))
    environment = os.environ | {
        "PYTHONHASHSEED": other,
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": str(root),
    }
    child = subprocess.run(
        [sys.executable, "-c", script, *names],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.splitlines() == [here, here]


def test_streams_are_independent() -> None:
    """Another seed, tensor or purpose gives other values; layouts that expand nothing do not."""
    base = tensors(problem(heads_q=2))
    for other in (base.k, tensors(problem(heads_q=2, seed=1)).q, dout(problem(heads_q=2))):
        same = (base.q.flatten()[:8000] == other.flatten()[:8000]).double().mean()
        assert same < 0.01
    again = tensors(Problem.parse(problem(heads_q=2).name + ",lq=bshd.p8.o1"))
    assert torch.equal(base.q, again.q)


def test_quantiles_are_those_of_the_normal_distribution() -> None:
    from verify.problem.source import _normal_quantiles

    table = _normal_quantiles()
    exact = statistics.NormalDist()
    assert all(
        abs(table[i] - exact.inv_cdf((i + 0.5) / 65536)) < 2.0**-20 for i in range(0, 65536, 7)
    )
    assert np.array_equal(table, -table[::-1])
    assert np.array_equal(table.astype(np.float32), table)


def test_half_a_million_elements_are_fast() -> None:
    case = problem(batch=2, heads_q=2, seqlen_q=650, seqlen_kv=650, dtype="bfloat16")
    tensors(case)
    best = min(_seconds(case) for _ in range(5))
    assert best < 0.1  # 7 ms on a quiet core; the limit leaves room for a busy one


def _seconds(case: Problem) -> float:
    start = time.process_time()
    tensors(case)
    return time.process_time() - start
