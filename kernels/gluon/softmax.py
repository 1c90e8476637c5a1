"""The softmax of one block of keys: device code in Gluon.

Scores are in base 2 and an unseen key's is -inf.  The kernels hold the running softmax themselves
(Dao, arXiv 2307.08691, algorithm 1):

    m'  = max(m, max x),  alpha = 2^(m - m'),  p = 2^(x - m')
    l   = alpha l + sum p,  acc = alpha acc + round(p) v

`scores` and `lifted` round x = S scale first.  `signed_scale`, `signed_scores` and `lifted_signed`
leave S unscaled, for p = 2^fma(S, scale, -m'): one rounding, and one instruction for each score.
Since the scale may be negative or 0, S takes its sign.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.ring import nth_block
from kernels.triton.tiles import blocks_of


@gluon.jit
def masked(
    x,
    walk,
    t,
    low,
    high,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
    EVEN_FIRST: gl.constexpr = False,
):
    """The t-th block with -inf where a row does not see a key: at the edges.

    EVEN_FIRST: the even keys of the block are the first half of its columns.
    """
    if t >= blocks_of(walk, 0):
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        if EVEN_FIRST:
            column = column % (BLOCK_N // 2) * 2 + column // (BLOCK_N // 2)
        key = nth_block(walk, t) * BLOCK_N + column
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        x = gl.where(seen, x, float("-inf"))
    return x


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
    """S of the t-th block in base 2, masked."""
    return masked(s * scale_log2, walk, t, low, high, BLOCK_N, LAYOUT)


@gluon.jit
def raised(m, m_new):
    """What exponents subtract where a maximum was m, and what shrinks O and the sum."""
    # While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is NaN.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return shift, gl.exp2(m - shift)


@gluon.jit
def lifted(x, m):
    """The maximum with one more block, what exponents subtract, and what shrinks O and the sum."""
    m_new = gl.maximum(m, gl.max(x, 1))
    shift, alpha = raised(m, m_new)
    return m_new, shift, alpha


@gluon.jit
def signed_scale(scale_log2):
    """The scale's sign and its size: 0 and 1 of a scale of 0, which so leaves no -inf * 0."""
    sign = gl.where(scale_log2 > 0.0, 1.0, gl.where(scale_log2 < 0.0, -1.0, scale_log2))
    return sign, gl.where(scale_log2 == 0.0, 1.0, gl.abs(scale_log2))


@gluon.jit
def signed_scores(  # noqa: PLR0917
    s,
    sign,
    walk,
    t,
    low,
    high,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
    EVEN_FIRST: gl.constexpr = False,
):
    """S of the t-th block times the scale's sign, masked."""
    if sign != 1.0:
        s = s * sign
    return masked(s, walk, t, low, high, BLOCK_N, LAYOUT, EVEN_FIRST)


@gluon.jit
def lifted_signed(s, top, m, size):
    """The maximum of signed scores with one more block, and `raised` of that of scores."""
    top_new = gl.maximum(top, gl.max(s, 1))
    m_new = top_new * size
    shift, alpha = raised(m, m_new)
    return top_new, m_new, shift, alpha
