"""Variant: an algorithm with its entry points and its declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from references.output_scale import DTYPES as EIGHT_BITS
from references.tensor import Tensor
from verify.arithmetic.archs import archs
from verify.brief import shown
from verify.machine.compiling import as_compiling
from verify.variant.arguments import AttentionArgs, Gradients, Saved, Workspace
from verify.variant.build import Build
from verify.variant.config import Config
from verify.variant.contract import Contract
from verify.variant.numerics import GradientNumerics, Numerics
from verify.variant.support import Support
from verify.variant.validation import INPUT_DTYPES, DeclarationError, Declared

ENTRIES = ("forward", "backward")
RUNS = ("forward", "saved", "backward")  # "saved": the forward whose raw results a backward gets

WorkspaceOf = Callable[[AttentionArgs], dict[str, tuple[tuple[int, ...], str]]]


@dataclass(frozen=True, kw_only=True)
class Variant(Declared, path="variant"):
    """An algorithm with one or two entry points.

    forward(args, out, lse, workspace) writes O (see `Problem.dtype_out`) and LSE (float32, (batch,
    heads_q, seqlen_q)) into the judge's buffers; lse is None if the contract has none.
    backward(args, saved, dout, gradients, workspace) writes dQ, dK and dV from the raw tensors that
    a forward saved: its own, or that of `saved_by`, run with `saved_config`.  `gradients` declares
    its arithmetic.  A variant without a forward of its own takes numerics and contract of what it
    is `saved_by`; one that makes its own softmax needs neither. workspace(args),
    backward_workspace(args) name the scratch buffers wanted, {name: (shape, dtype)}; the judge
    allocates, poisons and guards them.  allocates_outputs: a library kernel that makes its own
    outputs, which the entry point copies. available() returns why this variant cannot run here at
    all, or None. builds(arch) lists what is compiled for "sm_90a"..., a representative of every
    path at least; none where arch has no use. compilable() returns why nothing can be compiled
    here, or None.  further_configs() lists what else the kernel can be run with: a case can name
    these, and `verify run --all-configs` judges them beside `configs`.
    """

    name: str
    family: str
    forward: Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None] | None = None
    backward: Callable[[AttentionArgs, Saved, Tensor, Gradients, Workspace], None] | None = None
    configs: Sequence[Config] = (Config(),)
    further_configs: Callable[[], Sequence[Config]] | None = None
    support: Support
    numerics: Numerics = field(default_factory=Numerics)
    gradients: GradientNumerics | None = None
    contract: Contract = field(default_factory=Contract)
    saved_by: Variant | None = None
    saved_config: Config | None = None
    workspace: WorkspaceOf | None = None
    backward_workspace: WorkspaceOf | None = None
    allocates_outputs: bool = False
    available: Callable[[], str | None] | None = None
    builds: Callable[[str], Sequence[Build]] | None = None
    compilable: Callable[[], str | None] | None = None
    head_dim_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_kinds()
        if (self.backward is None) != (self.gradients is None):
            raise DeclarationError(
                f"{self.name}: backward and gradients (its arithmetic) come together"
            )
        if self.forward is None and self.saved_by is None and not self._reads_nothing:
            raise DeclarationError(
                f"{self.name}: a variant has a forward, or a backward and what it is saved_by, "
                'or a backward that declares GradientSoftmax(source="own")'
            )
        eight = [name for name in self.support.dtypes_out if name in EIGHT_BITS]
        if eight and self.backward is not None:
            raise DeclarationError(
                f"{self.name}: support.dtypes_out: no bound of gradients is derived for a saved O"
                f" in {', '.join(eight)}"
            )
        if self.numerics.quantised.products != "none":
            self._check_quantised()
        self.support.check_rows()
        for declared in (self.numerics, self.gradients):
            if declared is not None:
                self._check_instruction(f"{declared.path}.products", declared.products.instruction)

    def _check_quantised(self) -> None:
        """Raise DeclarationError for what no bound is derived for beside integers of Q and K."""
        if self.backward is not None:
            raise DeclarationError(
                f"{self.name}: numerics.quantised: no bound of gradients is derived beside it"
            )
        if self.numerics.quantised.centred != "none" and self.support.score_mods:
            raise DeclarationError(
                f"{self.name}: numerics.quantised.centred: a score mod needs scores that keep the"
                f" mean of K, and support.score_mods has {', '.join(self.support.score_mods)}"
            )

    def _check_instruction(self, path: str, instruction: str) -> None:
        """Raise DeclarationError if an architecture inside the support lacks the instruction."""
        for arch in archs():
            inside = self.support.has(arch.capability)
            if inside and instruction not in ("any", "fma", *arch.instructions):
                raise DeclarationError(
                    f"{path}.instruction: {arch.name} has no {instruction}: narrow"
                    " support.capability and max_capability to what has, or declare any"
                )

    def _check_kinds(self) -> None:
        """Raise DeclarationError for a part that is not what its field takes, or a dtype that no
        variant may declare."""
        kinds: dict[str, tuple[type, ...]] = {
            "name": (str,),
            "family": (str,),
            "support": (Support,),
            "numerics": (Numerics,),
            "gradients": (GradientNumerics, type(None)),
            "contract": (Contract,),
            "saved_by": (Variant, type(None)),
            "saved_config": (Config, type(None)),
            "allocates_outputs": (bool,),
        }
        for field_name, possible in kinds.items():
            value = getattr(self, field_name)
            if not isinstance(value, possible):
                wanted = " or ".join(
                    "None" if kind is type(None) else kind.__name__ for kind in possible
                )
                raise DeclarationError(f"{self.name}: {field_name}: {shown(value)} is no {wanted}")
        for field_name in (
            "forward",
            "backward",
            "further_configs",
            "workspace",
            "backward_workspace",
            "available",
            "builds",
            "compilable",
        ):
            value = getattr(self, field_name)
            if value is not None and not callable(value):
                raise DeclarationError(f"{self.name}: {field_name}: {shown(value)} is no function")
        if not all(isinstance(config, Config) for config in self.configs):
            raise DeclarationError(
                f"{self.name}: configs: {shown(self.configs)} are not all a Config"
            )
        unknown = [dtype for dtype in self.support.dtypes if dtype not in INPUT_DTYPES]
        if unknown:
            raise DeclarationError(
                f"support.dtypes: {unknown[0]!r} is none of {', '.join(INPUT_DTYPES)}"
            )

    @property
    def _reads_nothing(self) -> bool:
        """Whether the backward makes its own softmax, so that no forward has to save anything."""
        return self.gradients is not None and self.gradients.softmax.source == "own"

    def by_dtype(
        self,
        *,
        numerics: Mapping[str, Numerics] | None = None,
        gradients: Mapping[str, GradientNumerics] | None = None,
    ) -> tuple[Variant, ...]:
        """One variant for each dtype of the support, NAME-DTYPE, with the arithmetic of that dtype.

        numerics, gradients: by dtype; a dtype without an entry keeps this variant's.  The first one
        alone has the builds.  Raises DeclarationError for a dtype that the support lacks.
        """
        dtypes = self.support.dtypes
        for what, given in (("numerics", numerics), ("gradients", gradients)):
            if given is not None and not isinstance(given, Mapping):
                raise DeclarationError(
                    f"{self.name}: {what}: {shown(given)} is no mapping of dtypes out of"
                    f" {', '.join(dtypes)}"
                )
            for dtype in given or ():
                if dtype not in dtypes:
                    raise DeclarationError(
                        f"{self.name}: {what}: {shown(dtype)} is none of {', '.join(dtypes)}"
                    )
        return tuple(
            replace(
                self,
                name=f"{self.name}-{dtype}",
                support=replace(self.support, dtypes=(dtype,)),
                numerics=(numerics or {}).get(dtype, self.numerics),
                gradients=(gradients or {}).get(dtype, self.gradients),
                builds=self.builds if dtype == dtypes[0] else None,
            )
            for dtype in dtypes
        )

    @property
    def saver(self) -> Variant:
        """The variant whose forward saves O and LSE for this one's backward."""
        return self if self.saved_by is None else self.saved_by

    def entry(self, run: str) -> tuple[Callable[..., None] | None, WorkspaceOf | None]:
        """What is called for one of RUNS, and what says which scratch buffers it wants."""
        if run == "backward":
            return self.backward, self.backward_workspace
        variant = self if run == "forward" else self.saver
        return variant.forward, variant.workspace

    def config_of(self, run: str, config: Config) -> Config:
        """The config that one of RUNS gets where `config` is on trial."""
        if run == "saved" and self.saved_by is not None:
            return self.saved_config or self.saved_by.configs[0]
        return config

    @property
    def _further_configs(self) -> list[Config]:
        """Those of `further_configs` that are not among `configs`."""
        further = () if self.further_configs is None else self.further_configs()
        judged = {config.name for config in self.configs}
        return [config for config in further if config.name not in judged]

    @property
    def _contract(self) -> Contract:
        if self.forward is None and self.saved_by is None:
            return replace(self.contract, lse=None)
        return replace(
            self.saver.contract,
            deterministic_backward=self.contract.deterministic_backward,
            masked_values_backward=self.contract.masked_values_backward,
        )

    def _uncompilable(self) -> str | None:
        """Why builds cannot be compiled; a process in which Triton interprets is no reason, since
        others compile."""
        if self.compilable is None:
            return None
        with as_compiling():
            return self.compilable()

    def describe(self) -> dict[str, Any]:
        """The declaration as JSON-ready data (see `Declaration`)."""
        return {
            "name": self.name,
            "family": self.family,
            "configs": [asdict(config) for config in self.configs],
            "further_configs": [config.name for config in self._further_configs],
            "support": asdict(self.support) | {"head_dims": list(self.support.head_dims)},
            "entries": [name for name in ENTRIES if getattr(self, name) is not None],
            "numerics": asdict(self.saver.numerics),
            "gradients": None if self.gradients is None else asdict(self.gradients),
            "contract": asdict(self._contract),
            "saved_config": None
            if self.saved_by is None
            else asdict(self.config_of("saved", Config())),
            "allocates_outputs": self.allocates_outputs,
            "workspaces": [entry for entry in RUNS if self.entry(entry)[1] is not None],
            "compiles": self.builds is not None,
            "uncompilable": self._uncompilable(),
            "head_dim_buckets": list(self.head_dim_buckets),
            "unavailable": self.available() if self.available is not None else None,
        }
