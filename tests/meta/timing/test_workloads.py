"""Operations, bytes and shapes of the workloads, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verify.timing.workloads import SUITES, Workload, as_stored, of_shapes, parse_shape
from verify.variant import Support

# (1, 8, 8192, 64): 4 * 8 * 8192^2 * 64 operations.
ONE = Workload(batch=1, heads=8, seqlen=8192, head_dim=64)


def test_operations_forward_and_backward_full_and_causal() -> None:
    assert ONE.flops == 137_438_953_472
    assert replace(ONE, mask="causal").flops == 68_719_476_736
    assert replace(ONE, direction="backward").flops == 343_597_383_680
    assert replace(ONE, direction="backward", mask="causal").flops == 171_798_691_840
    large = Workload(batch=1, heads=48, seqlen=16384, head_dim=512)
    assert large.flops == 26_388_279_066_624


def test_bytes_that_must_move() -> None:
    """65,536 rows of 64: Q, K, V and O in 2 bytes, and an LSE of 4 bytes."""
    assert ONE.bytes("float16") == 65_536 * (64 * 4 * 2 + 4)
    assert ONE.bytes("float32") == 65_536 * (64 * 4 * 4 + 4)
    # Q, K and V in 1 byte, O in bfloat16
    assert ONE.bytes("float8_e4m3fn") == 65_536 * (64 * (3 + 2) + 4)
    # O and dO are read, dQ, dK and dV are written
    assert replace(ONE, direction="backward").bytes("float16") == 65_536 * (64 * 8 * 2 + 4)


def test_intensity_counts_the_softmax() -> None:
    scores = 8 * 8192**2
    assert ONE.intensity("float16") == (137_438_953_472 + 5 * scores) / (65_536 * 516)
    causal = replace(ONE, mask="causal")
    assert causal.intensity("float16") == ONE.intensity("float16") / 2


def test_the_suites_hold_the_shapes_that_are_published() -> None:
    shapes = {one.shape for one in SUITES["shapes"].workloads}
    assert shapes == {
        "(1, 8, 8192, 64)",
        "(1, 48, 8192, 64)",
        "(1, 48, 8192, 512)",
        "(1, 48, 16384, 512)",
    }
    protocol = SUITES["protocol"].workloads
    assert {one.seqlen for one in protocol} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {one.head_dim for one in protocol} == {128}
    batched = SUITES["batched"].workloads
    assert {(one.batch, one.heads) for one in batched} == {(4, 32)}
    assert {one.seqlen for one in batched} == {1024, 2048, 4096, 8192, 16384}
    assert {one.head_dim for one in batched} == {64, 128}
    assert len(batched) == 5 * 2 * 4  # forward and backward, full and causal
    assert SUITES["quick"].total is not None
    assert shapes < {one.shape for one in SUITES["quick"].workloads}
    everything = set(SUITES["all"].workloads)
    of_a_gpu = [suite for name, suite in SUITES.items() if name != "cpu"]
    assert all(everything >= set(suite.workloads) for suite in of_a_gpu)
    assert len(everything) == len(SUITES["all"].workloads)
    first = SUITES["all"].workloads[:12]  # some of each suite, forward and backward
    assert all(set(first) & set(suite.workloads) for suite in of_a_gpu)
    for name in ("protocol", "batched"):
        shared = [one for one in first if one in SUITES[name].workloads]
        assert {one.direction for one in shared} == {"forward", "backward"}


def test_shapes_are_read() -> None:
    assert parse_shape("1,48,8192,512") == (1, 48, 8192, 512)
    assert [one.name for one in of_shapes([(1, 2, 64, 32)], ("backward",))] == [
        "backward (1, 2, 64, 32) full",
        "backward (1, 2, 64, 32) causal",
    ]
    for text in ("", "1,2,3", "1,2,3,0", "1,2,3,4,5", "1, 2, 3, 4", "a,b,c,d"):
        with pytest.raises(ValueError, match="B,H,N,D"):
            parse_shape(text)


def test_a_problem_is_plain_attention() -> None:
    problem = replace(ONE, mask="causal").problem("float16")
    assert problem.name == "hq=8,hkv=8,sq=8192,skv=8192,d=64,dtype=float16,mask=causal"


def test_a_support_without_strided_storage_gets_its_own() -> None:
    plain = ONE.problem("float8_e4m3fn")
    own = as_stored(
        plain, Support(dtypes=("float8_e4m3fn",), head_dims=(64,), storages=("transposedv",))
    )
    assert own.name == f"{plain.name},lv=transposedv"
    both = Support(dtypes=("float8_e4m3fn",), head_dims=(64,), storages=("transposedv", "strided"))
    assert as_stored(plain, both) == plain
