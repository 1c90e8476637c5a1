"""A campaign over Dask's workers, some of which are killed: nothing is lost and nothing counts
twice."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.leased_campaigns import PLAIN, killed, plan, results, undisturbed
from verify.campaign.leases.command import Place
from verify.campaign.leases.coordinator import Coordinator
from verify.campaign.leases.events import Joined
from verify.campaign.leases.merged import Merged
from verify.evidence import load

# What imports this file need not import `distributed`, which takes a second.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra [campaign] is not installed"
)


@pytest.mark.for_ci
def test_a_killed_worker_changes_no_result(tmp_path: Path) -> None:
    asked = plan("k", PLAIN, seeds=(5, 6), examples=4, select="counts or gathers")
    merged = Merged(tmp_path / "k", tmp_path / "runs")
    merged.directory.mkdir()
    shot: list[int] = []
    with Place(local=1).engine("k", merged.directory) as engine:
        coordinator = Coordinator(asked, merged, engine)

        def shoot() -> None:
            """Kill the worker in the middle of its second lease, once."""
            state = coordinator.state
            if not shot and state.done and state.given:
                joined = next(iter(state.workers.values()))
                assert killed(joined.pid, [os.getpid()])
                shot.append(joined.pid)

        coordinator.tick = shoot
        coordinator.open()
        coordinator.run()
        coordinator.close()
    state = coordinator.state
    assert len(shot) == 1
    assert sum(state.losses.values()) == 1
    assert len([each for each in coordinator.events() if isinstance(each, Joined)]) == 2
    assert (state.open, state.broken, len(state.all)) == (0, {}, 5)
    (kind,) = state.units
    merged.conclude(kind, state)
    evidence = load(merged.run(kind))

    alone = tmp_path / "alone"
    alone.mkdir()
    lines, drawn = undisturbed(asked, tmp_path)
    (alone / "main.jsonl").write_bytes(lines)
    assert results(evidence) == results(load(alone))
    assert {(d.variant, d.dtype, d.group): d.drawn for d in evidence.drawn} == drawn
    assert not evidence.lost
    assert not evidence.torn
