"""The Triton kernels as an operator of torch, in Triton's interpreter."""

import pytest

from tests.harness.interpreter_child import in_child


@pytest.mark.for_ci
def test_operator_is_as_torch_asks_and_its_results_are_the_kernels():
    done = in_child("-m", "tests.meta.kernels.triton_operator")
    assert done.returncode == 0, done.stderr
