// FlashAttention-2 forward with log-sum-exp in CuTe; flash_forward.py tells the algorithm, the atoms and the layouts.
//
// A build defines ELEMENT (half_t or bfloat16_t), HEAD_DIM (64 or 128), BLOCK_M (64 or 128) and BLOCK_N (32 or 64).
#include "tuple_types.cuh"

#include <cuda/std/limits>
#include <cute/tensor.hpp>

#include "arguments.cuh"
#include "ptx.cuh"

using namespace cute;

using Element = ELEMENT;
using HeadDim = Int<HEAD_DIM>;
using BlockM = Int<BLOCK_M>;
using BlockN = Int<BLOCK_N>;
using Stages = _2;
constexpr int kThreads = 128;
constexpr float kInfinity = cuda::std::numeric_limits<float>::infinity();
constexpr ptx::Format kFormat = is_same_v<Element, half_t> ? ptx::Format::float16 : ptx::Format::bfloat16;

// A warp multiplies 16 x 16 by 16 x 8; four warps lie along the rows.  Two atoms side by side make the 16 columns whose four
// 8 x 8 matrices one ldmatrix brings.
using MmaAtom = conditional_t<is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
using Mma = TiledMMA<MMA_Atom<MmaAtom>, Layout<Shape<_4, _1, _1>>, Tile<_64, _16, _16>>;

// Rows of 64 elements are 128 bytes, all 32 banks.  Chunk c (16 bytes) of row r lies at place c ^ (r % 8), so that the eight
// rows of an 8 x 8 matrix, chunks of one c, lie in different banks.
using SwizzledRows = decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
using LayoutQ = decltype(tile_to_shape(SwizzledRows{}, Shape<BlockM, HeadDim>{}));
using LayoutKV = decltype(tile_to_shape(SwizzledRows{}, Shape<BlockN, HeadDim, Stages>{}));
// The same places as (dim, key, stage): V is the right operand, (N, K), of P V.
using LayoutVt = decltype(composition(
    LayoutKV{}, make_layout(Shape<HeadDim, BlockN, Stages>{}, Stride<BlockN, _1, Int<BLOCK_N * HEAD_DIM>>{})));

struct Shared {
  alignas(128) Element q[cosize_v<LayoutQ>];  // O at the end
  alignas(128) Element k[cosize_v<LayoutKV>];
  alignas(128) Element v[cosize_v<LayoutKV>];
};

// Eight threads copy 64 elements of a row, 16 bytes each; all of them 16 rows.
template <class Operation>
using RowCopy = decltype(make_tiled_copy(
    Copy_Atom<Operation, Element>{}, Layout<Shape<_16, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));
using CopyIn = RowCopy<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>>;
using CopyOut = RowCopy<UniversalCopy<uint128_t>>;
using LoadRows = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
using LoadColumns = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
using StorePairs = Copy_Atom<UniversalCopy<uint32_t>, Element>;

struct Arguments : ArgumentsOf<Element> {
  // How many keys a row sees; one past the end sees what the last one does.
  CUTE_DEVICE int seen_by(int row) const {
    int64_t last = int64_t(min(row, seqlen_q - 1)) + diagonal_high;
    return int(max(int64_t(0), min(int64_t(seqlen_kv), last + 1)));
  }
};

// Begin to copy the rows first, first + 1... of a head into a tile of shared memory; rows from `end` on become zeros and are
// not read: the address is then that of row 0, which exists.
template <class Tile>
CUTE_DEVICE void copy_in(Element const* head, int64_t stride, int first, int end, Tile&& tile) {
  auto slice = CopyIn{}.get_slice(threadIdx.x);
  Tensor to = slice.partition_D(tile);                                                 // (chunk, rows, columns)
  Tensor place = slice.partition_S(make_identity_tensor(product_each(shape(tile))));  // the same of (row, column)
  CUTE_UNROLL
  for (int m = 0; m < size<1>(to); ++m) {
    int row = first + get<0>(place(_0{}, m, _0{}));
    bool inside = row < end;
    Element const* start = head + (inside ? row : 0) * stride;
    CUTE_UNROLL
    for (int n = 0; n < size<2>(to); ++n) {
      Tensor from = make_tensor(make_gmem_ptr(start + get<1>(place(_0{}, m, n))), Layout<_8>{});
      copy(CopyIn{}.with(inside), from, to(_, m, n));
    }
  }
}

// Write a tile of shared memory to the rows first... end - 1 of a head.
template <class Tile>
CUTE_DEVICE void copy_out(Tile const& tile, Element* head, int64_t stride, int first, int end) {
  auto slice = CopyOut{}.get_slice(threadIdx.x);
  Tensor from = slice.partition_S(tile);
  Tensor place = slice.partition_D(make_identity_tensor(product_each(shape(tile))));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(from); ++m) {
    int row = first + get<0>(place(_0{}, m, _0{}));
    if (row < end) {
      CUTE_UNROLL
      for (int n = 0; n < size<2>(from); ++n) {
        Tensor to = make_tensor(make_gmem_ptr(head + row * stride + get<1>(place(_0{}, m, n))), Layout<_8>{});
        copy(CopyOut{}, from(_, m, n), to);
      }
    }
  }
}

// C += A B over all k-steps; `load` brings the fragments of one step, each while the step before it is multiplied.
template <class Load, class A, class B, class C>
CUTE_DEVICE void multiply(Load const& load, A const& a, B const& b, C& c) {
  load(0);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    if (k + 1 < size<2>(a)) {
      load(k + 1);
    }
    gemm(Mma{}, a(_, _, k), b(_, _, k), c);
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

// An accumulator of (M, N) as the left operand of (M, K): the 16 columns of a k-step are two accumulators side by side.
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

// One block of scores x, log2-scaled and masked, becomes p; the statistics and o follow.
template <class X, class O, class Statistic>
CUTE_DEVICE void online_softmax(X& x, O& o, Statistic& row_max, Statistic& row_sum) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(x); ++r) {
    float largest = row_max(r);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(x); ++c) {
      largest = fmaxf(largest, x(r, c));
    }
    // A row lies in four neighbouring lanes.
    largest = fmaxf(largest, ptx::shfl_bfly(largest, 1));
    largest = fmaxf(largest, ptx::shfl_bfly(largest, 2));
    // While a row has seen no key, the maximum is -inf: subtract 0 instead, since -inf - -inf is NaN.
    float shift = largest == -kInfinity ? 0.0f : largest;
    float alpha = ptx::ex2(__fsub_rn(row_max(r), shift));
    float sum = 0.0f;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(x); ++c) {
      x(r, c) = ptx::ex2(__fsub_rn(x(r, c), shift));
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

// The second bound is on registers, by the blocks that a multiprocessor must be able to hold: without it ptxas aims at three
// even for head_dim 128, and spills.
extern "C" __global__ void __launch_bounds__(kThreads, HEAD_DIM == 64 ? 3 : 2) flash_forward(Arguments const a) {
  // One grid axis, so that batch x heads may exceed 65535; the last tile first, since causal rows grow longer.
  int tiles = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  int first_row = (tiles - 1 - int(blockIdx.x) % tiles) * BLOCK_M;
  int head = int(blockIdx.x) / tiles % a.heads_q;
  int batch = int(blockIdx.x) / tiles / a.heads_q;
  Element const* q = a.q.data + batch * a.q.batch + head * a.q.head;
  Element const* k = a.k.data + batch * a.k.batch + head / a.group * a.k.head;
  Element const* v = a.v.data + batch * a.v.batch + head / a.group * a.v.head;

  int end = a.seen_by(first_row + BLOCK_M - 1);  // keys from here on no row of the tile sees: they are not loaded
  int blocks = (end + BLOCK_N - 1) / BLOCK_N;
  int whole = a.seen_by(first_row) / BLOCK_N;  // blocks that every row sees whole come first and need no mask

  extern __shared__ __align__(128) unsigned char shared[];
  static_assert(sizeof(Shared) == (BLOCK_M + 4 * BLOCK_N) * HEAD_DIM * sizeof(Element));
  Shared& tile = *reinterpret_cast<Shared*>(shared);
  Tensor tile_q = make_tensor(make_smem_ptr(tile.q), LayoutQ{});
  Tensor tiles_k = make_tensor(make_smem_ptr(tile.k), LayoutKV{});
  Tensor tiles_v = make_tensor(make_smem_ptr(tile.v), LayoutKV{});
  Tensor tiles_vt = make_tensor(make_smem_ptr(tile.v), LayoutVt{});

  // Operands as mma takes them, (atom, M or N, K), and the same registers as ldmatrix fills them.
  auto rows_a = make_tiled_copy_A(LoadRows{}, Mma{}).get_slice(threadIdx.x);
  auto rows_b = make_tiled_copy_B(LoadRows{}, Mma{}).get_slice(threadIdx.x);
  auto columns_b = make_tiled_copy_B(LoadColumns{}, Mma{}).get_slice(threadIdx.x);
  Tensor operand_q = make_tensor<Element>(partition_shape_A(Mma{}, Shape<BlockM, HeadDim>{}));
  Tensor operand_k = make_tensor<Element>(partition_shape_B(Mma{}, Shape<BlockN, HeadDim>{}));
  Tensor operand_p = make_tensor<Element>(partition_shape_A(Mma{}, Shape<BlockM, BlockN>{}));
  Tensor operand_v = make_tensor<Element>(partition_shape_B(Mma{}, Shape<HeadDim, BlockN>{}));
  Tensor from_q = rows_a.partition_S(tile_q);
  Tensor from_k = rows_b.partition_S(tiles_k);
  Tensor from_v = columns_b.partition_S(tiles_vt);
  Tensor to_q = rows_a.retile_D(operand_q);
  Tensor to_k = rows_b.retile_D(operand_k);
  Tensor to_v = columns_b.retile_D(operand_v);

  Tensor scores = partition_fragment_C(Mma{}, Shape<BlockM, BlockN>{});
  Tensor acc = partition_fragment_C(Mma{}, Shape<BlockM, HeadDim>{});
  Tensor x = by_row(scores);
  Tensor o = by_row(acc);
  Tensor identity = make_identity_tensor(Shape<BlockM, BlockN>{});
  Tensor place = by_row(Mma{}.get_slice(threadIdx.x).partition_C(identity));  // (row, key) of each x
  auto rows = size<0>(x);
  Tensor row_max = make_tensor<float>(Layout<decltype(rows)>{});
  Tensor row_sum = make_tensor<float>(Layout<decltype(rows)>{});  // of this lane's columns only, until the end
  Tensor seen = make_tensor<int>(Layout<decltype(rows)>{});
  CUTE_UNROLL
  for (int r = 0; r < rows; ++r) {
    seen(r) = a.seen_by(first_row + get<0>(place(r, 0)));
  }
  fill(row_max, -kInfinity);
  clear(row_sum);
  clear(acc);

  // Every call makes one group of copies, empty if there is no such block, so that waits may count groups.
  auto copy_k = [&](int block) {
    if (block < blocks) {
      copy_in(k, a.k.row, block * BLOCK_N, end, tiles_k(_, _, block % 2));
    }
    cp_async_fence();
  };
  auto copy_v = [&](int block) {
    if (block < blocks) {
      copy_in(v, a.v.row, block * BLOCK_N, end, tiles_v(_, _, block % 2));
    }
    cp_async_fence();
  };

  copy_in(q, a.q.row, first_row, a.seqlen_q, tile_q);
  copy_k(0);
  copy_v(0);
  for (int block = 0; block < blocks; ++block) {
    cp_async_wait<1>();
    __syncthreads();  // K (and Q) has come from all threads, and all warps are done with the block before: its stage is free
    copy_k(block + 1);
    clear(scores);
    auto load_qk = [&](int step) {
      copy(LoadRows{}, from_q(_, _, step), to_q(_, _, step));
      copy(LoadRows{}, from_k(_, _, step, block % 2), to_k(_, _, step));
    };
    multiply(load_qk, operand_q, operand_k, scores);

    // One rounded product per score, and no fused multiply-add after it: x - m must be exactly 0 at the maximum.
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      scores(i) = __fmul_rn(a.scale_log2, scores(i));
    }
    if (block >= whole) {
      CUTE_UNROLL
      for (int i = 0; i < size(x); ++i) {
        if (block * BLOCK_N + get<1>(place(i)) >= seen(i % rows)) {
          x(i) = -kInfinity;
        }
      }
    }
    online_softmax(x, o, row_max, row_sum);
    to_left_operand(rounded(scores), operand_p);

    cp_async_wait<1>();
    __syncthreads();  // V has come from all threads
    copy_v(block + 1);
    auto load_v = [&](int step) { copy(LoadColumns{}, from_v(_, _, step, block % 2), to_v(_, _, step)); };
    multiply(load_v, operand_p, operand_v, acc);
  }

  CUTE_UNROLL
  for (int r = 0; r < rows; ++r) {
    float sum = row_sum(r) + ptx::shfl_bfly(row_sum(r), 1);
    sum += ptx::shfl_bfly(sum, 2);
    // An empty row has sum 0, o 0 and maximum -inf, so O = 0 and LSE = -inf.
    float denominator = sum == 0.0f ? 1.0f : sum;
    float inverse = 1.0f / denominator;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(o); ++c) {
      o(r, c) *= inverse;
    }
    int row = first_row + get<0>(place(r, 0));
    if (get<1>(place(r, 0)) == 0 && row < a.seqlen_q) {
      a.lse[(int64_t(batch) * a.heads_q + head) * a.seqlen_q + row] = 0.69314718f * (row_max(r) + log2f(denominator));
    }
  }

  // O goes through the memory of Q, to leave it as whole rows.
  cp_async_wait<0>();
  __syncthreads();  // no copy is on its way there, and no warp reads there, any more
  auto pairs = make_tiled_copy_C(StorePairs{}, Mma{}).get_slice(threadIdx.x);
  copy(StorePairs{}, pairs.retile_S(rounded(acc)), pairs.partition_D(tile_q));
  __syncthreads();
  copy_out(tile_q, a.out.data + batch * a.out.batch + head * a.out.head, a.out.row, first_row, a.seqlen_q);
}
