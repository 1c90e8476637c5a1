"""The launches of a case: each is made once, when an oracle first reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verify.cell.arena import Plan, negated, side_by_side
from verify.cell.arena_runs import Runs
from verify.cell.concurrent import LAUNCHES
from verify.cell.process import Reply
from verify.cell.ways import SHARED
from verify.judging.buffers import plan_of
from verify.judging.facts import Facts
from verify.judging.launch import Launch, read
from verify.problem.inputs import Inputs


@dataclass
class Launched(Facts):
    """A case and its launches so far, by tag."""

    launches: dict[str, Launch] = field(default_factory=dict)
    _plans: dict[str, Plan | Reply] = field(default_factory=dict)

    @property
    def first(self) -> Launch:
        """The run that most oracles judge."""
        return self.run("first")

    @property
    def saved(self) -> Launch:
        """The forward whose raw results the backward on trial gets; NaN without a launch if the
        backward declares to read nothing."""
        if "saved" not in self.launches:
            self.launches["saved"] = (
                self._unread
                if self.own_softmax
                else self._launch("saved", "nan", [self.inputs.named])
            )
        return self.launches["saved"]

    def run(self, tag: str, *, poison: str = "nan", inputs: Inputs | None = None) -> Launch:
        """Launch the entry point on trial, once per tag.  `poison` fills outputs and workspaces;
        `inputs` replace those of the problem.

        A backward gets the outputs of `saved` for any inputs; O is NaN if it declares not to read
        O.  dO is the problem's unless `inputs.others` has another one.
        """
        if tag not in self.launches:
            self.launches[tag] = self._launch(self.entry, poison, [self.given(inputs)])
        return self.launches[tag]

    def given(self, inputs: Inputs | None = None) -> Mapping[str, Tensor]:
        """What a `run` with these inputs gets, by the name of its buffer."""
        return self._for_backward | (self.inputs if inputs is None else inputs).named

    @property
    def concurrent(self) -> Launch:
        """Concurrent launches (see `verify.cell.concurrent`), on CUDA; outputs[side_name(i, "out")]
        is of launch i.

        Every second launch gets the inputs of `negated`.
        """
        if "concurrent" not in self.launches:
            given = self.inputs.named | self._for_backward
            both = (given, given | self._negated)
            self.launches["concurrent"] = self._launch(
                self.entry, "nan", [both[i % 2] for i in range(LAUNCHES)]
            )
        return self.launches["concurrent"]

    @property
    def sharing(self) -> Launch:
        """Concurrent launches that all read one copy of the inputs; outputs as in `concurrent`."""
        if SHARED not in self.launches:
            given = [self.inputs.named | self._for_backward] * LAUNCHES
            self.launches[SHARED] = self._launch(self.entry, "nan", given, SHARED)
        return self.launches[SHARED]

    def going(self, way: str, poison: str = "nan") -> Launch:
        """One launch with the case's inputs, another way (`verify.cell.ways`), once per way."""
        if way not in self.launches:
            given = self.inputs.named | self._for_backward
            self.launches[way] = self._launch(self.entry, poison, [given], way)
        return self.launches[way]

    @property
    def negated(self) -> Launch:
        """One launch with the case's inputs, the sign of every element of Q (for a backward: dO)
        flipped."""
        if "negated" not in self.launches:
            given = self.inputs.named | self._for_backward | self._negated
            self.launches["negated"] = self._launch(self.entry, "nan", [given])
        return self.launches["negated"]

    def plan(self, entry: str) -> Plan | Reply:
        """The layout of an entry's buffers (one of `verify.variant.RUNS`), or the reply if its
        request for workspaces failed."""
        if entry not in self._plans:
            ask = partial(self._workspaces, entry) if entry in self.declaration.workspaces else None
            lse = self.declaration.contract.lse is not None
            self._plans[entry] = plan_of(self.problem, entry, lse, ask)
        return self._plans[entry]

    def request(self, entry: str, where: Plan) -> dict[str, Any]:
        """The request to launch an entry on buffers that lie like that."""
        mod = self.problem.score_mod
        output = self.problem.scaled_output
        return {
            "variant": self.declaration.name,
            "entry": entry,
            "config": self.config.name,
            "slots": where.as_data(),
            "stored": where.stored_as_data(),
            "size": where.size,
            "mask": self.problem.mask.name,
            "softmax_scale": self.problem.scale,
            "score_mod": mod.name if mod is not None else "",
            "descaling": self.problem.descaling,
        } | ({} if output is None else {"output_scale": output.scale})

    def _launch(
        self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]], way: str = ""
    ) -> Launch:
        """Launch an entry once for each mapping in `given` (inputs by buffer name), all at the same
        time.  way: one of `verify.cell.ways`, or "" for the ordinary one."""
        with self.clock.timed("generate"):
            alone = self.plan(entry)
            if isinstance(alone, Reply):
                return Launch(alone, poison)
            where, inputs = (alone, given[0]) if len(given) == 1 else side_by_side(alone, given)
            runs = Runs.alone(self.arena, where)
            runs.lay([inputs], [poison])
        request = self.request(entry, alone)
        request |= {"concurrent": len(given) if len(given) > 1 else 0, "way": way}
        laid = True

        def launched() -> Reply:
            nonlocal laid
            if not laid:  # an earlier try has changed the buffers
                runs.lay([inputs], [poison])
            laid = False
            return self.cell.run(self.declaration.path, request, self.arena)

        with self.clock.timed("run"):
            reply = self.hearing.ask(self.cell, launched)
            if reply.status not in ("ok", "unsupported"):
                return Launch(reply, poison)
            return read(runs, [reply], [poison])[0]

    def _workspaces(self, entry: str, where: Plan) -> Reply:
        request = self.request(entry, where)
        return self.hearing.ask(
            self.cell, lambda: self.cell.workspace(self.declaration.path, request)
        )

    @property
    def _unread(self) -> Launch:
        p = self.problem
        out, lse = (
            torch.full(p.shape_out, math.nan, dtype=p.format_out.torch),
            torch.full(p.shape_q[:3], math.nan),
        )
        return Launch(Reply("ok"), "nan", {"out": out, "lse": lse}, written=True)

    @property
    def _for_backward(self) -> dict[str, Tensor]:
        if self.entry != "backward":
            return {}
        if self.refuses:
            p = self.problem
            return {
                "dout": self.dout,
                "out": torch.zeros(p.shape_out, dtype=p.format_out.torch),
                "lse": torch.zeros(p.shape_q[:3]),
            }
        found = {"dout": self.dout, **self.saved.outputs}
        if not self.reads_out and "out" in found:
            found["out"] = torch.full_like(found["out"], math.nan)
        return found

    @property
    def _negated(self) -> dict[str, Tensor]:
        name = "dout" if self.entry == "backward" else "q"
        return {name: negated((self.inputs.named | self._for_backward)[name])}
