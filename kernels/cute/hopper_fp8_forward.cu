// FlashAttention forward with log-sum-exp for Hopper in CuTe, of 8-bit elements;
// hopper_fp8_forward.py tells the algorithm, the roles of the warps and the layouts.
#include "hopper_fp8_tiles.cuh"

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "hopper_producer.cuh"

using namespace parts;
using namespace tiles;
using softmax::kInfinity;

// q, k and v also as the copy engine takes them: (head_dim, seqlen, heads, batch).
struct Arguments : ArgumentsOf<Element> {
  int out_is_half;  // O is in fp16, else in bf16
  TmaDescriptor map_q, map_k, map_v;
};
static_assert(sizeof(Arguments) == (sizeof(ArgumentsOf<Element>) + 4 + 63) / 64 * 64 + 3 * 128);

// Aligned to the pattern of the swizzle, 8 rows of 128 bytes, as every piece in it is.
struct alignas(1024) Shared {
  Element q[cosize_v<LayoutQ>];
  Element k[cosize_v<LayoutK>];
  Element v[cosize_v<LayoutK>];
  Element vt[cosize_v<LayoutVt>];
  Walk walk;  // at head dim 256 consumers have no registers for it
  // One phase for each tile: it is here, or all warps have read it.
  uint64_t q_here[QUERY_SLOTS];
  uint64_t k_here[STAGES], k_read[STAGES];
  uint64_t v_here[STAGES], v_read[STAGES];
  uint64_t vt_here[STAGES], vt_read[STAGES];
};

static_assert(!kPersistent && QUERY_SLOTS == 1);

constexpr int kTransposers = kGroup / 32 - 1;  // warps of the producer, but for the first

// Whether scores of the next block begin while P V of this one goes on: where registers hold both.
constexpr bool kAhead = HEAD_DIM <= 128;
// Whether the softmax of a block overlaps P V of the one before, too.
constexpr bool kOverlap = OVERLAP;
constexpr bool kPromoted = PROMOTED;
static_assert(!kOverlap || kAhead);

// The other warps of the producer: V of every tile transposed, as soon as both slots are free.
CUTE_DEVICE void turn_values(Shared& shared, Walk const& walk) {
  int warp = int(threadIdx.x) / 32 - 1;
  bool signals = threadIdx.x % 32 == 0;  // for its warp
  for (int t = 0; t < walk.blocks(); ++t) {
    Turn turn(t);
    int key = (walk.first_block() + t) * BLOCK_N;
    if (t >= STAGES) {
      wait_barrier(shared.vt_read[turn.slot], turn.parity ^ 1);
    }
    wait_barrier(shared.v_here[turn.slot], turn.parity);
    uint32_t place = turn.slot * BLOCK_N * HEAD_DIM;
    uint32_t from = ptx::shared_address(shared.v) + place;
    uint32_t to = ptx::shared_address(shared.vt) + place;
    if (walk.hides(key)) {
      transpose<kTransposers>(from, to, warp, {walk.some.low - key, walk.some.high - key});
    } else {
      transpose<kTransposers>(from, to, warp);
    }
    cutlass::arch::fence_view_async_shared();  // wgmma comes after these stores
    __syncwarp();
    if (signals) {
      arrive_barrier(shared.v_read[turn.slot]);
      arrive_barrier(shared.vt_here[turn.slot]);
    }
  }
}

// The factor of a head of keys.
CUTE_DEVICE float factor_of(Factors const& factors, int batch, int head_kv) {
  return factors.data == nullptr ? 1.0f
                                 : factors.data[batch * factors.batch + head_kv * factors.head];
}

// Store a lane's part of O as rows.  Of each 16 columns, which lie as rows of V transposed do, a
// lane has four neighbours: the even two, then the odd two.
template <ptx::Format format, class Place, class O>
CUTE_DEVICE void store(Arguments const& a, int batch, int head, int first_row, Place const& place,
                       O const& o) {
  auto out = reinterpret_cast<uint16_t*>(a.out.data) + batch * a.out.batch + head * a.out.head;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(o); ++r) {
    int row = first_row + get<0>(place(r, 0));
    if (row < a.seqlen_q) {
      auto to = out + row * a.out.row + get<1>(place(r, 0)) * 2;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(o); c += 4) {
        uint64_t low = ptx::pack<format>(o(r, c), o(r, c + 2));
        uint64_t high = ptx::pack<format>(o(r, c + 1), o(r, c + 3));
        *reinterpret_cast<uint64_t*>(to + 4 * c) = low | high << 32;
      }
    }
  }
}

// A consumer warpgroup: 64 rows of the tile, from the first block of keys to O and LSE.
CUTE_DEVICE void consume(Arguments const& a, Shared& shared, BlockRows tile) {
  auto [first_row, head, batch] = tile;
  int consumer = int(threadIdx.x) - kGroup;
  int warpgroup = __shfl_sync(0xffffffff, consumer / kGroup, 0);
  bool signals = consumer % 32 == 0;  // for its warp
  Walk const& walk = shared.walk;
  int first_key = walk.first_block() * BLOCK_N;
  int blocks = walk.blocks();
  int head_kv = head / a.group;
  float factor = __fmul_rn(a.scale_log2, factor_of(a.descale_q, batch, head_kv));
  factor = __fmul_rn(factor, factor_of(a.descale_k, batch, head_kv));
  // The largest score has the largest sum if that has the factor's sign; by 0 all scores are equal.
  float sign = factor > 0.0f ? 1.0f : factor < 0.0f ? -1.0f : 0.0f;
  factor = factor == 0.0f ? 1.0f : fabsf(factor);

  Tensor tile_q = make_tensor(make_smem_ptr(shared.q), LayoutQ{});
  Tensor tiles_k = make_tensor(make_smem_ptr(shared.k), LayoutK{});
  Tensor tiles_vt = make_tensor(make_smem_ptr(shared.vt), LayoutVt{});

  // Descriptors, (1, M or N, K): of a warpgroup, not of a thread.
  auto group_s = MmaS{}.get_slice(warpgroup * kGroup);
  auto group_o = MmaO{}.get_slice(warpgroup * kGroup);
  Tensor operand_q = group_s.make_fragment_A(group_s.partition_A(tile_q));
  Tensor operand_k = group_s.make_fragment_B(group_s.partition_B(tiles_k));
  Tensor operand_v = group_o.make_fragment_B(group_o.partition_B(tiles_vt));
  Tensor operand_p = make_tensor<Element>(partition_shape_A(MmaO{}, Shape<BlockM, BlockN>{}));

  Tensor scores = partition_fragment_C(MmaS{}, Shape<BlockM, BlockN>{});
  Tensor acc = partition_fragment_C(MmaO{}, Shape<BlockM, HeadDim>{});
  Tensor x = by_row(scores);
  Tensor o = by_row(acc);
  // (row, key) of each x.
  Tensor identity = make_identity_tensor(Shape<BlockM, BlockN>{});
  Tensor place = by_row(MmaS{}.get_slice(consumer).partition_C(identity));
  constexpr int rows = decltype(size<0>(x))::value;
  Tensor row_max = make_tensor<float>(Int<rows>{});
  Tensor row_sum = make_tensor<float>(Int<rows>{});  // of this lane's columns only, until the end
  Interval seen[rows];
  CUTE_UNROLL
  for (int r = 0; r < rows; ++r) {
    seen[r] = intervals::seen_by(a, batch, first_row + get<0>(place(r, 0)));
  }
  fill(row_max, -kInfinity);
  clear(row_sum);
  clear(acc);

  auto begin_scores = [&](int t) {
    Turn turn(t);
    wait_barrier(shared.k_here[turn.slot], turn.parity);
    begin_product(MmaS{}, GMMA::ScaleOut::Zero, operand_q(_, 0, _), operand_k(_, 0, _, turn.slot),
                  scores(_, 0, 0));
  };
  auto finish_scores = [&](int t, auto later) {
    finish_product<decltype(later)::value>(scores);
    if (signals) {
      arrive_barrier(shared.k_read[Turn(t).slot]);
    }
  };
  // Scores become p; what is given, of o's rows, is rescaled.
  auto weigh_keys = [&](int t, auto& rescaled) {
    int key = first_key + t * BLOCK_N;
    if (sign != 1.0f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) {
        scores(i) *= sign;
      }
    }
    if (walk.masked(key)) {
      hide_scores(x, place, seen, key);
    }
    weigh(x, rescaled, factor, row_max, row_sum);
  };
  auto expect_values = [&](int t) {
    Turn turn(t);
    wait_barrier(shared.vt_here[turn.slot], turn.parity);
  };
  // O of a block; ahead: the next block's scores begin before.
  auto add_values = [&](int t, auto ahead) {
    constexpr bool kNext = decltype(ahead)::value;
    expect_values(t);
    int slot = Turn(t).slot;
    CUTE_UNROLL
    for (int n = 0; n < size<2>(acc); ++n) {
      Tensor values = operand_v(_, n, _, slot);
      if constexpr (PROMOTED) {
        // The tensor cores keep 13 bits of a sum, so a block's begins at zero.
        Tensor sums = partition_fragment_C(MmaO{}, Shape<BlockM, Part>{});
        begin_product(MmaO{}, GMMA::ScaleOut::Zero, operand_p(_, 0, _), values, sums(_, 0, 0));
        if constexpr (kNext) {
          begin_scores(t + 1);
        }
        finish_product<kNext>(sums, operand_p);
        CUTE_UNROLL
        for (int i = 0; i < size(sums); ++i) {
          acc(i + n * size(sums)) += sums(i);
        }
      } else {
        begin_product(MmaO{}, GMMA::ScaleOut::One, operand_p(_, 0, _), values, acc(_, 0, n));
        if constexpr (kNext) {
          begin_scores(t + 1);
        }
        finish_product<kNext>(acc, operand_p);
      }
    }
    if (signals) {
      arrive_barrier(shared.vt_read[slot]);
    }
  };

  if (blocks > 0) {
    wait_barrier(shared.q_here[0], 0);
  }
  if constexpr (kOverlap) {
    // The factors of o's rows: those of the latest block in P, and those of the next.
    Tensor alpha = make_tensor<float>(Shape<Int<rows>, _1>{});
    Tensor next = make_tensor<float>(Shape<Int<rows>, _1>{});
    Tensor sums = partition_fragment_C(MmaO{}, Shape<BlockM, Part>{});
    Tensor sum = by_row(sums);
    auto begin_values = [&](int t) {
      expect_values(t);
      Tensor values = operand_v(_, 0, _, Turn(t).slot);
      if constexpr (kPromoted) {
        begin_product(MmaO{}, GMMA::ScaleOut::Zero, operand_p(_, 0, _), values, sums(_, 0, 0));
      } else {
        begin_product(MmaO{}, GMMA::ScaleOut::One, operand_p(_, 0, _), values, acc(_, 0, 0));
      }
    };
    auto finish_values = [&](int t) {
      if constexpr (kPromoted) {
        finish_product<0>(sums, operand_p);
      } else {
        finish_product<0>(acc, operand_p);
      }
      if (signals) {
        arrive_barrier(shared.vt_read[Turn(t).slot]);
      }
      CUTE_UNROLL
      for (int r = 0; r < rows; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(o); ++c) {
          o(r, c) = kPromoted ? __fmaf_rn(o(r, c), alpha(r, 0), sum(r, c)) : o(r, c) * next(r, 0);
        }
        alpha(r, 0) = next(r, 0);
      }
    };
    fill(alpha, 1.0f);
    fill(next, 1.0f);
    if (blocks > 0) {
      begin_scores(0);
      finish_scores(0, Int<0>{});
      weigh_keys(0, alpha);
      to_left_operand(scores, operand_p);
      for (int t = 1; t < blocks; ++t) {
        begin_scores(t);
        begin_values(t - 1);
        finish_scores(t, Int<1>{});
        fill(next, 1.0f);
        weigh_keys(t, next);
        // Never true; but the compiler puts the exponentials behind the wait unless something
        // before it needs their sum.
        if (row_sum(0) + row_sum(1) < 0.0f) {
          cutlass::arch::fence_view_async_shared();
        }
        finish_values(t - 1);
        to_left_operand(scores, operand_p);
      }
      begin_values(blocks - 1);
      fill(next, 1.0f);
      finish_values(blocks - 1);
    }
  } else if constexpr (kAhead) {
    if (blocks > 0) {
      begin_scores(0);
      finish_scores(0, Int<0>{});
      for (int t = 0; t + 1 < blocks; ++t) {
        weigh_keys(t, o);
        to_left_operand(scores, operand_p);
        add_values(t, true_type{});
        finish_scores(t + 1, Int<0>{});
      }
      weigh_keys(blocks - 1, o);
      to_left_operand(scores, operand_p);
      add_values(blocks - 1, false_type{});
    }
  } else {
    for (int t = 0; t < blocks; ++t) {
      begin_scores(t);
      finish_scores(t, Int<0>{});
      weigh_keys(t, o);
      to_left_operand(scores, operand_p);
      add_values(t, false_type{});
    }
  }

  CUTE_UNROLL
  for (int r = 0; r < rows; ++r) {
    row_max(r) *= factor;
    row_sum(r) *= 1.0f / kScaleP;
  }
  softmax::finish_rows(a, batch, head, first_row, place, o, row_max, row_sum);

  float factor_v = factor_of(a.descale_v, batch, head_kv) / kScaleP;
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) {
    acc(i) *= factor_v;
  }
  if (a.out_is_half) {
    store<ptx::Format::float16>(a, batch, head, first_row, place, o);
  } else {
    store<ptx::Format::bfloat16>(a, batch, head, first_row, place, o);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_fp8_forward(__grid_constant__ Arguments const a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Shared& memory = *reinterpret_cast<Shared*>(shared);
  if (threadIdx.x == 0) {
    initialize_barrier(memory.q_here[0], 1);
    for (int slot = 0; slot < STAGES; ++slot) {
      initialize_barrier(memory.k_here[slot], 1);
      initialize_barrier(memory.v_here[slot], 1);
      initialize_barrier(memory.vt_here[slot], kTransposers);
      initialize_barrier(memory.k_read[slot], kConsumerWarps);
      initialize_barrier(memory.v_read[slot], kTransposers);
      initialize_barrier(memory.vt_read[slot], kConsumerWarps);
    }
    cutlass::arch::fence_view_async_shared();  // the copy engine completes them
  }
  BlockRows tile = rows_of(a, 0);
  Walk walk = walk_of(a, tile.batch, tile.first_row);
  if (threadIdx.x == 0) {
    memory.walk = walk;
  }
  __syncthreads();

  if (threadIdx.x < kGroup) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x < 32) {
      load_tile(a, memory, walk, tile, Turns{});
    } else {
      turn_values(memory, walk);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume(a, memory, tile);
  }
}
