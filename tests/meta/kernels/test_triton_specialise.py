"""`tl.range(warp_specialize=True)` in the forwards through descriptors: what Triton makes of it for
each architecture, compiled without a GPU, and that a config whose binaries are those of another is
said and not counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import triton

from kernels.triton import descriptor_forward
from kernels.triton.compile import arguments, compiled, meta, target
from kernels.triton.descriptor_builds import CONFIGS, SPECIALISED, specialises
from tests.properties import tier
from verify.cell.building import compile_build
from verify.evidence import Built
from verify.report.resources import same_configs
from verify.variant import Config, arch_named, compiled_archs

HOST, DEVICE = True, False
REGISTERS = 65536  # of a multiprocessor
EIGHT_WARPS, FOUR_WARPS, _ = SPECIALISED

pytestmark = [
    pytest.mark.for_ci,
    pytest.mark.skipif(
        not triton.__version__.startswith("3.7."), reason="the facts are those of Triton 3.7"
    ),
]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def made(arch: str, config: Config, head_dim: int, *, flag: bool) -> str | None:
    """The PTX of such a build with the flag on or off, whatever the kernel would choose; None where
    Triton's passes fail."""
    args = arguments(config, "float16", head_dim, "causal")
    outputs = meta(tuple(args.q.shape), "float16"), meta(tuple(args.q.shape[:3]), "float32")
    launch = descriptor_forward.launch(DEVICE, args, *outputs)
    forced = replace(launch, keywords=launch.keywords | {"SPECIALIZE": flag})
    try:
        ptx: str = compiled(forced, arch).asm["ptx"]
    except RuntimeError as error:
        if "PassManager::run failed" not in str(error):
            raise
        return None
    return ptx


# Each fact first, then what further architectures and configs repeat.
FACTS = [
    ("sm_80", FOUR_WARPS, 64, "another"),
    ("sm_90a", EIGHT_WARPS, 64, "same"),
    ("sm_90a", FOUR_WARPS, 64, "fails"),
    ("sm_100a", EIGHT_WARPS, 64, "specialised"),
]
REPEATED = [
    ("sm_80", EIGHT_WARPS, 64, "same"),
    ("sm_100a", FOUR_WARPS, 64, "specialised"),
    ("sm_100a", EIGHT_WARPS, 256, "fails"),
    ("sm_120a", EIGHT_WARPS, 64, "fails"),
]


@pytest.mark.parametrize(
    ("arch", "config", "head_dim", "fact"),
    [*FACTS, *(pytest.param(*case, marks=pytest.mark.for_ci) for case in REPEATED)],
)
def test_what_the_flag_does(arch: str, config: Config, head_dim: int, fact: str) -> None:
    """And that the kernel leaves it off where the passes fail, and nowhere else."""
    off = made(arch, config, head_dim, flag=False)
    on = made(arch, config, head_dim, flag=True)
    assert off is not None
    if on is None:
        found = "fails"
    elif on == off:
        found = "same"
    else:  # each kind of warps sets its own registers
        found = "specialised" if "setmaxnreg" in on else "another"
    assert found == fact
    assert specialises(config, head_dim, arch_named(arch).capability) is (fact != "fails")


def test_the_flag_is_an_option_of_a_config_and_off_without_a_device() -> None:
    assert [config.name for config in SPECIALISED] == [
        f"{config.name}-warp_specialize_1" for config in (CONFIGS[0], CONFIGS[1], CONFIGS[3])
    ]
    for config in (*CONFIGS, *SPECIALISED):
        assert not specialises(config, 64, None)
    assert not any(specialises(c, 64, arch_named(a).capability) for c in CONFIGS for a in ARCHS)
    for variant in descriptor_forward.VARIANTS:
        told = variant.describe()
        assert {config.name for config in SPECIALISED} <= set(told["further_configs"])


ARCHS = compiled_archs()


@pytest.mark.parametrize(
    "host", [HOST, pytest.param(DEVICE, marks=pytest.mark.for_ci)], ids=["host", "device"]
)
@pytest.mark.parametrize(("arch", "same"), [("sm_90a", True), ("sm_100a", False)])
def test_a_build_with_the_binary_of_its_twin_counts_once(host: bool, arch: str, same: bool) -> None:
    assert target(arch).arch in {90, 100}
    twins = (CONFIGS[0].name, EIGHT_WARPS.name)
    wanted = {f"{name}, float16, d 64, causal" for name in twins}
    builds = [b for b in descriptor_forward.builds(host, arch) if b.name in wanted]
    assert [build.name.partition(",")[0] for build in builds] == [*twins]
    found = [
        Built(
            variant="v",
            arch=arch,
            build=build.name,
            **compile_build(build, disassemble=False),
        )
        for build in builds
    ]
    assert [built.error for built in found] == ["", ""]
    told = [(entry["config"], entry["other"]) for entry in same_configs(found)]
    assert told == ([(EIGHT_WARPS.name, CONFIGS[0].name)] if same else [])


@pytest.mark.parametrize("number", tier.for_ci(range(len(SPECIALISED))))
def test_all_warps_of_a_program_have_registers(number: int) -> None:
    """A bound of ptxas is for each of them, those that Triton adds included."""
    args = arguments(SPECIALISED[number], "float16", 64 if number else 128, "full")
    outputs = meta(tuple(args.q.shape), "float16"), meta(tuple(args.q.shape[:3]), "float32")
    for host in (HOST, DEVICE):
        launch = descriptor_forward.launch(host, args, *outputs, (10, 0))
        ptx = compiled(launch, "sm_100a").asm["ptx"]
        threads, registers = (
            int(re.search(rf"\.{word} (\d+)", ptx)[1]) for word in ("reqntid", "maxnreg")
        )
        assert threads > 32 * (SPECIALISED[number].num_warps or 0)
        assert threads * registers <= REGISTERS


def test_every_specialised_build_has_a_twin() -> None:
    """Without one there would be nothing to compare it with."""
    names = {build.name for build in descriptor_forward.builds(HOST, "sm_90a")}
    specialised = [name for name in names if "-warp_specialize_1" in name]
    assert len(specialised) == 5
    assert {name.replace("-warp_specialize_1", "") for name in specialised} <= names
