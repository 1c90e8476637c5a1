// What kernels for Hopper share, whatever their elements are: an accumulator by row, one chain of
// products, turns of a ring, and which keys a tile of rows sees.
#pragma once

#include "tuple_types.cuh"

#include <cuda/std/limits>
#include <cute/tensor.hpp>

#include "intervals.cuh"
#include "ptx.cuh"

namespace parts {

using namespace cute;
using intervals::Interval;

// An accumulator, ((pair, row, columns), M, N), as (all of a lane's rows, all of its columns).
template <class Accumulator>
CUTE_HOST_DEVICE auto by_row(Accumulator&& accumulator) {
  auto layout = accumulator.layout();
  auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  auto columns = make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout));
  return make_tensor(accumulator.data(), make_layout(rows, columns));
}

// c (+)= a b over all k-steps, finished; a and b are (registers or descriptor, k), c is one atom's
// accumulator.  The fences keep the compiler from moving what is written to registers past the
// products.
template <class Mma, class A, class B, class C>
CUTE_DEVICE void multiply(Mma mma, GMMA::ScaleOut first, A&& a, B&& b, C&& c) {
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
  warpgroup_wait<0>();
  warpgroup_fence_operand(c);
  if constexpr (kRegisters) {
    warpgroup_fence_operand(a);
  }
}

// The slot of the t-th tile of a ring, and the parity of the phase that its arrival, or its last
// read, completes there.
template <int stages>
struct Turn {
  int slot, parity;
  CUTE_DEVICE explicit Turn(int t) : slot(t % stages), parity(t / stages % 2) {}
};

// What the rows of a tile see, in blocks of `length` keys: `some` row sees a key outside of which
// none does, and every row sees all keys of `every`.
template <int length>
struct Walk {
  Interval some, every;

  CUTE_HOST_DEVICE int first_block() const { return some.low / length; }
  CUTE_HOST_DEVICE int blocks() const {
    return some.low < some.high ? (some.high + length - 1) / length - first_block() : 0;
  }
  // Whether a block, which begins at `key`, needs a comparison.
  CUTE_HOST_DEVICE bool masked(int key) const {
    return key < every.low || key + length > every.high;
  }
  // Whether no row sees some key of it: its value may be NaN, which 0 in P would not hide.
  CUTE_HOST_DEVICE bool hides(int key) const {
    return key < some.low || key + length > some.high;
  }
};

// The walk of `rows` rows from `first` on, the same in every thread.  Each warp finds it on its
// own: its lanes take the rows in turn.
template <int rows, int length, class Arguments>
CUTE_DEVICE Walk<length> walk_of(Arguments const& a, int batch, int first) {
  constexpr int kMost = cuda::std::numeric_limits<int>::max();
  Walk<length> walk{{kMost, 0}, {0, kMost}};
  for (int i = int(threadIdx.x) % 32; i < rows; i += 32) {
    Interval seen = intervals::seen_by(a, batch, first + i);
    bool empty = seen.low >= seen.high;
    if (!empty) {
      walk.some = {min(walk.some.low, seen.low), max(walk.some.high, seen.high)};
    }
    walk.every = {max(walk.every.low, seen.low), empty ? 0 : min(walk.every.high, seen.high)};
  }
  using intervals::least;
  return {{least(walk.some.low), -least(-walk.some.high)},
          {-least(-walk.every.low), least(walk.every.high)}};
}

}  // namespace parts
