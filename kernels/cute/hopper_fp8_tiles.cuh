// Tiles of the Hopper forward of 8-bit elements: their layouts in shared memory, the products of
// two warpgroups, V's transposition, and the left operand that P becomes.
//
// A build's ELEMENT is float_e4m3_t, its HEAD_DIM 64, 128 or 256, and its BLOCK_N 64 or 128.  It
// also defines PROMOTED: whether P V is added in fp32 after every block of keys.
#pragma once

#include "hopper_parts.cuh"
#include "softmax.cuh"

namespace tiles {

using namespace cute;
using namespace parts;

constexpr ptx::Format kFormat = ptx::Format::float8_e4m3fn;
static_assert(is_same_v<Element, float_e4m3_t>);

static_assert(HEAD_DIM == 64 || HEAD_DIM % 128 == 0 && HEAD_DIM <= 256);
static_assert(BLOCK_N == 64 || BLOCK_N == 128);

// A tile lies in pieces of 128 columns, or of 64 at head dim 64, one behind the other.  In rows of
// 128 bytes chunk c (16 bytes) of row r lies at place c ^ (r % 8), in rows of 64 bytes at
// c ^ (r / 2 % 4), so that eight rows of a chunk lie in different banks.  The copy engine writes a
// box so (CU_TENSOR_MAP_SWIZZLE_128B, _64B), and wgmma reads it so (layout types B128, B64).
constexpr int kPiece = HEAD_DIM < 128 ? HEAD_DIM : 128;
constexpr int kPieces = HEAD_DIM / kPiece;
template <int bytes>
using Rows = conditional_t<bytes % 128 == 0, GMMA::Layout_K_SW128_Atom<Element>,
                           GMMA::Layout_K_SW64_Atom<Element>>;
using LayoutQ = decltype(tile_to_shape(Rows<HEAD_DIM>{}, Shape<BlockM, HeadDim>{}));
// K, and V as it comes.
using LayoutK = decltype(tile_to_shape(Rows<HEAD_DIM>{}, Shape<BlockN, HeadDim, Stages>{}));
// V transposed, (column, key, stage): wgmma reads 8-bit operands along the sum alone.
using LayoutVt = decltype(tile_to_shape(Rows<BLOCK_N>{}, Shape<HeadDim, BlockN, Stages>{}));
static_assert(cosize_v<LayoutQ> == BLOCK_M * HEAD_DIM);
static_assert(cosize_v<LayoutK> == STAGES * BLOCK_N * HEAD_DIM);
static_assert(cosize_v<LayoutVt> == cosize_v<LayoutK>);

// S = Q K^T of both operands in shared memory; P V of P in registers, of `Part` columns at once:
// the sums of a block lie beside O, and at head dim 256 there are registers for half of them.
using Part = Int<(PROMOTED && HEAD_DIM > 128) ? 128 : HEAD_DIM>;
using MmaS = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<BlockM, BlockN, HeadDim>>(),
    Warpgroups{}));
using MmaO = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<BlockM, Part, BlockN>>(), Warpgroups{}));
static_assert(size(MmaS{}) == kConsumers * kGroup && size(MmaO{}) == kConsumers * kGroup);

// P is so many times as large, and so is its sum: e4m3 then keeps it from 1 down to 2^-17.
constexpr float kScaleP = 256.0f;
constexpr float kLog2ScaleP = 8.0f;

// One block of masked scores x, of which a scaled one is `factor` times as large, becomes p; the
// maxima of x, the sums and o follow.  A row lies in four neighbouring lanes.
//
// 256 p = 2^(factor x - (factor m - 8)) has one rounding before the exponential, and costs no
// multiplication beside it.
template <class X, class O, class Statistic>
CUTE_DEVICE void weigh(X& x, O& o, float factor, Statistic& row_max, Statistic& row_sum) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(x); ++r) {
    float largest = softmax::largest_of(x, r, row_max(r));
    // While a row has seen no key, the maximum is -inf: subtract 0 instead, since -inf - -inf is
    // NaN.
    float most = largest == -softmax::kInfinity ? 0.0f : largest;
    float shift = __fsub_rn(__fmul_rn(factor, most), kLog2ScaleP);
    float alpha = ptx::ex2(__fmul_rn(factor, __fsub_rn(row_max(r), most)));
    float sum = 0.0f;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(x); ++c) {
      x(r, c) = ptx::ex2(__fmaf_rn(factor, x(r, c), -shift));
      sum += x(r, c);
    }
    CUTE_UNROLL
    for (int c = 0; c < size<1>(o); ++c) {
      o(r, c) *= alpha;
    }
    row_sum(r) = row_sum(r) * alpha + sum;
    row_max(r) = largest;
  }
}

// An accumulator of S as the left operand of P V.  A lane has sums of the keys 8 j + 2 t and
// 8 j + 2 t + 1, and an operand's register has four neighbours of the sum: so of 16 keys the
// operand's place 4 t + 2 i + e holds key 8 i + 2 t + e, and V's keys lie in the same order.
template <class Accumulator, class Operand>
CUTE_DEVICE void to_left_operand(Accumulator const& p, Operand& operand) {
  static_assert(decltype(size(operand))::value == decltype(size(p))::value);
  Tensor registers = recast<uint32_t>(operand);
  CUTE_UNROLL
  for (int i = 0; i < size(registers); ++i) {
    int row = i % 2;
    int first = 8 * (i / 2) + 2 * row;  // of four accumulators for 8 keys, two are of this row
    registers(i) = ptx::pack<kFormat>(p(first), p(first + 1), p(first + 4), p(first + 5));
  }
}

// V is transposed 32 keys x 16 columns at a time.  A lane loads four transposed matrices of pairs
// of columns: register i has keys 8 i + 2 t and 8 i + 2 t + 1, columns 2 g and 2 g + 1.  Of
// registers 0 and 1, and of 2 and 3, it takes the even bytes and the odd ones.  A word is then four
// places of the sum, in the order of P, of one column; matrices of eight even and of eight odd
// columns are stored as rows.  So rows of V transposed are the even columns of each 16, then the odd
// ones.
CUTE_DEVICE void store_transposed(uint32_t const (&pairs)[4], uint32_t to) {
  uint32_t const words[4] = {
      ptx::prmt(pairs[0], pairs[1], 0x6420),
      ptx::prmt(pairs[0], pairs[1], 0x7531),
      ptx::prmt(pairs[2], pairs[3], 0x6420),
      ptx::prmt(pairs[2], pairs[3], 0x7531),
  };
  ptx::stmatrix_x4(to, words);
}

// Where chunk `chunk` of row `row` lies in rows of so many bytes, as above: what the layouts say,
// in 32 bits.
template <uint32_t bytes>
CUTE_DEVICE uint32_t place_of(uint32_t row, uint32_t chunk) {
  return row * bytes + (chunk ^ (bytes == 128 ? row % 8 : row / 2 % 4)) * 16;
}

// The address that a lane names of 32 `key`s x 16 columns, those of chunk `chunk`: of a row of V,
// and of a row of V transposed.
CUTE_DEVICE uint32_t source_of(uint32_t tile, uint32_t key, uint32_t chunk) {
  constexpr uint32_t kChunks = kPiece / 16;
  return tile + chunk / kChunks * BLOCK_N * kPiece +
         place_of<kPiece>(32 * key + threadIdx.x % 32, chunk % kChunks);
}
CUTE_DEVICE uint32_t target_of(uint32_t tile, uint32_t key, uint32_t chunk) {
  uint32_t lane = threadIdx.x % 32;
  return tile + place_of<BLOCK_N>(16 * chunk + lane % 16, 2 * key + lane / 16);
}

// Transpose one tile with `warps` warps; lanes of warp `warp` call.  from, to: addresses of tiles.
template <int warps>
CUTE_DEVICE void transpose(uint32_t from, uint32_t to, int warp) {
  constexpr int kSteps = BLOCK_N / 32;
  CUTE_NO_UNROLL
  for (int chunk = warp; chunk < HEAD_DIM / 16; chunk += warps) {
    uint32_t pairs[kSteps][4];
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      ptx::ldmatrix_x4_trans(pairs[i], source_of(from, i, chunk));
    }
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      store_transposed(pairs[i], target_of(to, i, chunk));
    }
  }
}

// The same, and keys outside of `seen` become zero: what lies there, NaN included, cannot enter P V
// as 0 * NaN.  Only the ends of a walk need it.
template <int warps>
CUTE_DEVICE void transpose(uint32_t from, uint32_t to, int warp, Interval seen) {
  int thread = int(threadIdx.x) % 4;
  CUTE_NO_UNROLL
  for (int i = warp; i < HEAD_DIM / 16 * (BLOCK_N / 32); i += warps) {
    int chunk = i % (HEAD_DIM / 16);
    int step = i / (HEAD_DIM / 16);
    uint32_t pairs[4];
    ptx::ldmatrix_x4_trans(pairs, source_of(from, step, chunk));
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      int own = 32 * step + 8 * j + 2 * thread;
      uint32_t kept = own >= seen.low && own < seen.high ? 0xffff : 0;
      kept |= own + 1 >= seen.low && own + 1 < seen.high ? 0xffff0000 : 0;
      pairs[j] &= kept;
    }
    store_transposed(pairs, target_of(to, step, chunk));
  }
}

}  // namespace tiles
