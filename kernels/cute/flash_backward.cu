// Walks of the FlashAttention-2 backward in CuTe; flash_backward.py has the algorithm.
//
// A build defines ELEMENT (half_t or bfloat16_t), HEAD_DIM (a multiple of 32), OWNED (64: rows of
// the tile that a block owns), WALKED (32 or 64: rows of a step), STAGES (1 or 2), KEYS (1: a block
// owns keys; 0: it owns rows and makes dQ), SUM_X and SUM_Y (1: a block of keys makes dK, makes dV;
// SUM_X is 1 where rows are owned), ATOMIC (1: blocks of keys add to dQ) and WALK, the kernel's
// name.
#include "tiles.cuh"

#include <cuda/std/limits>

#include "arguments.cuh"
#include "intervals.cuh"

using namespace cute;
using namespace tiles;
using namespace intervals;

using HeadDim = Int<HEAD_DIM>;
using Owned = Int<OWNED>;
using Walked = Int<WALKED>;
constexpr bool kKeys = KEYS;
constexpr bool kAtomic = ATOMIC;
constexpr bool kSumX = SUM_X;  // dK or dQ, which takes dP and dS
constexpr bool kSumY = SUM_Y;  // dV, which takes P alone
constexpr int kStages = STAGES;
constexpr bool kPairsApart = kAtomic && kStages > 1;  // else dS takes the place of dO
constexpr float kInfinity = cuda::std::numeric_limits<float>::infinity();
static_assert(!kAtomic || (kKeys && kSumX && WALKED == 32));
static_assert(kKeys ? kSumX || kSumY : kSumX && !kSumY);

using OwnedLayout = TileLayout<OWNED, HEAD_DIM>;
using WalkedLayout = TileLayout<WALKED, HEAD_DIM, kStages>;
using WalkedLayoutT = TransposedLayout<WALKED, HEAD_DIM, kStages>;
using PairsLayout = TileLayout<OWNED, WALKED>;

// x: K where keys are owned, Q where rows are; S is its product.  y: V or dO, of dP.  A walk for dV
// alone does not read V, and dV is in own_x at the end.
struct Shared {
  alignas(128) Element own_x[cosize_v<OwnedLayout>];  // dK or dQ at the end
  alignas(128) Element own_y[kSumX ? cosize_v<OwnedLayout> : 64];  // dV at the end
  alignas(128) Element step_x[cosize_v<WalkedLayout>];
  alignas(128) Element step_y[cosize_v<WalkedLayout>];
  alignas(128) Element pairs[kPairsApart ? cosize_v<PairsLayout> : 64];  // dS^T, to add to dQ
  alignas(128) float lse[kStages][WALKED];  // of the rows of a step, where keys are owned
  alignas(128) float delta[kStages][WALKED];
};

// The structure of flash_backward.py.
struct Arguments {
  Strided<Element> q, k, v, dout, dq, dk, dv;
  float const *lse, *delta;       // (batch, heads_q, seqlen_q), contiguous
  float* dq_sums;                 // (batch, heads_q, seqlen_q, HEAD_DIM), contiguous
  int const *row_low, *row_high;  // (batch, seqlen_q), contiguous: a row sees keys [low, high)
  int heads_q;
  int group;  // query heads per key head
  int seqlen_q;
  int seqlen_kv;
  int diagonal_low;  // row r sees keys r + diagonal_low ... r + diagonal_high
  int diagonal_high;
  float scale_log2;
  float scale;
};

// Rows that see a key of the tile which begins at `first`.
CUTE_DEVICE Walk rows_to_walk(Arguments const& a, int batch, int first) {
  int end = min(first + OWNED, a.seqlen_kv);
  if (a.row_low != nullptr) {
    int low = a.seqlen_q;
    int high = 0;
    for (int row = int(threadIdx.x) % 32; row < a.seqlen_q; row += 32) {  // each warp looks at all
      Interval seen = seen_by(a, batch, row);
      if (max(seen.low, first) < min(seen.high, end)) {
        low = min(low, row);
        high = row + 1;
      }
    }
    return steps_of<WALKED>({least(low), -least(-high)}, {0, 0});
  }
  Interval some{max(first - a.diagonal_high, 0), min(end - a.diagonal_low, a.seqlen_q)};
  Interval whole{max(end - 1 - a.diagonal_high, 0), min(first + 1 - a.diagonal_low, a.seqlen_q)};
  // Keys past the end are never visible.
  return steps_of<WALKED>(some, end < first + OWNED ? Interval{0, 0} : whole);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) WALK(Arguments const a) {
  // One grid axis, so that batch x heads may exceed 65535.  The longest walks of a causal mask come
  // first: those of the first keys, and of the last rows.
  int length = kKeys ? a.seqlen_kv : a.seqlen_q;
  int heads = kKeys ? a.heads_q / a.group : a.heads_q;
  int tile_count = (length + OWNED - 1) / OWNED;
  int index = int(blockIdx.x) % tile_count;
  int first = (kKeys ? index : tile_count - 1 - index) * OWNED;
  int head = int(blockIdx.x) / tile_count % heads;
  int batch = int(blockIdx.x) / tile_count / heads;
  auto at = [&](Strided<Element> const& x, int of) {
    return x.data + batch * x.batch + of * x.head;
  };
  auto row_of = [&](int of) { return (int64_t(batch) * a.heads_q + of) * a.seqlen_q; };

  int walked_end = a.seqlen_q;
  Walk walk = kKeys ? rows_to_walk(a, batch, first)
                    : keys_to_walk<OWNED, WALKED>(a, batch, first, walked_end);
  int blocks = walk.some.high - walk.some.low;
  int steps = kKeys ? a.group * blocks : blocks;  // of every query head of the group

  extern __shared__ __align__(128) unsigned char shared[];
  static_assert(sizeof(Shared) == SHARED_BYTES);
  Shared& tile = *reinterpret_cast<Shared*>(shared);
  Tensor own_x = make_tensor(make_smem_ptr(tile.own_x), OwnedLayout{});
  Tensor own_y = make_tensor(make_smem_ptr(kSumX ? tile.own_y : tile.own_x), OwnedLayout{});
  Tensor step_x = make_tensor(make_smem_ptr(tile.step_x), WalkedLayout{});
  Tensor step_y = make_tensor(make_smem_ptr(tile.step_y), WalkedLayout{});
  Tensor step_xt = make_tensor(make_smem_ptr(tile.step_x), WalkedLayoutT{});
  Tensor step_yt = make_tensor(make_smem_ptr(tile.step_y), WalkedLayoutT{});

  // Operands as mma takes them, (atom, M or N, K), and the same registers as ldmatrix fills them.
  auto rows_a = make_tiled_copy_A(LoadRows{}, Mma{}).get_slice(threadIdx.x);
  auto rows_b = make_tiled_copy_B(LoadRows{}, Mma{}).get_slice(threadIdx.x);
  auto columns_b = make_tiled_copy_B(LoadColumns{}, Mma{}).get_slice(threadIdx.x);
  Tensor operand_own = make_tensor<Element>(partition_shape_A(Mma{}, Shape<Owned, HeadDim>{}));
  Tensor operand_step = make_tensor<Element>(partition_shape_B(Mma{}, Shape<Walked, HeadDim>{}));
  Tensor operand_pairs = make_tensor<Element>(partition_shape_A(Mma{}, Shape<Owned, Walked>{}));
  Tensor operand_turned = make_tensor<Element>(partition_shape_B(Mma{}, Shape<HeadDim, Walked>{}));

  Tensor scores = partition_fragment_C(Mma{}, Shape<Owned, Walked>{});
  Tensor slopes = partition_fragment_C(Mma{}, Shape<Owned, Walked>{});
  Tensor sums_x = partition_fragment_C(Mma{}, Shape<Owned, HeadDim>{});  // dK or dQ
  Tensor sums_y = partition_fragment_C(Mma{}, Shape<Owned, HeadDim>{});  // dV
  Tensor p = by_row(scores);
  Tensor ds = by_row(slopes);
  Tensor identity = make_identity_tensor(Shape<Owned, Walked>{});
  Tensor place = by_row(Mma{}.get_slice(threadIdx.x).partition_C(identity));  // (owned, walked)
  clear(sums_x);
  clear(sums_y);

  // 2^(x - shift) is P.  A row all of whose scores are -inf has LSE -inf, and P = 2^(-inf - 0) = 0.
  auto shift_of = [](float lse) { return lse == -kInfinity ? 0.0f : __fmul_rn(lse, 1.44269504f); };
  auto rows = size<0>(p);
  Tensor row_shift = make_tensor<float>(Layout<decltype(rows)>{});
  Tensor row_delta = make_tensor<float>(Layout<decltype(rows)>{});
  if constexpr (!kKeys) {
    CUTE_UNROLL
    for (int r = 0; r < rows; ++r) {
      int64_t row = row_of(head) + min(first + get<0>(place(r, 0)), a.seqlen_q - 1);
      row_shift(r) = shift_of(a.lse[row]);
      row_delta(r) = a.delta[row];
    }
  }

  auto copy_step = [&](int step) {
    if (step < steps) {
      int block = walk.some.low + step % blocks;
      int of = kKeys ? head * a.group + step / blocks : head / a.group;
      int start = block * WALKED;
      auto const& x = kKeys ? a.q : a.k;
      auto const& y = kKeys ? a.dout : a.v;
      copy_in(at(x, of), x.row, start, walked_end, step_x(_, _, step % kStages));
      copy_in(at(y, of), y.row, start, walked_end, step_y(_, _, step % kStages));
      if constexpr (kKeys) {
        int i = threadIdx.x;
        if (i < WALKED) {
          uint32_t bytes = start + i < walked_end ? 4 : 0;
          int64_t row = row_of(of) + (bytes ? start + i : 0);
          auto to = [&](float& x) { return ptx::shared_address(&x); };
          ptx::cp_async_ca<4>(to(tile.lse[step % kStages][i]), a.lse + row, bytes);
          ptx::cp_async_ca<4>(to(tile.delta[step % kStages][i]), a.delta + row, bytes);
        }
      }
    }
    cp_async_fence();
  };

  // Products of the tile with a step, over the head dim, and of pairs with a step, over its rows.
  auto with_rows = [&](auto const& own, auto const& step, auto& result) {
    Tensor from_own = rows_a.partition_S(own);
    Tensor from_step = rows_b.partition_S(step);
    Tensor to_own = rows_a.retile_D(operand_own);
    Tensor to_step = rows_b.retile_D(operand_step);
    auto load = [&](int k) {
      copy(LoadRows{}, from_own(_, _, k), to_own(_, _, k));
      copy(LoadRows{}, from_step(_, _, k), to_step(_, _, k));
    };
    clear(result);
    multiply(load, operand_own, operand_step, result);
  };
  auto with_columns = [&](auto const& step, auto& sums) {
    Tensor from = columns_b.partition_S(step);
    Tensor to = columns_b.retile_D(operand_turned);
    auto load = [&](int k) { copy(LoadColumns{}, from(_, _, k), to(_, _, k)); };
    multiply(load, operand_pairs, operand_turned, sums);
  };

  // Zeros where a row does not see a key.
  auto hide = [&](auto& pairs, int start) {
    auto unless_seen = [&](Interval seen, int r, int c) {
      int key = kKeys ? first + get<0>(place(r, 0)) : start + get<1>(place(0, c));
      if (key < seen.low || key >= seen.high) {
        pairs(r, c) = 0.0f;
      }
    };
    if constexpr (kKeys) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(pairs); ++c) {
        int row = start + get<1>(place(0, c));
        Interval seen = row < a.seqlen_q ? seen_by(a, batch, row) : Interval{0, 0};
        CUTE_UNROLL
        for (int r = 0; r < rows; ++r) {
          unless_seen(seen, r, c);
        }
      }
    } else {
      CUTE_UNROLL
      for (int r = 0; r < rows; ++r) {
        Interval seen = seen_by(a, batch, first + get<0>(place(r, 0)));
        CUTE_UNROLL
        for (int c = 0; c < size<1>(pairs); ++c) {
          unless_seen(seen, r, c);
        }
      }
    }
  };

  auto const& of_x = kKeys ? a.k : a.q;
  auto const& of_y = kKeys ? a.v : a.dout;
  copy_in(at(of_x, head), of_x.row, first, length, own_x);
  if constexpr (kSumX) {
    copy_in(at(of_y, head), of_y.row, first, length, own_y);
  }
  copy_step(0);
  for (int step = 0; step < steps; ++step) {
    int stage = step % kStages;
    int block = walk.some.low + step % blocks;
    bool masked = block < walk.whole.low || block >= walk.whole.high;
    cp_async_wait<0>();
    __syncthreads();  // the step has come from all threads; all warps are done with the one before
    if constexpr (kStages > 1) {
      copy_step(step + 1);
    }

    // One rounded product per score, and no fused multiply-add after it: S is the forward's.
    with_rows(own_x, step_x(_, _, stage), scores);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(p); ++c) {
      float shift = kKeys ? shift_of(tile.lse[stage][get<1>(place(0, c))]) : 0.0f;
      CUTE_UNROLL
      for (int r = 0; r < rows; ++r) {
        float x = __fmul_rn(a.scale_log2, p(r, c));
        p(r, c) = ptx::ex2(__fsub_rn(x, kKeys ? shift : row_shift(r)));
      }
    }
    if (masked) {
      hide(p, block * WALKED);
    }
    if constexpr (kSumY) {
      to_left_operand(rounded(scores), operand_pairs);
      with_columns(step_yt(_, _, stage), sums_y);
    }

    if constexpr (kSumX) {
      with_rows(own_y, step_y(_, _, stage), slopes);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(p); ++c) {
        float delta = kKeys ? tile.delta[stage][get<1>(place(0, c))] : 0.0f;
        CUTE_UNROLL
        for (int r = 0; r < rows; ++r) {
          ds(r, c) = p(r, c) * __fsub_rn(ds(r, c), kKeys ? delta : row_delta(r));
        }
      }
      if (masked) {
        hide(ds, block * WALKED);
      }
      auto rounded_ds = rounded(slopes);
      to_left_operand(rounded_ds, operand_pairs);
      with_columns(step_xt(_, _, stage), sums_x);

      if constexpr (kAtomic) {
        // dQ of these rows takes dS with the keys of all warps: it goes through shared memory.
        Element* place_of_pairs = kPairsApart ? tile.pairs : tile.step_y;
        if constexpr (!kPairsApart) {
          __syncthreads();  // all warps are done with dO
        }
        Tensor pairs = make_tensor(make_smem_ptr(place_of_pairs), PairsLayout{});
        Tensor pairs_t =
            make_tensor(make_smem_ptr(place_of_pairs), TransposedLayout<OWNED, WALKED>{});
        Tensor own_xt = make_tensor(make_smem_ptr(tile.own_x), TransposedLayout<OWNED, HEAD_DIM>{});
        auto store = make_tiled_copy_C(StorePairs{}, Mma{}).get_slice(threadIdx.x);
        copy(StorePairs{}, store.retile_S(rounded_ds), store.partition_D(pairs));
        __syncthreads();  // dS has come from all warps

        auto square_a = make_tiled_copy_A(LoadColumns{}, SquareMma{}).get_slice(threadIdx.x);
        auto square_b = make_tiled_copy_B(LoadColumns{}, SquareMma{}).get_slice(threadIdx.x);
        Tensor left = make_tensor<Element>(partition_shape_A(SquareMma{}, Shape<Walked, Owned>{}));
        Tensor right = make_tensor<Element>(partition_shape_B(SquareMma{}, Shape<_32, Owned>{}));
        Tensor part = partition_fragment_C(SquareMma{}, Shape<Walked, _32>{});
        Tensor spot = SquareMma{}.get_slice(threadIdx.x).partition_C(
            make_identity_tensor(Shape<Walked, _32>{}));  // (row, column)
        copy(LoadColumns{}, square_a.partition_S(pairs_t), square_a.retile_D(left));
        Tensor from = square_b.partition_S(own_xt);
        Tensor to = square_b.retile_D(right);
        float* sums = a.dq_sums + row_of(head * a.group + step / blocks) * HEAD_DIM;
        CUTE_UNROLL
        for (int n = 0; n < HEAD_DIM / 32; ++n) {
          clear(part);
          auto load = [&](int k) { copy(LoadColumns{}, from(_, n, k), to(_, 0, k)); };
          multiply<SquareMma>(load, left, right, part);
          CUTE_UNROLL
          for (int i = 0; i < size(part); ++i) {
            int row = block * WALKED + get<0>(spot(i));
            if (row < a.seqlen_q) {
              int64_t element = int64_t(row) * HEAD_DIM + n * 32 + get<1>(spot(i));
              atomicAdd(sums + element, part(i) * a.scale);
            }
          }
        }
      }
    }
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps are done with the step: the next takes its place
      copy_step(step + 1);
    }
  }

  // Gradients go through the memory of the owned tiles, to leave it as whole rows.
  cp_async_wait<0>();
  __syncthreads();  // no copy is on its way there, and no warp reads there, any more
  auto store = make_tiled_copy_C(StorePairs{}, Mma{}).get_slice(threadIdx.x);
  if constexpr (kSumX) {
    CUTE_UNROLL
    for (int i = 0; i < size(sums_x); ++i) {
      sums_x(i) *= a.scale;
    }
    copy(StorePairs{}, store.retile_S(rounded(sums_x)), store.partition_D(own_x));
  }
  if constexpr (kSumY) {
    copy(StorePairs{}, store.retile_S(rounded(sums_y)), store.partition_D(own_y));
  }
  __syncthreads();  // the gradients have come from all warps
  if constexpr (kSumX) {
    auto const& to_x = kKeys ? a.dk : a.dq;
    copy_out(own_x, at(to_x, head), to_x.row, first, length);
  }
  if constexpr (kSumY) {
    copy_out(own_y, at(a.dv, head), a.dv.row, first, length);
  }
}
