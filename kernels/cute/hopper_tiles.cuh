// Tiles of the Hopper forward: their layouts in shared memory, the products of two warpgroups, and
// what a thread's registers hold.
//
// A build's ELEMENT is half_t or bfloat16_t, and its HEAD_DIM 64, 128 or 256.
#pragma once

#include "hopper_parts.cuh"

namespace tiles {

using namespace cute;
using namespace parts;

constexpr bool kHalf = is_same_v<Element, half_t>;
constexpr ptx::Format kFormat = kHalf ? ptx::Format::float16 : ptx::Format::bfloat16;

static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM <= 256 && BLOCK_N <= 256);

// A tile lies in pieces of 64 columns, one behind the other: a row of a piece is 128 bytes, and
// chunk c (16 bytes) of row r lies at place c ^ (r % 8).  The copy engine writes a box of 64
// columns so (CU_TENSOR_MAP_SWIZZLE_128B), and wgmma reads it so (layout type B128).
constexpr int kPiece = 64;
constexpr int kPieces = HEAD_DIM / kPiece;
using Rows = GMMA::Layout_K_SW128_Atom<Element>;
using Columns = GMMA::Layout_MN_SW128_Atom<Element>;
using LayoutQ = decltype(tile_to_shape(Rows{}, Shape<BlockM, HeadDim, QuerySlots>{}));
using LayoutK = decltype(tile_to_shape(Rows{}, Shape<BlockN, HeadDim, Stages>{}));
// The same places as (column, row, stage): V is the right operand, (N, K), of P V.
using LayoutVt = decltype(
    tile_to_shape(Columns{}, Shape<HeadDim, BlockN, Stages>{}, Step<_2, _1, _3>{}));
static_assert(cosize_v<LayoutQ> == QUERY_SLOTS * BLOCK_M * HEAD_DIM);
static_assert(cosize_v<LayoutK> == STAGES * BLOCK_N * HEAD_DIM);
static_assert(cosize_v<LayoutVt> == cosize_v<LayoutK>);

// S = Q K^T of both operands in shared memory; P V of P in registers.
using MmaS = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<BlockM, BlockN, HeadDim>>(),
    Warpgroups{}));
using MmaO = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<BlockM, HeadDim, BlockN>, GMMA::Major::K,
                         GMMA::Major::MN>(),
    Warpgroups{}));
static_assert(size(MmaS{}) == kConsumers * kGroup && size(MmaO{}) == kConsumers * kGroup);

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

}  // namespace tiles
