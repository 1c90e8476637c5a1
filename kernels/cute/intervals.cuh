// Which keys rows see, as plain arguments: a band between two diagonals, or a table of intervals.
//
// `Arguments` is a kernel's own: it has row_low, row_high, seqlen_q, seqlen_kv, diagonal_low and
// diagonal_high, as kernels/cuda/arguments.cuh declares them.
#pragma once

#include "tuple_types.cuh"

#include <cute/tensor.hpp>

#include "ptx.cuh"

namespace intervals {

using namespace cute;

// Keys that a row sees, or rows of a walk.
struct Interval {
  int low, high;
};

// A row past the end sees what the last one does.
template <class Arguments>
CUTE_DEVICE Interval seen_by(Arguments const& a, int batch, int row) {
  row = min(row, a.seqlen_q - 1);
  if (a.row_low != nullptr) {
    int64_t place = int64_t(batch) * a.seqlen_q + row;
    return {a.row_low[place], a.row_high[place]};
  }
  int low = min(max(row + a.diagonal_low, 0), a.seqlen_kv);
  return {low, max(int(min(int64_t(row) + a.diagonal_high + 1, int64_t(a.seqlen_kv))), low)};
}

// What a block walks over: steps some pair of which is visible, and of these the ones all pairs of
// which are, which need no mask.
struct Walk {
  Interval some, whole;
};

CUTE_DEVICE int least(int x) {
  CUTE_UNROLL
  for (int bits = 1; bits < 32; bits *= 2) {
    x = min(x, int(ptx::shfl_bfly(uint32_t(x), bits)));
  }
  return x;
}

// Steps of `length` keys, or rows.
template <int length>
CUTE_DEVICE Walk steps_of(Interval some, Interval whole) {
  Walk walk{{some.low / length, (some.high + length - 1) / length}, {0, 0}};
  walk.whole = {(whole.low + length - 1) / length, whole.high / length};
  if (some.low >= some.high) {
    walk.some = {0, 0};
  }
  return walk;
}

// Keys that one of `rows` rows from `first` on sees; sets `end`, from which on none does.
template <int rows, int length, class Arguments>
CUTE_DEVICE Walk keys_to_walk(Arguments const& a, int batch, int first, int& end) {
  Interval some{a.seqlen_kv, 0};
  Interval whole{0, a.seqlen_kv};
  CUTE_UNROLL
  for (int i = 0; i < rows; i += 32) {  // each warp looks at all
    Interval seen = seen_by(a, batch, first + i + int(threadIdx.x) % 32);
    if (seen.low < seen.high) {
      some = {min(some.low, seen.low), max(some.high, seen.high)};
    }
    whole = {max(whole.low, seen.low), min(whole.high, seen.high)};
  }
  end = -least(-some.high);
  return steps_of<length>({least(some.low), end}, {-least(-whole.low), least(whole.high)});
}

}  // namespace intervals
