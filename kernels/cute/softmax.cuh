// The running softmax of a lane's rows, and their end: what the forwards share, whichever unit
// multiplies.
//
// x and o are accumulators by row, as the kernel's `by_row` gives them; a row lies in four
// neighbouring lanes.
#pragma once

#include "tuple_types.cuh"

#include <cuda/std/limits>
#include <cute/tensor.hpp>

#include "ptx.cuh"

namespace softmax {

using namespace cute;

constexpr float kInfinity = cuda::std::numeric_limits<float>::infinity();

// The maximum of row r of x and of `so_far`, in all four lanes.
template <class X>
CUTE_DEVICE float largest_of(X const& x, int r, float so_far) {
  float largest = so_far;
  CUTE_UNROLL
  for (int c = 0; c < size<1>(x); ++c) {
    largest = fmaxf(largest, x(r, c));
  }
  largest = fmaxf(largest, ptx::shfl_bfly(largest, 1));
  return fmaxf(largest, ptx::shfl_bfly(largest, 2));
}

// One block of scores x, log2-scaled and masked, becomes p; the statistics and o follow.
template <class X, class O, class Statistic>
CUTE_DEVICE void online_softmax(X& x, O& o, Statistic& row_max, Statistic& row_sum) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(x); ++r) {
    float largest = largest_of(x, r, row_max(r));
    // While a row has seen no key, the maximum is -inf: subtract 0 instead, since -inf - -inf is
    // NaN.
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

// After the last block o becomes O, and the natural LSE is written; place: (row, column) of each x,
// in a tile that begins at first_row.
template <class Arguments, class Place, class O, class Statistic>
CUTE_DEVICE void finish_rows(Arguments const& a, int batch, int head, int first_row,
                             Place const& place, O& o, Statistic const& row_max,
                             Statistic const& row_sum) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(o); ++r) {
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
      int64_t place_of_row = (int64_t(batch) * a.heads_q + head) * a.seqlen_q + row;
      a.lse[place_of_row] = 0.69314718f * (row_max(r) + log2f(denominator));
    }
  }
}

}  // namespace softmax
