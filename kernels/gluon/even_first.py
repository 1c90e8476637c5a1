"""Tiles of K whose even rows come first: so P of 8 bits needs no exchange between lanes.  Device
code in Gluon.

Of 8 columns of S, lane t of 4 has 2 t and 2 t + 1.  Of 16 columns of the left operand of 8 bits it
must give wgmma 4 t to 4 t + 3.  If column h N / 2 + r of S belongs to key 2 r + h of the block's N,
then columns 8 j + 2 t + e of both halves h are keys 16 j + 4 t + 2 e + h: those four.

The copy engine makes this order for nothing: K is a tensor of five dimensions, whose third says
whether a row is odd (`kernels.gluon.host.descriptor_even_first`).  It takes an even number of rows;
of an odd one, tiles have the order of keys, and lanes exchange P.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.ring import fetch, fetch_box

# Four fp32 to 8 bits each, to nearest, in one register.
_FOUR = """{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{kind}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{kind}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
}}"""
FOUR_E4M3 = gl.constexpr(_FOUR.format(kind="e4m3"))
FOUR_E5M2 = gl.constexpr(_FOUR.format(kind="e5m2"))


@gluon.jit
def fetch_keys(tensor, batch, head, row, barrier, tile, pred, EVEN_FIRST: gl.constexpr):
    """`kernels.gluon.ring.fetch` of a tile of K, in either order."""
    if EVEN_FIRST:
        fetch_box(tensor, batch, head, (0, row // 2, 0), barrier, tile, pred)
    else:
        fetch(tensor, batch, head, row, barrier, tile, pred)


@gluon.jit
def in_order(p):
    """Columns in the order of keys."""
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    return p.reshape((rows, 2, keys // 2)).permute((0, 2, 1)).reshape((rows, keys))


@gluon.jit
def left_operand(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, EVEN_FIRST: gl.constexpr):
    """P in 8 bits, laid out for wgmma, its columns in the order of keys."""
    if EVEN_FIRST:
        # Triton casts two elements at a time, and would put the pairs together byte by byte.
        four = gl.convert_layout(in_order(p), LAYOUT)
        if gl.float8e4nv == DTYPE:
            tile = gl.inline_asm_elementwise(
                FOUR_E4M3, "=r,r,r,r,r", [four], gl.float8e4nv, is_pure=True, pack=4
            )
        else:
            tile = gl.inline_asm_elementwise(
                FOUR_E5M2, "=r,r,r,r,r", [four], gl.float8e5, is_pure=True, pack=4
            )
    else:
        tile = gl.convert_layout(p.to(DTYPE), LAYOUT)
    return tile
