// delta = rowsum(dO O) in fp32, which flash_backward.cu reads.
//
// A build defines FORMAT (float16 or bfloat16) and HEAD_DIM, a multiple of 32.
#include "arguments.cuh"
#include "ptx.cuh"

constexpr int kLanes = 4;  // of a row
constexpr int kRows = 128 / kLanes;
constexpr ptx::Format kFormat = ptx::Format::FORMAT;

// Eight elements.
struct alignas(16) Chunk {
  unsigned int pairs[4];
};

struct Arguments {
  Strided<Chunk const> out, dout;  // strides in elements
  float* delta;                    // (batch, heads_q, seqlen_q), contiguous
  int heads_q;
  int seqlen_q;
};

extern "C" __global__ void __launch_bounds__(128) row_sums(Arguments const a) {
  int tiles = (a.seqlen_q + kRows - 1) / kRows;
  int row = int(blockIdx.x) % tiles * kRows + int(threadIdx.x) / kLanes;
  int head = int(blockIdx.x) / tiles % a.heads_q;
  int batch = int(blockIdx.x) / tiles / a.heads_q;
  int lane = int(threadIdx.x) % kLanes;
  bool inside = row < a.seqlen_q;

  float sum = 0.0f;
  if (inside) {
    auto row_of = [&](Strided<Chunk const> const& x) {
      return x.data + (batch * x.batch + head * x.head + row * x.row) / 8;
    };
    Chunk const* out = row_of(a.out);
    Chunk const* dout = row_of(a.dout);
#pragma unroll
    for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += kLanes) {
      Chunk o = out[chunk + lane];
      Chunk d = dout[chunk + lane];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float o0, o1, d0, d1;
        ptx::unpack<kFormat>(o.pairs[i], o0, o1);
        ptx::unpack<kFormat>(d.pairs[i], d0, d1);
        sum += o0 * d0;
        sum += o1 * d1;
      }
    }
  }
  sum += ptx::shfl_bfly(sum, 1);
  sum += ptx::shfl_bfly(sum, 2);
  if (inside && lane == 0) {
    a.delta[(static_cast<long long>(batch) * a.heads_q + head) * a.seqlen_q + row] = sum;
  }
}
