// What the forwards for Hopper share, whatever their elements are: threads, registers, an
// accumulator by row, one chain of products, turns of a ring, which keys a tile of rows sees, and
// what their producers load.
//
// A build defines ELEMENT, HEAD_DIM, BLOCK_M, BLOCK_N and STAGES, the slots of a ring; PERSISTENT,
// whether a program has many tiles of rows; and QUERY_SLOTS, of the ring of their Q.
#pragma once

#include "tuple_types.cuh"

#include <cuda/std/limits>
#include <cute/tensor.hpp>

#include "arguments.cuh"
#include "intervals.cuh"

namespace parts {

using namespace cute;
using intervals::Interval;

using Element = ELEMENT;
using HeadDim = Int<HEAD_DIM>;
using BlockM = Int<BLOCK_M>;
using BlockN = Int<BLOCK_N>;
using Stages = Int<STAGES>;
using QuerySlots = Int<QUERY_SLOTS>;
constexpr bool kPersistent = PERSISTENT;

constexpr int kGroup = 128;    // threads of a warpgroup
constexpr int kConsumers = 2;  // warpgroups, 64 rows each
constexpr int kThreads = (1 + kConsumers) * kGroup;
constexpr int kConsumerWarps = kConsumers * kGroup / 32;
static_assert(BLOCK_M == 64 * kConsumers);
using Warpgroups = Layout<Shape<Int<kConsumers>, _1, _1>>;

// Registers of a thread after warpgroups have traded them: 168 each at the launch.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (1 + kConsumers));

// An accumulator, ((pair, row, columns), M, N), as (all of a lane's rows, all of its columns).
template <class Accumulator>
CUTE_HOST_DEVICE auto by_row(Accumulator&& accumulator) {
  auto layout = accumulator.layout();
  auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  auto columns = make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout));
  return make_tensor(accumulator.data(), make_layout(rows, columns));
}

// Begin c (+)= a b over all k-steps; a and b are (registers or descriptor, k), c is one atom's
// accumulator.  The fences keep the compiler from moving what is written to registers past the
// products.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void begin_product(Mma mma, GMMA::ScaleOut first, A&& a, B&& b, C&& c) {
  constexpr bool kRegisters = !is_same_v<typename remove_cvref_t<A>::value_type, GmmaDescriptor>;
  if constexpr (kRegisters) {
    warpgroup_fence_operand(a);
  }
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = first;
  CUTE_UNROLL
  for (int k = 0; k < size<1>(a); ++k) {
    gemm(mma, a(_, k), b(_, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Wait until all products but the latest `later` ones are finished; operands: of those that are,
// registers that are read or written next.
template <int later, class... Operands>
CUTE_DEVICE void finish_product(Operands&&... operands) {
  warpgroup_wait<later>();
  (warpgroup_fence_operand(operands), ...);
}

// A product from its beginning to its end.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void multiply(Mma mma, GMMA::ScaleOut first, A&& a, B&& b, C&& c) {
  begin_product(mma, first, a, b, c);
  if constexpr (is_same_v<typename remove_cvref_t<A>::value_type, GmmaDescriptor>) {
    finish_product<0>(c);
  } else {
    finish_product<0>(c, a);
  }
}

// The slot of the t-th tile of a ring, and the parity of the phase that its arrival, or its last
// read, completes there.
template <int slots>
struct TurnOf {
  int slot, parity;
  CUTE_DEVICE explicit TurnOf(int t) : slot(t % slots), parity(t / slots % 2) {}
};
using Turn = TurnOf<STAGES>;
using QueryTurn = TurnOf<QUERY_SLOTS>;

// The tiles that have gone through the rings before a tile of rows begins.  A tile of rows that
// sees no key takes no turn.
struct Turns {
  int keys = 0, queries = 0;

  CUTE_HOST_DEVICE void pass(int blocks) {
    keys += blocks;
    queries += blocks > 0;
  }
};

// The tiles of rows of a program: its own, or, where programs are persistent, one of each round.
// A round is as many tiles as there are programs; every other one runs backwards, so that the
// program with the longest tile of a round has the shortest of the next.
template <class Arguments>
CUTE_DEVICE int rounds_of(Arguments const& a) {
  if constexpr (kPersistent) {
    int programs = int(gridDim.x), own = int(blockIdx.x);
    int full = a.tiles / programs;
    return full + ((full % 2 ? programs - 1 - own : own) < a.tiles - full * programs);
  }
  return 1;
}

// The tile of rows of a round.  One grid axis, so that batch x heads may exceed 65535; the last
// tile first, since causal rows grow longer.  Tiles of a head are neighbours, which read the same
// keys; by_length: the last tile of every head comes before any other.
struct BlockRows {
  int first_row, head, batch;
};
template <class Arguments>
CUTE_DEVICE BlockRows rows_of(Arguments const& a, int round) {
  int count = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  int tile = int(blockIdx.x);
  int place = tile % count, head = tile / count;  // the head among those of all batches
  if constexpr (kPersistent) {
    int programs = int(gridDim.x);
    tile = round * programs + (round % 2 ? programs - 1 - tile : tile);
    int heads = a.tiles / count;
    place = a.by_length ? tile / heads : tile % count;
    head = a.by_length ? tile % heads : tile / count;
  }
  return {(count - 1 - place) * BLOCK_M, head % a.heads_q, head / a.heads_q};
}

// What the rows of a tile see: `some` row sees a key outside of which none does, and every row sees
// all keys of `every`.
struct Walk {
  Interval some, every;

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

// The walk of the rows from `first` on, the same in every thread.  Each warp finds it on its own:
// its lanes take the rows in turn.
template <class Arguments>
CUTE_DEVICE Walk walk_of(Arguments const& a, int batch, int first) {
  constexpr int kMost = cuda::std::numeric_limits<int>::max();
  Walk walk{{kMost, 0}, {0, kMost}};
  for (int i = int(threadIdx.x) % 32; i < BLOCK_M; i += 32) {
    Interval seen = intervals::seen_by(a, batch, first + i);
    bool empty = seen.low >= seen.high;
    if (!empty) {
      walk.some = {min(walk.some.low, seen.low), max(walk.some.high, seen.high)};
    }
    walk.every = {max(walk.every.low, seen.low), empty ? 0 : min(walk.every.high, seen.high)};
  }
  constexpr unsigned kWarp = 0xffffffff;
  return {{__reduce_min_sync(kWarp, walk.some.low), __reduce_max_sync(kWarp, walk.some.high)},
          {__reduce_max_sync(kWarp, walk.every.low), __reduce_min_sync(kWarp, walk.every.high)}};
}

// The scores of a block that begins at `key`, by row: -inf where a row does not see the key.
// place: (row, key) of each x.
template <class X, class Place>
CUTE_DEVICE void hide_scores(X& x, Place const& place, Interval const* seen, int key) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(x); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(x); ++c) {
      int column = key + get<1>(place(r, c));
      if (column < seen[r].low || column >= seen[r].high) {
        x(r, c) = -cuda::std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace parts
