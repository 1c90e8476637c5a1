"""The search: every group of oracles is asked about a faulty kernel, until each has caught it or
had its say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from references.masks import Full
from tests.faults.fault import Fault
from tests.faults.stand import Stand, finest
from verify.campaign.edge_cases import edge_cases
from verify.campaign.targets import Target, excludes_group
from verify.judging.run_checks import held
from verify.oracles import groups, of_group
from verify.problem import Problem
from verify.problem.case import Case, CaseError
from verify.problem.sampling import draws
from verify.variant import Config, Declaration, Support

HELD = ("execution", "memory")  # what every run must hold, before any oracle is asked
LEADING = ("accuracy", "gradients")
"""Groups that hear the list of edge cases too, as the suite has it, and are asked longest."""
_SAMPLE = 8  # cases that they hear in any case, so that each of their oracles may speak
_LONGEST = 300  # cases after which a leading group gives up
_OTHERS = 8  # the same of any other group, if no leading group has caught the fault
# problems that convicted in a leading group, the cheapest, which are what the others are asked
_HINTS = 1
# pairs times head dims of one problem, of those that are drawn for others than leading groups
_LARGEST = 300_000


@dataclass(frozen=True)
class Catch:
    """An oracle that convicts, and the first case on which it does: config and problem by their
    names."""

    group: str
    oracle: str
    config: str
    problem: str

    @property
    def id(self) -> str:
        """One line that parses back."""
        return f"{self.oracle}:{self.config}:{self.group}:{self.problem}"

    @staticmethod
    def parse(text: str) -> Catch:
        """The catch of that id; raises ValueError."""
        try:
            case = Case.parse(text)
        except CaseError as error:
            raise ValueError(str(error)) from None
        return Catch(case.group, case.variant, case.config, case.problem.name)

    @property
    def cost(self) -> int:
        """What a replay takes, roughly."""
        problem, group = Problem.parse(self.problem), groups()[self.group]
        rows, keys, dims = (
            max(-(-n // 64), 1) for n in (problem.seqlen_q, problem.seqlen_kv, problem.head_dim)
        )
        tiles = problem.batch * problem.heads_q * rows * (keys + dims)
        # a relation, or a known answer, has two problems
        asked = 1 if self.oracle in HELD or group.name in LEADING else 3
        return tiles * asked * (3 if group.entry == "backward" else 1)


def search(stand: Stand, fault: Fault) -> tuple[Catch, ...]:
    """The oracles that catch a fault, leading groups first, each with its first case."""
    shipped, planted = stand.shipped(fault), stand.planted(fault)
    found: list[Catch] = []
    leading = [group for group in LEADING if not excludes_group(shipped, group)]
    for group in leading:
        found += _heard(stand, planted, group, candidates(shipped, group), _SAMPLE)
        if not found and fault.asked:
            found += _heard(
                stand, planted, group, [(finest(shipped), Problem.parse(fault.asked))], 1
            )
    hints = sorted({(catch.cost, catch.config, catch.problem) for catch in found})[:_HINTS]
    configs = {config.name: config for config in shipped.configs}
    for group in groups():
        if group in leading or excludes_group(shipped, group):
            continue
        asked = [
            (configs[name], p)
            for _, name, text in hints
            for p in _as_asked(Problem.parse(text), group, shipped.support)
        ]
        cases = asked if hints else candidates(shipped, group)
        found += _heard(stand, planted, group, cases, 0)
    first = {(catch.group, catch.oracle): catch for catch in reversed(found)}
    return tuple(_by_themselves(stand, planted, tuple(first.values())[::-1]))


def _by_themselves(stand: Stand, planted: Declaration, found: Sequence[Catch]) -> Sequence[Catch]:
    """Those that convict in a process that has seen nothing else: all of them, if the cheapest
    does.

    What a fault keeps from one launch to the next may convict it in a campaign by the luck of what
    was asked before.
    """
    if not found or convicts(stand, stand.afresh(planted), cheapest(found)[0]):
        return found
    return [catch for catch in found if convicts(stand, stand.afresh(planted), catch)]


def cheapest(catches: Iterable[Catch]) -> list[Catch]:
    """Catches by what a replay takes."""
    return sorted(catches, key=lambda catch: (catch.cost, catch.id))


def _heard(
    stand: Stand,
    planted: Declaration,
    group: str,
    cases: Sequence[tuple[Config, Problem]],
    least: int,
) -> list[Catch]:
    """What one group's oracles say until one has convicted and at least so many cases are heard."""
    found: list[Catch] = []
    for number, (config, problem) in enumerate(cases):
        if found and number >= least:
            break
        verdicts = stand.verdicts(planted, config, group, problem)
        found += [
            Catch(group, v.oracle, config.name, problem.name)
            for v in verdicts
            if v.outcome == "fail"
        ]
    return found


def _as_asked(problem: Problem, name: str, support: Support) -> list[Problem]:
    """That problem as another group would ask it, if it can."""
    group = groups()[name]
    if group.outside or group.asks is not None or (group.masked and problem.mask == Full()):
        return []
    changes: dict[str, object] = {}
    if group.distributions is not None:
        changes = {
            "distribution": group.distributions[0],
            "score_mod": None,
            "layout_q": replace(problem.layout_q, expand=""),
        }
    found: Problem | None = problem.but(**changes)
    if group.adapt is not None and found is not None:
        found = group.adapt(found, support)
    refused = found is None or support.refusal(found) is not None
    return (
        []
        if refused
        or (group.excludes_problem is not None and group.excludes_problem(found) is not None)
        else [found]
    )


def convicts(stand: Stand, declaration: Declaration, catch: Catch) -> bool:
    """Whether that oracle convicts a kernel on that case, as `Judge.hear` would, but that no other
    oracle is asked."""
    config = next(config for config in declaration.configs if config.name == catch.config)
    trial = stand.trial(declaration, config, groups()[catch.group], Problem.parse(catch.problem))
    if not trial.refuses:
        rulings = {name: ruling for name, _, ruling in held(trial)}
        if catch.oracle in rulings or len(rulings) < len(HELD):
            return catch.oracle in rulings and rulings[catch.oracle].finding is not None
    oracle = next(oracle for oracle in of_group(catch.group) if oracle.name == catch.oracle)
    return oracle.rule(trial).finding is not None


@dataclass(frozen=True)
class _Kernel:
    """A declaration that hashes by what it is called."""

    declaration: Declaration

    def __hash__(self) -> int:
        return hash(self.declaration.ref)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and other.declaration.ref == self.declaration.ref


def candidates(declaration: Declaration, group: str) -> tuple[tuple[Config, Problem], ...]:
    """The cases for a kernel, in a fixed order: the list of edge cases of the finest config, or
    what the group asks, then draws for all."""
    return _candidates(_Kernel(declaration), group)


@cache
def _candidates(kernel: _Kernel, group: str) -> tuple[tuple[Config, Problem], ...]:
    declaration, leading = kernel.declaration, group in LEADING
    config, dtypes = finest(declaration), declaration.support.dtypes
    most = _LONGEST if leading else _OTHERS
    targets = [
        Target(declaration, config, dtype, group)
        for config in declaration.configs
        for dtype in dtypes
    ]
    found: list[tuple[Config, Problem]] = []
    if leading:
        found = _in_turn(
            [
                [(config, p) for p in edge_cases(Target(declaration, config, dtype, group))]
                for dtype in dtypes
            ]
        )
    if groups()[group].asks is not None:
        found += _in_turn([[(target.config, p) for p in target.asked] for target in targets])
    else:  # one seed draws for all of them: each takes another part
        drawn = [draws(target.problems, 2 * most) for target in targets]
        found += [
            (target.config, p)
            for number in range(2 * most)
            for target, problems in [(targets[number % len(targets)], drawn[number % len(targets)])]
            for p in problems[number : number + 1]
        ]
    whole = leading or groups()[group].asks is not None
    small = {
        (c.name, p.name): (c, p)
        for c, p in found
        if whole or 0 < p.pairs * (p.head_dim + p.head_dim_v) <= _LARGEST
    }
    return tuple(small.values())[:most]


def _in_turn(queues: list[list[tuple[Config, Problem]]]) -> list[tuple[Config, Problem]]:
    """The first of each queue, then the second of each..."""
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
