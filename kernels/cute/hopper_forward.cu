// FlashAttention forward with log-sum-exp for Hopper in CuTe; hopper_forward.py tells the
// algorithm, the roles of the warpgroups and the layouts.
//
// A build also defines OVERLAP: whether the softmax of a block overlaps P V of the one before.
#include "hopper_tiles.cuh"

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "hopper_producer.cuh"
#include "softmax.cuh"

using namespace parts;
using namespace softmax;
using namespace tiles;

// q, k and v also as the copy engine takes them: (head_dim, seqlen, heads, batch).
struct Arguments : ArgumentsOf<Element> {
  int tiles;      // of rows, of all heads
  int by_length;  // whether the longest come first, whatever their heads
  TmaDescriptor map_q, map_k, map_v;
};
static_assert(sizeof(Arguments) == (sizeof(ArgumentsOf<Element>) + 8 + 63) / 64 * 64 + 3 * 128);

// Aligned to the pattern of the swizzle, 8 rows of 128 bytes, as every piece in it is.
struct alignas(1024) Shared {
  Element q[cosize_v<LayoutQ>];  // O at the end
  Element k[cosize_v<LayoutK>];
  Element v[cosize_v<LayoutVt>];
  // One phase for each tile: its bytes are here, or all warps have read it.  O's rows have left
  // its Q then.
  uint64_t q_here[QUERY_SLOTS], q_read[QUERY_SLOTS];
  uint64_t k_here[STAGES], k_read[STAGES];
  uint64_t v_here[STAGES], v_read[STAGES];
};

constexpr bool kOverlap = OVERLAP;

// Named barriers: of all consumers, and of each consumer warpgroup from 1 on.
constexpr uint32_t kBarrierConsumers = 0;
constexpr uint32_t kBarrierGroup = 1;

// Overwrite the values of a tile that no row sees with zeros: whatever lies there, NaN included,
// cannot enter P V as 0 * NaN.  A row's chunks lie in the row, wherever the swizzle puts them.
CUTE_DEVICE void hide(Element* tile, Interval const& seen, int key, int consumer) {
  constexpr int kChunks = kPiece * sizeof(Element) / sizeof(uint128_t);
  auto chunks = reinterpret_cast<uint128_t*>(tile);
  for (int i = consumer; i < kChunks * kPieces * BLOCK_N; i += kConsumers * kGroup) {
    int row = key + i / kChunks % BLOCK_N;
    if (row < seen.low || row >= seen.high) {
      chunks[i] = uint128_t(uint64_t(0));
    }
  }
  cutlass::arch::fence_view_async_shared();  // wgmma and the copy engine come after these stores
  cutlass::arch::NamedBarrier::sync(kConsumers * kGroup, kBarrierConsumers);
}

// A consumer warpgroup: 64 rows of a tile, from the first block of keys to O and LSE.
CUTE_DEVICE void consume_tile(Arguments const& a, Shared& shared, Walk const& walk, BlockRows tile,
                              Turns const& turns) {
  auto [first_row, head, batch] = tile;
  int consumer = int(threadIdx.x) - kGroup;
  int warpgroup = __shfl_sync(0xffffffff, consumer / kGroup, 0);
  bool signals = consumer % 32 == 0;  // for its warp
  int blocks = walk.blocks();
  QueryTurn query(turns.queries);

  Tensor tiles_q = make_tensor(make_smem_ptr(shared.q), LayoutQ{});
  Tensor tiles_k = make_tensor(make_smem_ptr(shared.k), LayoutK{});
  Tensor tiles_vt = make_tensor(make_smem_ptr(shared.v), LayoutVt{});

  // Descriptors, (1, M or N, K): of a warpgroup, not of a thread.
  auto group_s = MmaS{}.get_slice(warpgroup * kGroup);
  auto group_o = MmaO{}.get_slice(warpgroup * kGroup);
  Tensor operand_q = group_s.make_fragment_A(group_s.partition_A(tiles_q));
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
    Turn turn(turns.keys + t);
    wait_barrier(shared.k_here[turn.slot], turn.parity);
    begin_product(MmaS{}, GMMA::ScaleOut::Zero, operand_q(_, 0, _, query.slot),
                  operand_k(_, 0, _, turn.slot), scores(_, 0, 0));
  };
  auto begin_values = [&](int t) {
    Turn turn(turns.keys + t);
    int key = (walk.first_block() + t) * BLOCK_N;
    wait_barrier(shared.v_here[turn.slot], turn.parity);
    if (walk.hides(key)) {
      hide(shared.v + turn.slot * BLOCK_N * HEAD_DIM, walk.some, key, consumer);
    }
    begin_product(MmaO{}, GMMA::ScaleOut::One, operand_p(_, 0, _), operand_v(_, 0, _, turn.slot),
                  acc(_, 0, 0));
  };
  // Tile t of a ring, which is K's or V's, has been read by this warp.
  auto release = [&](uint64_t* read, int t) {
    if (signals) {
      arrive_barrier(read[Turn(turns.keys + t).slot]);
    }
  };
  // Scores become p; what is given, of o's rows, is rescaled.
  auto weigh_keys = [&](int t, auto& rescaled) {
    int key = (walk.first_block() + t) * BLOCK_N;
    // One rounded product per score, and no fused multiply-add after it: x - m must be exactly 0
    // at the maximum.
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      scores(i) = __fmul_rn(a.scale_log2, scores(i));
    }
    if (walk.masked(key)) {
      hide_scores(x, place, seen, key);
    }
    online_softmax(x, rescaled, row_max, row_sum);
  };

  if (blocks > 0) {
    wait_barrier(shared.q_here[query.slot], query.parity);
  }
  if constexpr (kOverlap) {
    // The scores of a block and P V of the block before are products at the same time, and the
    // latter goes on during the softmax of the former.
    Tensor alpha = make_tensor<float>(Shape<Int<rows>, _1>{});
    fill(alpha, 1.0f);
    if (blocks > 0) {
      begin_scores(0);
      finish_product<0>(scores);
      release(shared.k_read, 0);
      weigh_keys(0, alpha);
      to_left_operand(scores, operand_p);
      for (int t = 1; t < blocks; ++t) {
        begin_scores(t);
        begin_values(t - 1);
        finish_product<1>(scores);
        release(shared.k_read, t);
        fill(alpha, 1.0f);
        weigh_keys(t, alpha);
        // Never true; but the compiler puts the exponentials behind the wait unless something
        // before it needs their sum.
        if (row_sum(0) + row_sum(1) < 0.0f) {
          cutlass::arch::fence_view_async_shared();
        }
        finish_product<0>(acc, operand_p);
        release(shared.v_read, t - 1);
        CUTE_UNROLL
        for (int r = 0; r < rows; ++r) {
          CUTE_UNROLL
          for (int c = 0; c < size<1>(o); ++c) {
            o(r, c) *= alpha(r, 0);
          }
        }
        to_left_operand(scores, operand_p);
      }
      begin_values(blocks - 1);
      finish_product<0>(acc, operand_p);
      release(shared.v_read, blocks - 1);
    }
  } else {
    for (int t = 0; t < blocks; ++t) {
      begin_scores(t);
      finish_product<0>(scores);
      release(shared.k_read, t);
      weigh_keys(t, o);
      to_left_operand(scores, operand_p);
      begin_values(t);
      finish_product<0>(acc, operand_p);
      release(shared.v_read, t);
    }
  }

  finish_rows(a, batch, head, first_row, place, o, row_max, row_sum);

  // O goes through this warpgroup's rows of Q, which it alone has read, to leave as whole rows.  A
  // tile that sees no key has no Q: its zeros do not.
  Tensor tile_q = tiles_q(_, _, query.slot);
  if (blocks > 0) {
    Tensor place_o = by_row(
        MmaO{}.get_slice(consumer).partition_C(make_identity_tensor(Shape<BlockM, HeadDim>{})));
    CUTE_UNROLL
    for (int r = 0; r < rows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(o); c += 2) {
        auto to = &tile_q(get<0>(place_o(r, c)), get<1>(place_o(r, c)));
        *reinterpret_cast<uint32_t*>(to) = ptx::pack<kFormat>(o(r, c), o(r, c + 1));
      }
    }
  }
  cutlass::arch::NamedBarrier::sync(kGroup, kBarrierGroup + warpgroup);
  constexpr int kChunk = sizeof(uint128_t) / sizeof(Element);
  Element* out = a.out.data + batch * a.out.batch + head * a.out.head;
  for (int i = consumer % kGroup; i < 64 * HEAD_DIM / kChunk; i += kGroup) {
    int in_tile = warpgroup * 64 + i / (HEAD_DIM / kChunk);
    int column = i % (HEAD_DIM / kChunk) * kChunk;
    int row = first_row + in_tile;
    if (row < a.seqlen_q) {
      auto chunk = reinterpret_cast<uint128_t const*>(&tile_q(in_tile, column));
      *reinterpret_cast<uint128_t*>(out + row * a.out.row + column) =
          blocks > 0 ? *chunk : uint128_t(uint64_t(0));
    }
  }
  if constexpr (kPersistent) {
    if (blocks > 0) {
      cutlass::arch::fence_view_async_shared();  // the copy engine brings another Q after O's stores
      __syncwarp();
      if (signals) {
        arrive_barrier(shared.q_read[query.slot]);
      }
    }
  }
}

// A consumer warpgroup: 64 rows of every tile.
CUTE_DEVICE void consume(Arguments const& a, Shared& shared) {
  Turns turns;
  int rounds = rounds_of(a);
  for (int round = 0; round < rounds; ++round) {
    BlockRows tile = rows_of(a, round);
    Walk walk = walk_of(a, tile.batch, tile.first_row);
    consume_tile(a, shared, walk, tile, turns);
    turns.pass(walk.blocks());
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_forward(__grid_constant__ Arguments const a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Shared& memory = *reinterpret_cast<Shared*>(shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < QUERY_SLOTS; ++slot) {
      initialize_barrier(memory.q_here[slot], 1);
      initialize_barrier(memory.q_read[slot], kConsumerWarps);
    }
    for (int slot = 0; slot < STAGES; ++slot) {
      initialize_barrier(memory.k_here[slot], 1);
      initialize_barrier(memory.v_here[slot], 1);
      initialize_barrier(memory.k_read[slot], kConsumerWarps);
      initialize_barrier(memory.v_read[slot], kConsumerWarps);
    }
    cutlass::arch::fence_view_async_shared();  // the copy engine completes them
  }
  __syncthreads();

  if (threadIdx.x < kGroup) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x < 32) {
      load(a, memory);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume(a, memory);
  }
}
