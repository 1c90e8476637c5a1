"""What forwards that load whole tiles share on the device: the running softmax of a tile of rows.

They differ in how a tile is loaded and stored, and in nothing between (Dao, arXiv 2307.08691,
algorithm 1; the roundings are those of `flash_forward`):

    m'    = max(m, max x)
    p     = 2^(x - m'),  alpha = 2^(m - m')
    l     = alpha l + sum p                     p in fp32, before it is rounded
    acc   = alpha acc + round(p) v              p rounded to v's dtype, sums in fp32
    O     = acc / l,  LSE = m + log2 l          in base 2
"""

import triton
import triton.language as tl


@triton.jit
def started(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """m, l and acc of rows that have seen no key: (rows,), (rows,) and (rows, dims), fp32."""
    return (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
    )


@triton.jit
def masked(x, key, low, high):
    """The scores (rows, keys), -inf at keys outside the interval [low, high) of their row."""
    return tl.where(
        (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), x, float("-inf")
    )


@triton.jit
def weighed(x, m, l):  # noqa: E741 - the paper's names
    """m and l after a block of keys, from its scores x (rows, keys), in base 2 and in fp32; p, and
    alpha, which rescales what has been added up of V."""
    m_new = tl.maximum(m, tl.max(x, 1))
    # While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(x - shift[:, None])
    alpha = tl.exp2(m - shift)
    return m_new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def stepped(x, v_tile, m, l, acc):  # noqa: E741
    """m, l and acc after a block of keys, from its scores and its tile of V (keys, dims)."""
    m, l, p, alpha = weighed(x, m, l)  # noqa: E741
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return m, l, acc


@triton.jit
def finished(m, l, acc):  # noqa: E741
    """O (rows, dims) and the LSE in base 2 (rows,), fp32.

    An empty row has l = 0, acc = 0 and m = -inf, so O = 0 and LSE = -inf.
    """
    denominator = tl.where(l == 0.0, 1.0, l)
    return acc / denominator[:, None], m + tl.log2(denominator)
