"""Variant: a kernel and what it declares of itself.  Every declaration is plain data, checked, and
none is believed.

A kernel file ends with `VARIANT = Variant(...)` (or `VARIANTS = [...]`).  The judge reads
declarations from a child process; it never imports a kernel.  A kernel imports this package,
`references.masks`, `references.score_mods` and nothing else of the suite.
"""

from verify.arithmetic.archs import Arch, arch_named, arch_of, compiled_archs
from verify.variant.arguments import (
    STRIDED,
    AttentionArgs,
    Descales,
    Gradients,
    Saved,
    Stored,
    Unsupported,
    Workspace,
    default_dtype_out,
    storages_of,
)
from verify.variant.build import Binary, Build, Resources
from verify.variant.config import Config
from verify.variant.contract import Contract
from verify.variant.declaration import Declaration, declaration_from
from verify.variant.numerics import (
    GradientNumerics,
    GradientOrder,
    GradientProducts,
    GradientSoftmax,
    GradientSums,
    Maximum,
    Numerics,
    Order,
    Output,
    Products,
    Quantised,
    RowSum,
    ScoreGradient,
    Softmax,
)
from verify.variant.support import DESCALINGS, LAYOUTS, MASK_KINDS, ROW_ALIGNMENT, SCALES, Support
from verify.variant.validation import DeclarationError
from verify.variant.variant import ENTRIES, Variant

__all__ = [
    "DESCALINGS",
    "ENTRIES",
    "LAYOUTS",
    "MASK_KINDS",
    "ROW_ALIGNMENT",
    "SCALES",
    "STRIDED",
    "Arch",
    "AttentionArgs",
    "Binary",
    "Build",
    "Config",
    "Contract",
    "Declaration",
    "DeclarationError",
    "Descales",
    "GradientNumerics",
    "GradientOrder",
    "GradientProducts",
    "GradientSoftmax",
    "GradientSums",
    "Gradients",
    "Maximum",
    "Numerics",
    "Order",
    "Output",
    "Products",
    "Quantised",
    "Resources",
    "RowSum",
    "Saved",
    "ScoreGradient",
    "Softmax",
    "Stored",
    "Support",
    "Unsupported",
    "Variant",
    "Workspace",
    "arch_named",
    "arch_of",
    "compiled_archs",
    "declaration_from",
    "default_dtype_out",
    "storages_of",
]
