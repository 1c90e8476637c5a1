"""Declaration: a variant as the judge knows it, plain data read from a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verify.variant.config import Config
from verify.variant.contract import Contract
from verify.variant.numerics import GradientNumerics, Numerics, rebuilt
from verify.variant.support import Support


@dataclass(frozen=True)
class Declaration:
    """A variant as the judge knows it: data read from a child process, and where its source lies.

    ref: how a case names the variant (its name, or `path/to/file.py@name` for a file outside the
    collection). entries: out of ENTRIES.  workspaces: the runs (RUNS) that want scratch buffers.
    saved_config: of the forward of another variant, which saves O and LSE; numerics and contract
    are then that one's. undeclared: made from a plain function.  interpreted: Triton's interpreter
    runs it here, so problems must be small.  further_configs: names of the configs that
    `--all-configs` adds to the judged ones.  twins: the layouts in which its cell holds a plain
    function, too.
    """

    ref: str
    path: str
    source_hash: str
    name: str
    family: str
    configs: tuple[Config, ...]
    support: Support
    numerics: Numerics
    contract: Contract
    entries: tuple[str, ...] = ("forward",)
    gradients: GradientNumerics | None = None
    saved_config: Config | None = None
    allocates_outputs: bool = False
    workspaces: tuple[str, ...] = ()
    compiles: bool = False
    uncompilable: str | None = None
    head_dim_buckets: tuple[int, ...] = ()
    witness: tuple[str, ...] = ()
    unavailable: str | None = None
    undeclared: bool = False
    interpreted: bool = False
    further_configs: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    def config(self, name: str) -> Config:
        """The config of that name, which can be a further one; raises KeyError that says which
        there are."""
        for config in self.configs:
            if config.name == name:
                return config
        if name in self.further_configs:
            return Config.parse(name)
        names = ", ".join(config.name for config in self.configs)
        more = f" and {len(self.further_configs)} more" if self.further_configs else ""
        raise KeyError(f"{self.ref} has no config {name!r} (configs: {names}{more})")


def declaration_from(
    data: dict[str, Any], *, ref: str, path: str, source_hash: str, witness: Sequence[str] = ()
) -> Declaration:
    """Rebuild a declaration from `Variant.describe`'s data (after JSON)."""
    support = dict(data["support"])
    for key in (
        "dtypes",
        "head_dims",
        "dtypes_out",
        "descalings",
        "masks",
        "score_mods",
        "storages",
        "devices",
        "capability",
    ):
        support[key] = tuple(support[key])
    support["max_capability"] = support["max_capability"] and tuple(support["max_capability"])
    return Declaration(
        ref=ref,
        path=path,
        source_hash=source_hash,
        name=data["name"],
        family=data["family"],
        configs=tuple(_config(c) for c in data["configs"]),
        support=Support(**support),
        numerics=rebuilt(Numerics, data["numerics"]),
        contract=Contract(**data["contract"]),
        entries=tuple(data["entries"]),
        gradients=rebuilt(GradientNumerics, data["gradients"]) if data["gradients"] else None,
        saved_config=_config(data["saved_config"]) if data["saved_config"] else None,
        allocates_outputs=data["allocates_outputs"],
        workspaces=tuple(data["workspaces"]),
        compiles=data["compiles"],
        uncompilable=data["uncompilable"],
        head_dim_buckets=tuple(data["head_dim_buckets"]),
        witness=tuple(witness),
        unavailable=data["unavailable"],
        undeclared=data.get("undeclared", False),
        interpreted=data.get("interpreted", False),
        further_configs=tuple(data["further_configs"]),
        twins=tuple(data.get("twins", ())),
    )


def _config(data: dict[str, Any]) -> Config:
    return Config(**(data | {"options": tuple(tuple(option) for option in data["options"])}))
