// The running softmax of a lane's rows whose scale is part of the exponent.
//
// x and o are accumulators by row, as in softmax.cuh, which comes first.
#pragma once

#include "tuple_types.cuh"

#include <cute/tensor.hpp>

#include "ptx.cuh"

namespace softmax {

// One block of masked sums x = q . k becomes p; the statistics and o follow.  Log2-scaled, x is
// `factor` > 0 times as large.  p = 2^(factor x - M) and alpha = 2^(M - M') take one fused
// operation and one subtraction, M being the rounded product of factor and the maximum; row_max
// stays a maximum of sums.
//
// lazy: o is left alone where no row of the warp has a new maximum, since every alpha is 1 there.
template <bool lazy, class X, class O, class Statistic>
CUTE_DEVICE void fused_online_softmax(X& x, O& o, float factor, Statistic& row_max,
                                      Statistic& row_sum) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(x); ++r) {
    float largest = largest_of(x, r, row_max(r));
    float shift = largest == -kInfinity ? 0.0f : __fmul_rn(factor, largest);
    float alpha = ptx::ex2(__fsub_rn(__fmul_rn(factor, row_max(r)), shift));
    float sum = 0.0f;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(x); ++c) {
      x(r, c) = ptx::ex2(__fmaf_rn(x(r, c), factor, -shift));
      sum += x(r, c);
    }
    if (!lazy || __any_sync(0xffffffff, alpha != 1.0f)) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(o); ++c) {
        o(r, c) *= alpha;
      }
    }
    row_sum(r) = row_sum(r) * alpha + sum;
    row_max(r) = largest;
  }
}

}  // namespace softmax
