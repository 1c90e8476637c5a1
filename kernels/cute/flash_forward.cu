// FlashAttention-2 forward with log-sum-exp in CuTe; flash_forward.py has the algorithm, the atoms
// and the layouts.
//
// A build defines ELEMENT (half_t or bfloat16_t), HEAD_DIM (a multiple of 32), BLOCK_M (64 or 128:
// rows of a block) and BLOCK_N (32, 64 or 128: keys of a step).
#include "tiles.cuh"

#include "arguments.cuh"
#include "intervals.cuh"
#include "softmax.cuh"

#include "fused_softmax.cuh"

using namespace cute;
using namespace tiles;
using namespace intervals;
using namespace softmax;

using HeadDim = Int<HEAD_DIM>;
using BlockM = Int<BLOCK_M>;
using BlockN = Int<BLOCK_N>;
constexpr int kStages = 2;
// To leave O alone where no maximum rises gains only where steps are long (docs/benchmarks.md).
constexpr bool kLazy = BLOCK_N == 128;

using LayoutQ = TileLayout<BLOCK_M, HEAD_DIM>;
using LayoutKV = TileLayout<BLOCK_N, HEAD_DIM, kStages>;
// V is the right operand, (N, K), of P V: (dim, key, stage).
using LayoutVt = TransposedLayout<BLOCK_N, HEAD_DIM, kStages>;
using Arguments = ArgumentsOf<Element>;

struct Shared {
  alignas(128) Element q[cosize_v<LayoutQ>];  // O at the end
  alignas(128) Element k[cosize_v<LayoutKV>];
  alignas(128) Element v[cosize_v<LayoutKV>];
  alignas(128) Interval seen[BLOCK_M];  // keys that each row sees
};
static_assert(sizeof(Shared) == SHARED_BYTES && BLOCK_M <= kThreads);

// The second bound is on registers, by the blocks that a multiprocessor must be able to hold:
// without it ptxas aims at three even for head_dim 128, and spills.
extern "C" __global__ void __launch_bounds__(kThreads, HEAD_DIM <= 64 && BLOCK_M <= 64 ? 3 : 2)
    flash_forward(Arguments const a) {
  // One grid axis, so that batch x heads may exceed 65535; the last tile first, since causal rows
  // grow longer.
  int tiles = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  int first_row = (tiles - 1 - int(blockIdx.x) % tiles) * BLOCK_M;
  int head = int(blockIdx.x) / tiles % a.heads_q;
  int batch = int(blockIdx.x) / tiles / a.heads_q;
  Element const* q = a.q.data + batch * a.q.batch + head * a.q.head;
  Element const* k = a.k.data + batch * a.k.batch + head / a.group * a.k.head;
  Element const* v = a.v.data + batch * a.v.batch + head / a.group * a.v.head;

  int end;  // keys from here on no row of the tile sees: they are not loaded
  Walk walk = keys_to_walk<BLOCK_M, BLOCK_N>(a, batch, first_row, end);

  extern __shared__ __align__(128) unsigned char shared[];
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
  Tensor place = by_row(Mma{}.get_slice(threadIdx.x).partition_C(identity));  // (row, key)
  auto rows = size<0>(x);
  Tensor row_max = make_tensor<float>(Layout<decltype(rows)>{});
  // Of this lane's columns only, until the end.
  Tensor row_sum = make_tensor<float>(Layout<decltype(rows)>{});
  // Read in blocks that need a mask: two registers less for each row of a lane.
  if (threadIdx.x < BLOCK_M) {
    tile.seen[threadIdx.x] = seen_by(a, batch, first_row + int(threadIdx.x));
  }
  fill(row_max, -kInfinity);
  clear(row_sum);
  clear(acc);

  // Every call makes one group of copies, empty if there is no such block, so that waits may count
  // groups.
  auto copy_k = [&](int block) {
    if (block < walk.some.high) {
      copy_in(k, a.k.row, block * BLOCK_N, end, tiles_k(_, _, block % kStages));
    }
    cp_async_fence();
  };
  auto copy_v = [&](int block) {
    if (block < walk.some.high) {
      copy_in(v, a.v.row, block * BLOCK_N, end, tiles_v(_, _, block % kStages));
    }
    cp_async_fence();
  };

  copy_in(q, a.q.row, first_row, a.seqlen_q, tile_q);
  copy_k(walk.some.low);
  copy_v(walk.some.low);
  for (int block = walk.some.low; block < walk.some.high; ++block) {
    cp_async_wait<1>();
    // K (and Q) has come from all threads, and all warps are done with the block before: its stage
    // is free.
    __syncthreads();
    copy_k(block + 1);
    clear(scores);
    auto load_qk = [&](int step) {
      copy(LoadRows{}, from_q(_, _, step), to_q(_, _, step));
      copy(LoadRows{}, from_k(_, _, step, block % kStages), to_k(_, _, step));
    };
    multiply(load_qk, operand_q, operand_k, scores);

    // The largest score has the largest sum if that has the sign of the scale; by 0 all are equal.
    if (a.q_factor != 1.0f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) {
        scores(i) *= a.q_factor;
      }
    }
    if (block < walk.whole.low || block >= walk.whole.high) {
      CUTE_UNROLL
      for (int r = 0; r < rows; ++r) {
        Interval seen = tile.seen[get<0>(place(r, 0))];
        CUTE_UNROLL
        for (int c = 0; c < size<1>(x); ++c) {
          int key = block * BLOCK_N + get<1>(place(0, c));
          if (key < seen.low || key >= seen.high) {
            x(r, c) = -kInfinity;
          }
        }
      }
    }
    fused_online_softmax<kLazy>(x, o, a.scale_log2, row_max, row_sum);
    to_left_operand(rounded(scores), operand_p);

    cp_async_wait<1>();
    __syncthreads();  // V has come from all threads
    copy_v(block + 1);
    auto load_v = [&](int step) {
      copy(LoadColumns{}, from_v(_, _, step, block % kStages), to_v(_, _, step));
    };
    multiply(load_v, operand_p, operand_v, acc);
  }

  CUTE_UNROLL
  for (int r = 0; r < rows; ++r) {
    row_max(r) = __fmul_rn(a.scale_log2, row_max(r));
  }
  finish_rows(a, batch, head, first_row, place, o, row_max, row_sum);

  // O goes through the memory of Q, to leave it as whole rows.
  cp_async_wait<0>();
  __syncthreads();  // no copy is on its way there, and no warp reads there, any more
  auto pairs = make_tiled_copy_C(StorePairs{}, Mma{}).get_slice(threadIdx.x);
  copy(StorePairs{}, pairs.retile_S(rounded(acc)), pairs.partition_D(tile_q));
  __syncthreads();
  Element* out = a.out.data + batch * a.out.batch + head * a.out.head;
  copy_out(tile_q, out, a.out.row, first_row, a.seqlen_q);
}
