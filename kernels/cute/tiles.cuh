// Tiles of shared memory and operands of SM80_16x8x16 atoms: what kernels of four warps share.
//
// A build defines ELEMENT (half_t or bfloat16_t).
#pragma once

#include "tuple_types.cuh"

#include <cute/tensor.hpp>

#include "ptx.cuh"

namespace tiles {

using namespace cute;

using Element = ELEMENT;
constexpr int kThreads = 128;
constexpr bool kHalf = is_same_v<Element, half_t>;
constexpr ptx::Format kFormat = kHalf ? ptx::Format::float16 : ptx::Format::bfloat16;

// A warp multiplies 16 x 16 by 16 x 8.  Two atoms side by side make the 16 columns whose four
// 8 x 8 matrices one ldmatrix brings.
using MmaAtom =
    conditional_t<kHalf, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
// Four warps along the rows, or two along the rows and two along the columns.
using Mma = TiledMMA<MMA_Atom<MmaAtom>, Layout<Shape<_4, _1, _1>>, Tile<_64, _16, _16>>;
using SquareMma = TiledMMA<MMA_Atom<MmaAtom>, Layout<Shape<_2, _2, _1>>, Tile<_32, _32, _16>>;

using LoadRows = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
using LoadColumns = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
using StorePairs = Copy_Atom<UniversalCopy<uint32_t>, Element>;

// Rows lie in pieces of 64 elements, all 32 banks, or of 32 where 64 does not divide them.  Chunk c
// (16 bytes) of row r lies at place c ^ (r % 8), or c ^ (r / 2 % 4), so that the eight rows of an
// 8 x 8 matrix, chunks of one c, lie in different banks.
template <int columns>
constexpr int piece = columns % 64 == 0 ? 64 : 32;
template <int columns>
using SwizzledRows = decltype(composition(
    Swizzle<piece<columns> == 64 ? 3 : 2, 3, 3>{},
    Layout<Shape<_8, Int<piece<columns>>>, Stride<Int<piece<columns>>, _1>>{}));

// (rows, columns) or (rows, columns, stages).
template <int rows, int columns, int... stages>
using TileLayout = decltype(
    tile_to_shape(SwizzledRows<columns>{}, Shape<Int<rows>, Int<columns>, Int<stages>...>{}));

// The same places as (column, row), or (column, row, stage).
template <int rows, int columns, int... stages>
using TransposedLayout = decltype(composition(
    TileLayout<rows, columns, stages...>{},
    Layout<Shape<Int<columns>, Int<rows>, Int<stages>...>,
           Stride<Int<rows>, _1, Int<0 * stages + rows * columns>...>>{}));

// Neighbouring threads copy a piece of a row, 16 bytes each.
template <class Operation, int columns>
using RowCopy = decltype(make_tiled_copy(
    Copy_Atom<Operation, Element>{},
    Layout<Shape<Int<kThreads * 8 / piece<columns>>, Int<piece<columns> / 8>>,
           Stride<Int<piece<columns> / 8>, _1>>{},
    Layout<Shape<_1, _8>>{}));

// Begin to copy the rows first, first + 1... of a head into a tile of shared memory; rows from
// `end` on become zeros and are not read: the address is then that of row 0, which exists.
template <class Tile>
CUTE_DEVICE void copy_in(Element const* head, int64_t stride, int first, int end, Tile&& tile) {
  using Copy = RowCopy<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, decltype(size<1>(tile))::value>;
  auto slice = Copy{}.get_slice(threadIdx.x);
  Tensor to = slice.partition_D(tile);  // (chunk, rows, columns)
  // The same of (row, column).
  Tensor place = slice.partition_S(make_identity_tensor(product_each(shape(tile))));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(to); ++m) {
    int row = first + get<0>(place(_0{}, m, _0{}));
    bool inside = row < end;
    Element const* start = head + (inside ? row : 0) * stride;
    CUTE_UNROLL
    for (int n = 0; n < size<2>(to); ++n) {
      Element const* chunk = start + get<1>(place(_0{}, m, n));
      Tensor from = make_tensor(make_gmem_ptr(chunk), Layout<_8>{});
      copy(Copy{}.with(inside), from, to(_, m, n));
    }
  }
}

// Write a tile of shared memory to the rows first... end - 1 of a head.
template <class Tile>
CUTE_DEVICE void copy_out(Tile const& tile, Element* head, int64_t stride, int first, int end) {
  using Copy = RowCopy<UniversalCopy<uint128_t>, decltype(size<1>(tile))::value>;
  auto slice = Copy{}.get_slice(threadIdx.x);
  Tensor from = slice.partition_S(tile);
  Tensor place = slice.partition_D(make_identity_tensor(product_each(shape(tile))));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(from); ++m) {
    int row = first + get<0>(place(_0{}, m, _0{}));
    if (row < end) {
      CUTE_UNROLL
      for (int n = 0; n < size<2>(from); ++n) {
        Element* chunk = head + row * stride + get<1>(place(_0{}, m, n));
        copy(Copy{}, from(_, m, n), make_tensor(make_gmem_ptr(chunk), Layout<_8>{}));
      }
    }
  }
}

// C += A B over all k-steps; `load` brings the fragments of one step, each while the step before it
// is multiplied.
template <class Multiplied = Mma, class Load, class A, class B, class C>
CUTE_DEVICE void multiply(Load const& load, A const& a, B const& b, C& c) {
  load(0);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    if (k + 1 < size<2>(a)) {
      load(k + 1);
    }
    gemm(Multiplied{}, a(_, _, k), b(_, _, k), c);
  }
}

// An accumulator, ((column, row), M, N), as (all of a lane's rows, all of its columns).
template <class Accumulator>
CUTE_DEVICE auto by_row(Accumulator&& accumulator) {
  auto layout = accumulator.layout();
  auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  auto columns = make_layout(get<0, 0>(layout), get<2>(layout));
  return make_tensor(accumulator.data(), make_layout(rows, columns));
}

// An accumulator rounded to Element, two neighbouring columns to a register.
template <class Accumulator>
CUTE_DEVICE auto rounded(Accumulator const& accumulator) {
  Tensor result = make_tensor_like<Element>(accumulator);
  Tensor pairs = recast<uint32_t>(result);
  CUTE_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    pairs(i) = ptx::pack<kFormat>(accumulator(2 * i), accumulator(2 * i + 1));
  }
  return result;
}

// An accumulator of (M, N) as the left operand of (M, K): the 16 columns of a k-step are two
// accumulators side by side.
template <class Accumulator, class Operand>
CUTE_DEVICE void to_left_operand(Accumulator const& accumulator, Operand& operand) {
  CUTE_UNROLL
  for (int k = 0; k < size<2>(operand); ++k) {
    CUTE_UNROLL
    for (int m = 0; m < size<1>(operand); ++m) {
      CUTE_UNROLL
      for (int i = 0; i < size<0>(operand); ++i) {
        operand(i, m, k) = accumulator(i % 4, m, 2 * k + i / 4);
      }
    }
  }
}

}  // namespace tiles
