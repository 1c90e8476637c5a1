"""Times what was tried for the speed of the forwards, on a GPU:
`python -m tests.harness.speed_rounds FILE [GROUP ...]`.

All trials of a group (`speed_trials`) have the same inputs and are timed in turn, round by round,
of each mask, each call between two events after L2 was flushed.  The table and FILE (JSON) have the
median of the rounds, and how far O is from that of torch's flash kernel.  Other processes compile
everything before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness.speed_trials import GROUPS, SHAPES, Call, Inputs
from verify.machine.cores import cores

ROUNDS = 15
MASKS = {"full": False, "causal": True}


def torch_flash(inputs: Inputs, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Tensor:
    """O of one of torch's kernels."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            *inputs.wide, is_causal=inputs.causal
        )


def _references() -> Iterator[tuple[str, Callable[[Inputs], Tensor]]]:
    yield "torch's flash", torch_flash
    yield "cuDNN", partial(torch_flash, backend=SDPBackend.CUDNN_ATTENTION)


def distance(out: Tensor, wanted: Tensor) -> float:
    """The rms of the difference, relative to that of what is wanted."""
    wanted = wanted.float()
    return float((out.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def first_call(make: Callable[[Inputs], Call], inputs: Inputs) -> tuple[Call | None, str]:
    """The call after it was made once, which compiles; or why it does not work."""
    try:
        inputs.out.fill_(math.nan)
        call = make(inputs)
        call()
        if inputs.device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # whatever it is belongs to this trial alone
        return None, f"{type(error).__name__}: {str(error).splitlines()[:1]}"[:160]
    return call, ""


Place = tuple[str, int, int]  # group, number of the trial, head dim


def crashing(names: Iterable[str], workers: int) -> set[Place]:
    """The trials that end their process; it calls each one once in another process, so that
    binaries lie on disk afterwards."""
    wanted: SimpleQueue[Place] = SimpleQueue()
    for name in names:
        for number, _ in enumerate(GROUPS[name][0]()):
            for head_dim in GROUPS[name][1]:
                wanted.put((name, number, head_dim))
    found: set[Place] = set()

    def work() -> None:
        pool = None
        with contextlib.suppress(Empty):
            while True:
                one = wanted.get_nowait()
                pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
                try:
                    pool.submit(_compiled, one).result()
                except BrokenProcessPool:
                    found.add(one)
                    pool = None
        if pool is not None:
            pool.shutdown()

    threads = [Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _compiled(one: Place) -> None:
    name, number, head_dim = one
    trial = list(GROUPS[name][0]())[number]
    for causal in MASKS.values():
        _, error = first_call(trial.make, Inputs(head_dim, seqlen=256, causal=causal))
        if "CUDA error" in error or "illegal" in error:
            os._exit(1)  # nothing that follows in this process would work


def _milliseconds(call: Call, flush: Tensor, flushes: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(flushes):
        flush.zero_()
    start.record()  # type: ignore[no-untyped-call]
    call()
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()
    return float(start.elapsed_time(end))


def timed(
    name: str, head_dim: int, mask: str, left_out: set[Place]
) -> dict[str, dict[str, object]]:
    """Of each trial of a group: its milliseconds (median of ROUNDS), or why there are none, and the
    distance of O."""
    inputs = Inputs(head_dim, causal=MASKS[mask])
    wanted = torch_flash(inputs)
    found: dict[str, dict[str, object]] = {}
    calls: dict[str, Call] = {}
    for label, reference in _references():
        calls[label] = partial(reference, inputs)  # type: ignore[assignment]
        found[label] = {}
    for number, trial in enumerate(GROUPS[name][0]()):
        if (name, number, head_dim) in left_out:
            found[trial.label] = {"error": "ends its process"}
            continue
        call, error = first_call(trial.make, inputs)
        if call is None:
            found[trial.label] = {"error": error}
            continue
        calls[trial.label] = call
        found[trial.label] = {"distance": distance(inputs.out, wanted), "wrong": trial.wrong}
    flush = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
    begun = time.perf_counter()
    for call in calls.values():
        call()
    host = (time.perf_counter() - begun) / len(calls)
    flushes = max(2, math.ceil(2 * host / 7e-5))  # 70 us each: the host is ahead of the device
    rounds = [
        {label: _milliseconds(call, flush, flushes) for label, call in calls.items()}
        for _ in range(ROUNDS)
    ]
    for label in calls:
        found[label]["ms"] = median(one[label] for one in rounds)
        found[label]["least"] = min(one[label] for one in rounds)
    return found


def table(name: str, head_dim: int, mask: str, rows: Mapping[str, Mapping[str, object]]) -> str:
    """In Markdown."""
    batch, heads, seqlen, dim = SHAPES[head_dim]
    flops = 4 * batch * heads * seqlen**2 * dim / (2 if MASKS[mask] else 1)
    lines = [
        f"### {name}, {SHAPES[head_dim]}, {mask}",
        "",
        "| trial | ms | TFLOP/s | distance of O |",
        "|---|---:|---:|---:|",
    ]
    for label, row in sorted(
        rows.items(), key=lambda item: float(str(item[1].get("ms", math.inf)))
    ):
        if "error" in row:
            lines.append(f"| {label} | {row['error']} | | |")
            continue
        ms = float(str(row["ms"]))
        off = f"{row['distance']:.1e}" if "distance" in row else ""
        off = "ablation" if row.get("wrong") else off
        lines.append(f"| {label} | {ms:.3f} | {flops / ms / 1e9:.0f} | {off} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Returns an exit code."""
    if not words or set(words[1:]) - set(GROUPS):
        print(f"speed_rounds FILE [{' '.join(GROUPS)}]", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("speed_rounds: needs a GPU", file=sys.stderr)
        return 3
    path, names = Path(words[0]), words[1:] or list(GROUPS)
    begun = time.monotonic()
    left_out = crashing(names, cores())
    print(f"compiled in {time.monotonic() - begun:.0f} s\n", flush=True)
    record: dict[str, dict[str, dict[str, object]]] = {}
    for name in names:
        for head_dim, mask in itertools.product(GROUPS[name][1], MASKS):
            rows = timed(name, head_dim, mask, left_out)
            record[f"{name} {head_dim} {mask}"] = rows
            print(table(name, head_dim, mask, rows), end="\n\n", flush=True)
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - begun:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
