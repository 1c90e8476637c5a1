"""Orders of summation: every tree is revealed, and none where no tree explains the sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest

from tests.harness.probe_jobs import dies, hangs, raises, says
from verify.cell.arena import Arena
from verify.cell.discovery import roster
from verify.cell.process import PLAIN_CPU, Cell, ForkServer
from verify.probes import order, tree
from verify.probes.report import OrderProbe
from verify.probes.tree import InconsistentError, Node, Pair
from verify.probes.worker import Job, do_all

pytestmark = pytest.mark.for_ci

# Trees.


def grown(leaves: Sequence[int], random_: random.Random) -> Node:
    """A random tree: chains, pairs and fused groups."""
    if len(leaves) == 1:
        return Node(tuple(leaves))
    cuts = sorted(
        random_.sample(
            range(1, len(leaves)), random_.choice([1, 1, min(3, len(leaves) - 1), len(leaves) - 1])
        )
    )
    parts = [leaves[a:b] for a, b in zip([0, *cuts], [*cuts, len(leaves)], strict=True)]
    return Node(
        tuple(sorted(leaves)),
        tuple(sorted((grown(part, random_) for part in parts), key=lambda node: node.leaves)),
    )


def meetings(whole: Node) -> dict[Pair, int]:
    result = {}
    for part in whole.children:
        result |= meetings(part)
    for left, right in combinations(whole.children, 2):
        result |= {
            (min(i, j), max(i, j)): len(whole.leaves) for i in left.leaves for j in right.leaves
        }
    return result


def normal(node: Node) -> Node:
    return Node(
        node.leaves,
        tuple(sorted((normal(part) for part in node.children), key=lambda part: part.leaves)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_tree_is_revealed(seed: int) -> None:
    random_ = random.Random(seed)
    leaves = list(range(random_.choice([2, 5, 33, 70, 200])))
    if seed % 2:
        random_.shuffle(leaves)
    whole = grown(leaves, random_)
    known, asked = meetings(whole), []

    def meeting(pairs: Sequence[Pair]) -> list[int]:
        asked.append(len(pairs))
        return [known[min(pair), max(pair)] for pair in pairs]

    assert normal(tree.reveal(range(len(leaves)), meeting)) == normal(whole)
    assert sum(asked) <= len(known)


def test_what_no_tree_explains_is_refused() -> None:
    known = {(0, 1): 2, (0, 2): 2, (0, 3): 4, (1, 2): 4, (1, 3): 4, (2, 3): 4}
    with pytest.raises(InconsistentError):
        tree.reveal(range(4), lambda pairs: [known[pair] for pair in pairs])
    with pytest.raises(InconsistentError, match="never meet"):
        tree.reveal(range(3), lambda pairs: [1] * len(pairs))


def chained(sizes: Sequence[int]) -> Node:
    node, begin = None, 0
    for size in sizes:
        own = tuple(Node((leaf,)) for leaf in range(begin, begin + size))
        begin += size
        node = Node(tuple(range(begin)), own if node is None else (node, *own))
    assert node is not None
    return node


def shifted(node: Node, by: int) -> Node:
    return Node(
        tuple(leaf + by for leaf in node.leaves), tuple(shifted(part, by) for part in node.children)
    )


def test_trees_in_words() -> None:
    assert tree.describe(chained([16] * 8)) == "chain of 8 fused groups of 16"
    assert tree.describe(chained([8])) == "one fused addition of 8"
    assert tree.describe(chained([2, 1, 1])) == "one after the other"
    assert tree.describe(chained([8, 8, 1])) == "chain of 2 fused groups of 8, then 1 single"
    block = chained([16] * 4)
    two = Node(tuple(range(128)), (block, shifted(block, 64)))
    three = Node(tuple(range(192)), (two, shifted(block, 128)))
    assert (
        tree.describe(three)
        == "3 blocks of 64, added one after the other; each: chain of 4 fused groups of 16"
    )
    pairs = Node((0, 1, 2, 3), (chained([2]), shifted(chained([2]), 2)))
    balanced = Node(tuple(range(8)), (pairs, shifted(pairs, 4)))
    assert tree.describe(balanced).startswith(
        "2 blocks of 4, added one after the other; each: 2 blocks of 2"
    )


# Orders of variants.

KERNEL = '''
import torch

def fused(terms):
    """Each term truncated to 25 bits below the largest, then an exact sum: a matrix unit."""
    last = torch.exp2(torch.frexp(terms.abs().amax(0, keepdim=True)).exponent.double() - 26)
    return ((terms / last).trunc().sum(0, keepdim=True) * last).float().double()

def attention(q, k, v, causal=False, softmax_scale=None):
    n = k.shape[2]
    out = torch.empty_like(v[:, :, :1].expand(-1, -1, q.shape[2], -1))
    scores = (q.float() @ k.float().mT) * (softmax_scale or q.shape[-1] ** -0.5)
    p = torch.softmax(scores, -1).double() * n
    x = (p[:, :, :1].mT * v.double()).permute(2, 0, 1, 3)
    total = torch.zeros_like(x[:1])
    {body}
    out.copy_((total[0] / n)[:, :, None].to(v.dtype).expand_as(out))
    return out
'''
ORDERS = {
    "fused groups of 8": (
        "for at in range(0, n, 8):\n        total = fused(torch.cat([total, x[at : at + 8]]))",
        "chain of 8 fused groups of 8",
        ("0-7", "8-15", "16-23", "24-31"),
    ),
    "backwards": (
        "for at in reversed(range(n)):\n        total = (total + x[at : at + 1]).float().double()",
        "one after the other",
        ("62-63", "61", "60", "59"),
    ),
    "promoted blocks": (
        (
            "for at in range(0, n, 32):\n        block = torch.zeros_like(total)\n        for i in"
            " range(at, at + 32, 16):\n            block = fused(torch.cat([block, x[i : i +"
            " 16]]))\n        total = (total + block).float().double()"
        ),
        "2 blocks of 32, added one after the other; each: chain of 2 fused groups of 16",
        ("0-15", "16-31"),
    ),
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], OrderProbe]]:
    """Probes a kernel of that name."""
    folder = tmp_path_factory.mktemp("orders")
    files = {name: folder / f"{name.replace(' ', '_')}.py" for name in BODIES}
    for name, file in files.items():
        file.write_text(KERNEL.replace("{body}", BODIES[name]), encoding="utf-8")
    declarations = dict(zip(files, roster(list(files.values())).declarations, strict=True))
    fork_server = ForkServer(PLAIN_CPU)
    cells = {name: (Cell(fork_server), Arena()) for name in files}

    def asked(name: str, keys: int) -> OrderProbe:
        declaration = declarations[name]
        return order.probe(declaration, declaration.configs[0], *cells[name], "cpu", keys)

    yield asked
    for cell, arena in cells.values():
        cell.close()
        arena.close()
    fork_server.close()


BODIES = {name: body for name, (body, _, _) in ORDERS.items()} | {
    "unequal weights": "total = (x * torch.linspace(0, 2, n)[:, None, None, None]).sum(0, True)"
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_variant_is_revealed(
    name: str, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        monkeypatch.setattr(order, "_DTYPES", (dtype,))
        result = ask(name, 64)
        assert (result.reason, result.dtype, result.keys) == ("", dtype, 64)
        assert (result.order, result.groups) == ORDERS[name][1:]


def test_a_kernel_that_weighs_keys_differently_has_no_order(ask: Any) -> None:
    result = ask("unequal weights", 16)
    assert result.order == ""
    assert result.reason.startswith("UncountableError")


# Processes.


def test_no_job_takes_another_with_it() -> None:
    jobs = [
        Job(says, ("one",)),
        Job(says, ("two", "an error")),
        Job(raises),
        Job(dies),
        Job(hangs),
        Job(says, ("last",)),
    ]
    one, two, *failed, last = do_all(jobs, 1, patience=5.0)
    assert one.result is not None
    assert two.result is not None
    assert last.result is not None
    assert (one.result.word, two.result.word, last.result.word) == ("one", "two", "last")
    assert one.result.process == two.result.process != last.result.process
    assert [answer.failure for answer in failed] == [
        "ValueError: planted",
        "its process ended with status 7",
        "no answer within 5 s; killed",
    ]
