"""Where references are computed: on a GPU where that pays, and on the CPU where it is full."""

from __future__ import annotations

import pytest
import torch

from tests.harness.fake_trials import PLAIN
from tests.harness.judge_devices import apart, of_backward, of_forward, problems
from verify.judging import truth
from verify.machine import settings
from verify.machine.settings import JUDGE_DEVICE, SettingError
from verify.problem.inputs import dequantised, tensors
from verify.tolerance import backward, forward
from verify.variant import Config

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a GPU that takes notes of what is given back."""
    notes: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: notes.append("emptied"))
    return notes


def test_large_references_are_computed_on_the_gpu(emptied: list[str]) -> None:
    assert truth.on_device(1e12, str) == "cuda"
    assert truth.on_device(1e3, str) == "cpu"
    assert not emptied


def test_a_user_says_where_references_are_computed(
    emptied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, expected in (("cuda", ("cuda", "cuda")), ("cpu", ("cpu", "cpu"))):
        monkeypatch.setenv(JUDGE_DEVICE, asked)
        assert (truth.on_device(1e3, str), truth.on_device(1e12, str)) == expected
    monkeypatch.setenv(JUDGE_DEVICE, "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert truth.on_device(1e12, str) == "cpu"
    monkeypatch.setenv(JUDGE_DEVICE, "gpu")
    with pytest.raises(SettingError, match="auto, cpu or cuda"):
        settings.check()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),  # as torch says it where CUDA starts
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ],
    ids=str,
)
def test_a_full_or_busy_gpu_leaves_it_to_the_cpu(error: Exception, emptied: list[str]) -> None:
    tried = []

    def compute(device: torch.device) -> str:
        tried.append(device)
        if device == GPU:
            raise error
        return "the truth"

    assert truth.on_device(1e12, compute) == "the truth"
    assert tried == [GPU, CPU]
    assert emptied == ["emptied"]


def test_other_errors_and_a_full_host_are_raised(emptied: list[str]) -> None:
    def full(device: torch.device) -> None:
        raise torch.OutOfMemoryError(str(device))

    with pytest.raises(torch.OutOfMemoryError, match="cpu"):
        truth.on_device(1e3, full)

    def wrong(device: torch.device) -> None:
        raise RuntimeError(str(device))

    with pytest.raises(RuntimeError, match="cuda"):
        truth.on_device(1e12, wrong)
    assert not emptied


def test_two_devices_are_apart_where_one_of_them_errs() -> None:
    """The comparison that a machine with a GPU runs: of a device with itself, and with one whose
    bound, value or infinity is off."""
    p = next(problems(1)).but(seqlen_q=9, seqlen_kv=17, batch=1)
    for mine, again in (
        (of_forward(p, forward.BEST, "sm_90", CPU), of_forward(p, forward.BEST, "sm_90", CPU)),
        (of_backward(p, backward.BEST, "sm_90", CPU), of_backward(p, backward.BEST, "sm_90", CPU)),
    ):
        same = apart(mine, again)
        assert (same.values, same.bounds, same.infinite) == (0.0, 0.0, 0)
        for name, (value, bound) in mine.items():
            if "interval" in name:
                continue
            assert apart(mine, mine | {name: (value + bound / 2, bound)}).values > 0.4
            assert apart(mine, mine | {name: (value, bound * 1.001)}).bounds > 5e-4
            assert apart(mine, mine | {name: (value, bound * torch.inf)}).infinite


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_order_of_the_references_sums_is_nothing_beside_a_bound(dtype: str) -> None:
    """A GPU adds in another order than a CPU, and so does a CPU whose keys come the other way."""
    problem = PLAIN.but(dtype=dtype, seqlen_q=40, seqlen_kv=130, head_dim=64)
    given = dequantised(problem, tensors(problem))
    arithmetic = forward.resolve(forward.BEST, Config(), problem, "sm_90")
    made = []
    for q, k, v in (given, (given[0].flip(-1), given[1].flip(-1, -2), given[2].flip(-2))):
        found = truth.compute_truth(problem, (q, k, v), [arithmetic])
        made.append({"out": (found.out, found.out_bound), "lse": (found.lse, found.lse_bound)})
    assert made[0]["out"][0].ne(made[1]["out"][0]).any()
    found = apart(*made)
    assert found.values < 1e-6
    assert found.bounds < 1e-9
    assert not found.infinite
