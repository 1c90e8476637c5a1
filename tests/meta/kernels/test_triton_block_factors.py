"""The Triton forwards of 8-bit inputs with one factor for 64 or 128 rows, in Triton's interpreter:
as they are they pass, and every fault in their factors is convicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kernels.triton import block_pointer_forward, fp8_forward, fp8_transposed_forward
from kernels.triton.compile import arguments
from kernels.triton.eight_bits import given_factors, meta_descales
from tests.faults.fault import TRITON_BLOCK_POINTERS, TRITON_EIGHT_BITS, TRITON_FP8, Fault
from tests.faults.search import Catch, convicts
from tests.faults.stand import Stand
from verify.problem import Problem
from verify.variant import Config

BLOCKS = ("block64", "block128")
ASKED = "hq=4,hkv=2,sq=150,skv=200,d=32,dtype=float8_e4m3fn,scale=1.0,mask=window.90.30,seed=3"
# A tile of 128 rows meets two factors of 64; m64n32w4s2 reads those of two tiles of keys.
CONFIGS = ("m128n64w8s2", "m64n32w4s2")
OF_KEYS = "_descales(factors, 1, batch, head_kv, begin // ROWS)"
OF_VALUES = "_descales(factors, 2, batch, head_kv, begin // ROWS)"
OF_ROWS = "_descales(factors, 0, batch, head, row // ROWS)"
BEFORE = "tl.maximum(begin // ROWS - 1, 0)"


@dataclass(frozen=True)
class Planted:
    """Edits of `eight_bits`, or of a kernel's file (file, and its variant), and the configs that
    show the fault."""

    edits: tuple[tuple[str, str], ...]
    configs: tuple[str, ...] = CONFIGS
    file: str = TRITON_FP8
    helper: str = TRITON_EIGHT_BITS
    variant: str = ""


FAULTS = {
    "keys-of-the-block-before": Planted(((OF_KEYS, OF_KEYS.replace("begin // ROWS", BEFORE)),)),
    "values-of-the-block-before": Planted(
        ((OF_VALUES, OF_VALUES.replace("begin // ROWS", BEFORE)),)
    ),
    "queries-of-the-first-block": Planted(((OF_ROWS, OF_ROWS.replace("row //", "row * 0 //")),)),
    "queries-of-the-first-row": Planted(
        ((OF_ROWS, OF_ROWS.replace("row //", "(row * 0 + tl.min(row, 0)) //")),), CONFIGS[:1]
    ),
    "queries-of-the-key-head": Planted(((OF_ROWS, OF_ROWS.replace("head,", "head_kv,")),)),
    "queries-and-keys-swapped": Planted(
        (
            (OF_ROWS, "_descales(factors, 1, batch, head_kv, row // ROWS)"),
            (OF_KEYS, OF_KEYS.replace("factors, 1", "factors, 0")),
        )
    ),
    "keys-not-multiplied": Planted(((f"factor = factor * {OF_KEYS}", "factor = factor * 1.0"),)),
    "values-once-at-the-end": Planted(
        (
            ("factor_v = 1.0", "factor_v = 0.00390625 * _descales(factors, 2, batch, head_kv, 0)"),
            (f"factor_v = 0.00390625 * {OF_VALUES}", "factor_v = 1.0"),
        )
    ),
    "values-on-the-whole-sum": Planted(
        (
            (
                "acc += tl.dot(p_tile, v_tile, max_num_imprecise_acc=IMPRECISE) * factor_v",
                "acc = tl.dot(p_tile, v_tile, acc, max_num_imprecise_acc=IMPRECISE) * factor_v",
            ),
        )
    ),
    "values-by-the-step-of-the-walk": Planted(
        (("place = batch, head_kv, begin", "place = batch, head_kv, i * BLOCK_N"),),
        ("m64n64w4s2",),
        file=TRITON_BLOCK_POINTERS,
        helper="",
        variant="triton-block-pointer-fp8-forward",
    ),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as opened:
        yield opened


@pytest.mark.first_look(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_factors_is_convicted_and_the_kernel_is_not(name: str, stand: Stand) -> None:
    planted = FAULTS[name]
    fault = Fault(
        name=f"factors-{name}",
        about="factors of blocks of rows",
        source="none known",
        file=planted.file,
        helper=planted.helper,
        variant=planted.variant,
        edits=planted.edits,
        common=ASKED,
    )
    for config in planted.configs:
        catch = Catch("accuracy", "bound", config, Problem.parse(f"{ASKED},descale=block64").name)
        assert not convicts(stand, stand.shipped(fault), catch), catch.id
        assert convicts(stand, stand.planted(fault), catch), catch.id


def test_no_block_of_keys_of_a_config_has_two_factors() -> None:
    variants = (
        fp8_forward.VARIANT,
        *fp8_transposed_forward.VARIANTS,
        block_pointer_forward.FP8_VARIANT,
    )
    for variant in variants:
        further = variant.further_configs() if variant.further_configs is not None else ()
        for config in (*variant.configs, *further):
            args = arguments(config, "float8_e4m3fn", 64, "full")
            assert config.block_n is not None
            asked = [word for word in BLOCKS if int(word.removeprefix("block")) >= config.block_n]
            assert asked
            assert set(BLOCKS) & set(variant.support.descalings) == set(asked)
            for word in asked:
                of = meta_descales(args, word)
                given, rows = given_factors(replace(args, descales=of), config.block_n)
                assert given[0] == (of.q, of.k, of.v)
                assert rows == int(word.removeprefix("block"))


@pytest.mark.parametrize(("keys", "word"), [(128, "block64"), (48, "block64"), (256, "block128")])
def test_a_block_of_keys_with_two_factors_is_refused(keys: int, word: str) -> None:
    args = arguments(Config(block_n=keys), "float8_e4m3fn", 64, "full")
    with pytest.raises(ValueError, match=f"blocks of {keys} keys"):
        given_factors(replace(args, descales=meta_descales(args, word)), keys)
