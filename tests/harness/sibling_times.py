"""Where the time of a sibling case goes, in one process and on fixed shapes:
`python -m tests.harness.sibling_times FILE DTYPE [ROUNDS]`.

Of each shape 16 cases of the first variant of FILE are judged beside each other, ROUNDS times with
other seeds.  The rows are those of `tests.harness.worker_times`: exclusive, milliseconds of CPU
time of a case, without the kernel's process, and how often a case comes to each.  One more round
counts torch's operations, and those that would wait if the tensors were on a GPU: Python reads a
number, or the size of a result depends on values.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import worker_times
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import roster
from verify.evidence import Recorder
from verify.problem import Problem
from verify.problem.distributions import ordinary

CASES = 16  # of a stack
SHAPES = {
    "small": {"heads_q": 2, "heads_kv": 2, "seqlen_q": 24, "seqlen_kv": 40},
    "mid": {"heads_q": 2, "heads_kv": 2, "seqlen_q": 100, "seqlen_kv": 130},
    # about as large as the median of profile gpu
    "large": {"heads_q": 8, "heads_kv": 8, "seqlen_q": 128, "seqlen_kv": 128},
}
_NUMBERS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
_PLACES = ("aten.index.", "aten.index_put")


class Counted(TorchDispatchMode):
    """Counts operations and waits, by the span in which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        span, name = worker_times.spans.stack[-1], str(func)
        self.operations[span] += 1
        chosen = args[1] if name.startswith(_PLACES) else ()
        self.waits[span] += name.startswith(_NUMBERS) or any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in chosen
        )
        return func(*args, **kwargs or {})

    def reads_lists(self) -> None:
        """Count `Tensor.tolist` too, which is no operation."""

        def tolist(x: Tensor) -> Any:
            self.waits[worker_times.spans.stack[-1]] += 1
            return _TOLIST(x)

        Tensor.tolist = tolist  # type: ignore[assignment, method-assign]


_TOLIST = Tensor.tolist


def group_of(target: Target, shape: dict[str, int], number: int) -> list[Problem]:
    """Problems of one shape that differ in their values."""
    support, names = target.declaration.support, ordinary()
    head_dim = min(support.head_dims, key=lambda d: abs(d - 64))
    plain = Problem(head_dim=head_dim, dtype=target.dtype, **shape)  # type: ignore[arg-type]
    return [
        plain.but(distribution=names[n % len(names)], seed=8 * (number * CASES + n) + 1)
        for n in range(CASES)
    ]


def main(path: Path, dtype: str, rounds: int) -> None:
    spans = worker_times.spans
    with tempfile.TemporaryDirectory() as folder:
        os.environ[worker_times.FOLDER] = folder
        worker_times._install()
        judge = Judge(Recorder(Path(folder), "main"))
        torch.set_num_threads(1)
        try:
            declaration = roster([path], judge.fork_server).declarations[0]
            group = "gradients" if "backward" in declaration.entries else "accuracy"
            target = Target(declaration, declaration.configs[0], dtype, group)
            for name, shape in SHAPES.items():
                list(judge.judge_together(target, group_of(target, shape, 0)))  # warm
                spans._turn()
                spans.cpu, spans.calls = defaultdict(float), defaultdict(int)
                for number in range(1, rounds + 1):
                    list(judge.judge_together(target, group_of(target, shape, number)))
                spans._turn()
                print(f"{path.name}, {name}; of a case: ms of CPU time, calls")
                _rows(dict(spans.cpu), spans.calls, 1e3 / (rounds * CASES), rounds * CASES)
                with Counted() as counted:
                    counted.reads_lists()
                    list(judge.judge_together(target, group_of(target, shape, rounds + 1)))
                    Tensor.tolist = _TOLIST  # type: ignore[method-assign]
                print(f"{path.name}, {name}; of a case: operations, waits")
                _rows(dict(counted.operations), counted.waits, 1 / CASES, CASES)
        finally:
            judge.close()


def _rows(amounts: dict[str, float], counts: dict[str, int], unit: float, cases: int) -> None:
    for own in [name for name in amounts if name.startswith("in a kernel process")]:
        amounts.pop(own)
    lines = sorted(amounts.items(), key=lambda row: -row[1])
    lines.append(("all", sum(amounts.values())))
    for name, amount in lines:
        count = sum(counts.values()) if name == "all" else counts[name]
        print(f"{amount * unit:9.2f} {count / cases:8.2f}  {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4)
