"""Faults of the arithmetic of the Triton backward."""

from tests.faults.backward import SQUARE
from tests.faults.fault import BACKWARD_KERNELS, TRITON_BACKWARD, Fault

_DQ_STORE = "tl.store(dq_rows + dims, (dq_tile * dq_factor).to(dq.dtype.element_ty), mask=dq_mask)"

FAULTS = (
    Fault(
        name="delta-in-bf16",
        about=(
            "delta is rounded to bf16: small against normal inputs, not where dP and delta nearly"
            " cancel"
        ),
        source="TransformerEngine #3216",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "do_tile.to(tl.float32), 1)",
                "do_tile.to(tl.float32), 1).to(tl.bfloat16).to(tl.float32)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="delta-left-out-of-dq",
        about="dQ takes P dP for dS",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                '(tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - delta_row)',
                'tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")',
            ),
        ),
        common="sq=16,skv=1024,d=256,dv=16,dtype=float16",
    ),
    Fault(
        name="delta-of-last-tile-unwritten",
        about=(
            "delta is stored by whole tiles of rows only, and read from scratch memory that nothing"
            " wrote"
        ),
        source="flashinfer ee3a7e822",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(("sums, mask=rows < seqlen_q)", "sums, mask=rows < seqlen_q // ROWS * ROWS)"),),
        common=SQUARE,
    ),
    Fault(
        name="dq-not-scaled",
        about="dQ is not multiplied by the scale",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=((_DQ_STORE, _DQ_STORE.replace("(dq_tile * dq_factor)", "dq_tile")),),
        common="hq=2,hkv=2,sq=64,skv=64,d=64,dtype=float32,scale=1.0",
    ),
    Fault(
        name="dk-not-scaled",
        about="dK is not multiplied by the scale",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(("(dk_tile * scale)", "dk_tile"),),
        common="hq=2,hkv=2,sq=64,skv=64,d=64,dtype=float32,scale=1.0",
    ),
    Fault(
        name="dq-adds-to-output",
        about="dQ is added to what the buffer held",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                _DQ_STORE,
                "before = tl.load(dq_rows + dims, mask=dq_mask, other=0.0).to(tl.float32)\n    "
                + _DQ_STORE.replace("(dq_tile * dq", "(before + dq_tile * dq"),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="k-prescaled-in-input-dtype",
        about="K times the scale is rounded to 16 bits, so that P is not that of the forward's LSE",
        source="triton tutorial 06",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                'x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * factor',
                (
                    "x = tl.dot((k_tile * scale_log2).to(k_tile.dtype), tl.trans(q_tile),"
                    ' input_precision="ieee")'
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="lse-read-in-fp16",
        about="the saved LSE is rounded to fp16",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "lse * 1.4426950408889634)",
                "lse.to(tl.float16).to(tl.float32) * 1.4426950408889634)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="ds-in-bf16",
        about="dS is rounded to bf16 before it is rounded to the inputs' dtype",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "tl.dot(ds.to(k_tile.dtype), k_tile",
                "tl.dot(ds.to(tl.bfloat16).to(k_tile.dtype), k_tile",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="dq-half-block-unmasked",
        about=(
            "without a mask a block of keys counts as full where half of it is: 2^(0 - LSE)"
            " overflows in dQ"
        ),
        source="cuDNN (docs/findings.md)",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "                ds = tl.where(visible, ds, 0.0)\n            dq_tile",
                (
                    '                even = (seqlen_kv % (BLOCK_N // 2) == 0) & (KIND == "full")\n'
                    "                ds = tl.where(visible | even, ds, 0.0)\n            dq_tile"
                ),
            ),
        ),
        common="hq=2,hkv=2,sq=64,skv=56,d=64,dtype=float16",
    ),
    Fault(
        name="dv-half-block-unmasked",
        about=(
            "without a mask a block of rows counts as full where half of it is: 2^(0 - LSE)"
            " overflows in dV and dK"
        ),
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "                    p = tl.where(visible, p, 0.0)\n",
                (
                    "                    even = (seqlen_q % (BLOCK_M // 2) == 0) & (KIND =="
                    ' "full")\n                    p = tl.where(visible | even, p, 0.0)\n'
                ),
            ),
        ),
        common="hq=2,hkv=2,sq=56,skv=64,d=64,dtype=float16",
    ),
    Fault(
        name="dv-accumulates-in-fp16",
        about="dV is added up in fp16",
        source="SageAttention #93",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                'do_tile, dv_tile, input_precision="ieee")',
                'do_tile, dv_tile, input_precision="ieee").to(tl.float16).to(tl.float32)',
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="atomic-dq-of-keys-past-the-end",
        about="keys past the end, of P = 2^(0 - LSE), enter the atomic dQ as infinity times 0",
        source="cuDNN (docs/findings.md)",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        variant="triton-flash-backward-atomic",
        edits=(
            (
                "tl.where(key_begin + BLOCK_N > seqlen_kv, inner_first, inner_last)",
                "inner_last",
            ),
        ),
        common="hq=2,hkv=2,sq=64,skv=56,d=64,dtype=float16",
    ),
    Fault(
        name="prescaled-dq-not-scaled-back",
        about="dQ of the K that was scaled beforehand is not divided by log2 e",
        source="triton tutorial 06",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        variant="triton-flash-backward-prescaled",
        edits=(
            (
                "        factor = 1.0\n        dq_factor = LN_2\n\n    dq_tile",
                "        factor = 1.0\n        dq_factor = 1.0\n\n    dq_tile",
            ),
        ),
        common=f"{SQUARE},scale=0.0",
    ),
)
