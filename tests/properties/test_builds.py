"""What every kernel's source must hold on any machine: it compiles for every architecture that it
claims."""

from __future__ import annotations

import pytest

from tests.properties import tier
from verify.campaign.builds import Builder
from verify.variant import Declaration


@pytest.mark.first_look(1)  # the others take NVRTC 10 to 20 s
@tier.first_tier(tier.toolchain)
@pytest.mark.long(25)  # CuTe's headers
@pytest.mark.compiles
def test_compiles(declaration: Declaration, arch: str, builder: Builder) -> None:
    """Every build that the variant lists, without a GPU, is what it declares: within its spill
    budget, with the instructions that it expects.  Resources and instructions go into the
    report."""
    failures = builder.compile(declaration, arch)
    assert not failures, "\n".join(failures)
