"""The softmax of one block of keys: device code in Gluon.

Scores are in base 2 and an unseen key's is -inf.  The kernels hold the running softmax themselves
(Dao, arXiv 2307.08691, algorithm 1):

    m'  = max(m, max x),  alpha = 2^(m - m'),  p = 2^(x - m')
    l   = alpha l + sum p,  acc = alpha acc + round(p) v
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.ring import nth_block
from kernels.triton.tiles import blocks_of


@gluon.jit
def scores(
    s,
    scale_log2,
    walk,
    t,
    low,
    high,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """S of the t-th block in base 2, with -inf where a row does not see a key: at the edges."""
    x = s * scale_log2
    if t >= blocks_of(walk, 0):
        key = nth_block(walk, t) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        x = gl.where(seen, x, float("-inf"))
    return x


@gluon.jit
def lifted(x, m):
    """The maximum with one more block, what exponents subtract, and what shrinks O and the sum."""
    m_new = gl.maximum(m, gl.max(x, 1))
    # While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is NaN.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, shift, gl.exp2(m - shift)
