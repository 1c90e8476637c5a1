// Tiles of the Hopper forward: their layouts in shared memory, the products of two warpgroups, what
// a thread's registers hold, and which keys a tile of rows sees.
//
// A build defines ELEMENT (half_t or bfloat16_t), HEAD_DIM (64, 128 or 256), BLOCK_M, BLOCK_N and
// STAGES.
#pragma once

#include "tuple_types.cuh"

#include <cuda/std/limits>
#include <cute/tensor.hpp>

#include "arguments.cuh"
#include "ptx.cuh"

namespace tiles {

using namespace cute;

using Element = ELEMENT;
using HeadDim = Int<HEAD_DIM>;
using BlockM = Int<BLOCK_M>;
using BlockN = Int<BLOCK_N>;
using Stages = Int<STAGES>;
constexpr bool kHalf = is_same_v<Element, half_t>;
constexpr ptx::Format kFormat = kHalf ? ptx::Format::float16 : ptx::Format::bfloat16;

constexpr int kGroup = 128;    // threads of a warpgroup
constexpr int kConsumers = 2;  // warpgroups, 64 rows each
constexpr int kThreads = (1 + kConsumers) * kGroup;
static_assert(BLOCK_M == 64 * kConsumers);
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM <= 256 && BLOCK_N <= 256);

// A tile lies in pieces of 64 columns, one behind the other: a row of a piece is 128 bytes, and
// chunk c (16 bytes) of row r lies at place c ^ (r % 8).  The copy engine writes a box of 64
// columns so (CU_TENSOR_MAP_SWIZZLE_128B), and wgmma reads it so (layout type B128).
constexpr int kPiece = 64;
constexpr int kPieces = HEAD_DIM / kPiece;
using Rows = GMMA::Layout_K_SW128_Atom<Element>;
using Columns = GMMA::Layout_MN_SW128_Atom<Element>;
using LayoutQ = decltype(tile_to_shape(Rows{}, Shape<BlockM, HeadDim>{}));
using LayoutK = decltype(tile_to_shape(Rows{}, Shape<BlockN, HeadDim, Stages>{}));
// The same places as (column, row, stage): V is the right operand, (N, K), of P V.
using LayoutVt = decltype(
    tile_to_shape(Columns{}, Shape<HeadDim, BlockN, Stages>{}, Step<_2, _1, _3>{}));
static_assert(cosize_v<LayoutQ> == BLOCK_M * HEAD_DIM);
static_assert(cosize_v<LayoutK> == STAGES * BLOCK_N * HEAD_DIM);
static_assert(cosize_v<LayoutVt> == cosize_v<LayoutK>);

// S = Q K^T of both operands in shared memory; P V of P in registers.
using Warpgroups = Layout<Shape<Int<kConsumers>, _1, _1>>;
using MmaS = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<BlockM, BlockN, HeadDim>>(),
    Warpgroups{}));
using MmaO = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<BlockM, HeadDim, BlockN>, GMMA::Major::K,
                         GMMA::Major::MN>(),
    Warpgroups{}));
static_assert(size(MmaS{}) == kConsumers * kGroup && size(MmaO{}) == kConsumers * kGroup);

// An accumulator, ((pair, row, columns), M, N), as (all of a lane's rows, all of its columns).
template <class Accumulator>
CUTE_HOST_DEVICE auto by_row(Accumulator&& accumulator) {
  auto layout = accumulator.layout();
  auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  auto columns = make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout));
  return make_tensor(accumulator.data(), make_layout(rows, columns));
}

// An accumulator of S rounded to Element: register for register the left operand of P V, since the
// 16 columns of a k-step are two neighbouring groups of 8 columns of the accumulator.
template <class Accumulator, class Operand>
CUTE_DEVICE void to_left_operand(Accumulator const& accumulator, Operand& operand) {
  static_assert(size(Operand{}) == size(Accumulator{}));
  Tensor pairs = recast<uint32_t>(operand);
  CUTE_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    pairs(i) = ptx::pack<kFormat>(accumulator(2 * i), accumulator(2 * i + 1));
  }
}

// The keys [low, high) of a row, or of the rows of a tile; none if high <= low.
struct Keys {
  int low, high;
};

// The tables' or the diagonals' keys of a row; rows past the end see what the last one does.
CUTE_HOST_DEVICE Keys seen_by(ArgumentsOf<Element> const& a, int batch, int row) {
  row = min(row, a.seqlen_q - 1);
  int64_t low = int64_t(row) + a.diagonal_low;
  int64_t high = int64_t(row) + a.diagonal_high + 1;
  if (a.row_low != nullptr) {
    int64_t place = int64_t(batch) * a.seqlen_q + row;
    low = a.row_low[place];
    high = a.row_high[place];
  }
  low = max(int64_t(0), min(int64_t(a.seqlen_kv), low));
  high = max(int64_t(0), min(int64_t(a.seqlen_kv), high));
  return {int(low), int(high)};
}

// What the rows of a tile see: `some` row sees a key outside of which none does, and every row sees
// all keys of `every`.
struct Walk {
  Keys some, every;

  CUTE_HOST_DEVICE int first_block() const { return some.low / BLOCK_N; }
  CUTE_HOST_DEVICE int blocks() const {
    return some.low < some.high ? (some.high + BLOCK_N - 1) / BLOCK_N - first_block() : 0;
  }
  // Whether a block, which begins at `key`, needs a comparison.
  CUTE_HOST_DEVICE bool masked(int key) const {
    return key < every.low || key + BLOCK_N > every.high;
  }
  // Whether no row sees some key of it: its value may be NaN, which 0 in P would not hide.
  CUTE_HOST_DEVICE bool hides(int key) const {
    return key < some.low || key + BLOCK_N > some.high;
  }
};

// Of no rows yet.
CUTE_HOST_DEVICE Walk no_rows() {
  constexpr int kMost = cuda::std::numeric_limits<int>::max();
  return {{kMost, 0}, {0, kMost}};
}

// Of one more row.
CUTE_HOST_DEVICE Walk with_row(Walk const& walk, Keys const& keys) {
  bool empty = keys.high <= keys.low;
  return {{empty ? walk.some.low : min(walk.some.low, keys.low),
           empty ? walk.some.high : max(walk.some.high, keys.high)},
          {max(walk.every.low, keys.low), empty ? 0 : min(walk.every.high, keys.high)}};
}

// The walk of a tile of rows, the same in every thread.  Each warp finds it on its own: its lanes
// take the rows in turn.
CUTE_DEVICE Walk walk_of(ArgumentsOf<Element> const& a, int batch, int first_row) {
  Walk walk = no_rows();
  for (int i = int(threadIdx.x) % 32; i < BLOCK_M; i += 32) {
    walk = with_row(walk, seen_by(a, batch, first_row + i));
  }
  constexpr unsigned kWarp = 0xffffffff;
  return {{__reduce_min_sync(kWarp, walk.some.low), __reduce_max_sync(kWarp, walk.some.high)},
          {__reduce_max_sync(kWarp, walk.every.low), __reduce_min_sync(kWarp, walk.every.high)}};
}

}  // namespace tiles
