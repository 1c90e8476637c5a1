"""Builds that are what they declare, and builds that are not; nothing here runs."""

from pathlib import Path

from verify.cuda.compile import Source, build_of, compilable
from verify.variant import Build, Config, Resources, Support, Unsupported, Variant

EXPECTED = ("HMMA", "LDSM", "LDGSTS")


def source(*, copies_async: bool, kept: int) -> Source:
    """One build of builds.cu."""
    macros = (("COPIES_ASYNC", str(int(copies_async))), ("KEPT", str(kept)))
    return Source(Path(__file__).with_name("builds.cu"), "product", macros)


def builds(arch: str) -> list[Build]:
    """A right build, one that spills, the same within a budget, one that copies without cp.async,
    and one that has no binary."""
    right = source(copies_async=True, kept=4)
    spilling = source(copies_async=True, kept=64)
    plain = source(copies_async=False, kept=4)
    return [
        build_of("default-right", right, arch, shared=64, expects=EXPECTED),
        build_of("default-spilling", spilling, arch, shared=0, expects=EXPECTED),
        build_of("default-budgeted", spilling, arch, shared=0, spill_budget=4096),
        build_of("default-plain", plain, arch, shared=0, expects=EXPECTED),
        Build("default-resources", lambda: Resources(32, 0, 0, 0, 0), expects=EXPECTED),
    ]


def forward(args, out, lse, workspace):
    """Never run: these are builds alone."""
    raise Unsupported("device", "only builds")


VARIANT = Variant(
    name="builds",
    family="ptx",
    forward=forward,
    configs=(Config(),),
    support=Support(dtypes=("float16",), head_dims=(64,), devices=("cuda",)),
    builds=builds,
    compilable=compilable,
)
