"""Faults of the Triton forwards that load whole tiles: through block pointers and descriptors."""

from tests.faults.fault import (
    TRITON_BLOCK_POINTERS,
    TRITON_DESCRIPTORS,
    TRITON_SOFTMAX,
    Fault,
)

WHOLE = "hq=2,hkv=2,sq=128,skv=128,d=64,dtype=float16"
BLOCK_POINTERS = "triton-block-pointer-forward"
HOST = "triton-host-descriptor-forward"
DEVICE = "triton-device-descriptor-forward"

FAULTS = (
    Fault(
        name="block-pointer-keys-unchecked",
        about="the last block of V is checked in its head dim alone, and reads rows past the end",
        source="none known",
        file=TRITON_BLOCK_POINTERS,
        variant=BLOCK_POINTERS,
        edits=(
            (
                (
                    "                v_tile = tl.load(v_here, boundary_check=(0, 1),"
                    ' padding_option="zero")'
                ),
                (
                    "                v_tile = tl.load(v_here, boundary_check=(1,),"
                    ' padding_option="zero")'
                ),
            ),
        ),
        common=WHOLE,
    ),
    Fault(
        name="block-pointer-head-dim-unchecked",
        about="a tile of O is checked in its rows alone, and written past its head dim",
        source="none known",
        file=TRITON_BLOCK_POINTERS,
        variant=BLOCK_POINTERS,
        edits=(
            (
                "o_tile.to(out.dtype.element_ty), boundary_check=(0, 1))",
                "o_tile.to(out.dtype.element_ty), boundary_check=(0,))",
            ),
        ),
        common=WHOLE,
    ),
    Fault(
        name="base-2-lse-natural",
        about="the LSE is natural, where base 2 is promised",
        source="none known",
        file=TRITON_BLOCK_POINTERS,
        variant=BLOCK_POINTERS,
        edits=(
            (
                "* seqlen_q + rows, lse_rows, mask",
                "* seqlen_q + rows, 0.6931471805599453 * lse_rows, mask",
            ),
        ),
        common=WHOLE,
    ),
    Fault(
        name="base-2-scale-unconverted",
        about="the scores are taken for scores in base 2, without the factor log2 e of the scale",
        source="none known",
        file=TRITON_BLOCK_POINTERS,
        variant=BLOCK_POINTERS,
        edits=(
            ("            args.softmax_scale * LOG2_E,\n", "            args.softmax_scale,\n"),
        ),
        common="hq=2,hkv=2,sq=128,skv=1,d=64,dtype=float16",
    ),
    Fault(
        name="base-2-lse-of-natural-sum",
        about="the base-2 maximum and the natural logarithm of the sum are added up",
        source="none known",
        file=TRITON_DESCRIPTORS,
        helper=TRITON_SOFTMAX,
        variant=DEVICE,
        edits=(("m + tl.log2(denominator)", "m + tl.log(denominator)"),),
        common=WHOLE,
    ),
    Fault(
        name="descriptor-rows-of-keys",
        about="a descriptor of Q has seqlen_kv rows, so that the queries behind them are 0",
        source="none known",
        file=TRITON_DESCRIPTORS,
        variant=DEVICE,
        edits=(
            (
                "_described(q, steps[0], batch, head, seqlen_q, dims,",
                "_described(q, steps[0], batch, head, seqlen_kv, dims,",
            ),
        ),
        common=WHOLE,
    ),
    Fault(
        name="descriptor-shared-dimension",
        about="the host's descriptor is asked for places of a dimension that has only one",
        source="none known",
        file=TRITON_DESCRIPTORS,
        variant=HOST,
        edits=(("return tuple(_FACTOR.value * one for one in several)", "return (16, 16, 16)"),),
        common=WHOLE,
    ),
    Fault(
        name="descriptor-head-of-queries",
        about="K is taken from the head of the query, not from that of its group",
        source="none known",
        file=TRITON_DESCRIPTORS,
        variant=HOST,
        edits=(
            (
                "k_tile = _loaded(k_all, steps[1], batch, head_kv, begin,",
                "k_tile = _loaded(k_all, steps[1], batch, head, begin,",
            ),
        ),
        common=WHOLE,
    ),
)
