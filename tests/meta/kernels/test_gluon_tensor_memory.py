"""The maximum of rows that a load from tensor memory makes (`load_max`, tcgen05.ld.red): that
Triton has it, and that no config of the forward for Blackwell can use it on sm_100a.

Compiled without a GPU with Triton 3.7.1; docs/gluon.md says what follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.gluon import blackwell_forward
from kernels.gluon.partitions import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    unavailable,
)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@gluon.jit
def row_maxima(
    out, ROWS: gl.constexpr, COLUMNS: gl.constexpr, num_warps: gl.constexpr, BY_LOAD: gl.constexpr
):
    MEMORY: gl.constexpr = TensorMemoryLayout([ROWS, COLUMNS], col_stride=1)
    tile = allocate_tensor_memory(gl.float32, [ROWS, COLUMNS], MEMORY)
    LAYOUT: gl.constexpr = get_tmem_reg_layout(gl.float32, [ROWS, COLUMNS], MEMORY, num_warps)
    tile.store(gl.full([ROWS, COLUMNS], 1.0, gl.float32, LAYOUT))
    if BY_LOAD:
        values, largest = tile.load_max(LAYOUT)
    else:
        values = tile.load(LAYOUT)
        largest = gl.max(values, 1)
    rows = gl.arange(0, ROWS, largest.type.layout)
    gl.store(out + rows, largest + gl.convert_layout(gl.sum(values, 1), largest.type.layout))


def loads(capability: int, columns: int, num_warps: int, *, by_load: bool) -> set[str]:
    """The loads from tensor memory in the PTX; raises what Triton and ptxas raise."""
    constants: dict[str, Any] = {
        "ROWS": 128,
        "COLUMNS": columns,
        "num_warps": num_warps,
        "BY_LOAD": by_load,
    }
    source = GluonASTSource(row_maxima, {"out": "*fp32"}, constants)
    options = {"num_warps": num_warps}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return set(re.findall(r"tcgen05\.ld\.\w+", made.asm["ptx"]))


@pytest.mark.parametrize("number", range(len(blackwell_forward.VARIANT.configs)))
def test_no_config_has_its_maximum_by_a_load_on_sm_100a(number: int) -> None:
    """With 4 warps ptxas knows no such instruction there; with 8 a row lies in two threads."""
    config = blackwell_forward.VARIANT.configs[number]
    columns, num_warps = config.block_n or 0, config.num_warps or 0
    assert loads(100, columns, num_warps, by_load=False) == {"tcgen05.ld.sync"}
    with pytest.raises(Exception, match=r"parsing|tcgen05\.ld\.red") as refused:
        loads(100, columns, num_warps, by_load=True)
    said = f"{refused.value} {refused.value.__cause__ or ''}"
    if num_warps == 4:
        assert "'tcgen05.ld.red' not supported on .target 'sm_100a'" in said
    else:
        assert "encountered during parsing" in said


def test_sm_103a_has_it_with_4_warps_alone() -> None:
    assert loads(103, 64, 4, by_load=True) == {"tcgen05.ld.red"}
    with pytest.raises(RuntimeError, match="encountered during parsing"):
        loads(103, 128, 8, by_load=True)
