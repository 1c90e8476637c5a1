// Loops that use one unit of an SM and nothing else, for verify.timing.peaks.  Above each stands
// how many operations or bytes a thread (or a warp) does per round.  Results reach memory only if
// they are a value that they never have, so that no loop is removed.
//
// MMA: the function of ptx.cuh that `mma_peak` runs, with a fp32 accumulator.
#include "ptx.cuh"

using u32 = ptx::u32;

struct Arguments {
    const uint4* data;  // `words` of them, a power of two
    float* sink;
    u32 words;
    u32 rounds;
    float factor;  // not known to the compiler
};

constexpr int chains = 8;  // independent results, which hide the latency of one

__device__ __forceinline__ void keep(const Arguments& args, float x) {
    if (x == -1.25f) {
        args.sink[threadIdx.x] = x;
    }
}

// 16 * chains multiply-adds a thread and round.
extern "C" __global__ void __launch_bounds__(1024) fma_peak(const Arguments args) {
    float x[chains];
    for (int i = 0; i < chains; ++i) {
        x[i] = static_cast<float>(threadIdx.x + i);
    }
    for (u32 round = 0; round < args.rounds; ++round) {
#pragma unroll
        for (int step = 0; step < 16; ++step) {
#pragma unroll
            for (int i = 0; i < chains; ++i) {
                x[i] = fmaf(x[i], args.factor, args.factor);
            }
        }
    }
    float sum = 0.0f;
    for (int i = 0; i < chains; ++i) {
        sum += x[i];
    }
    keep(args, sum);
}

// 16 * chains exponentials a thread and round.
extern "C" __global__ void __launch_bounds__(1024) ex2_peak(const Arguments args) {
    float x[chains];
    for (int i = 0; i < chains; ++i) {
        x[i] = args.factor * static_cast<float>(threadIdx.x + i);
    }
    for (u32 round = 0; round < args.rounds; ++round) {
#pragma unroll
        for (int step = 0; step < 16; ++step) {
#pragma unroll
            for (int i = 0; i < chains; ++i) {
                x[i] = ptx::ex2(x[i]);
            }
        }
    }
    float sum = 0.0f;
    for (int i = 0; i < chains; ++i) {
        sum += x[i];
    }
    keep(args, sum);
}

// 16 loads of 8 bytes a thread and round, without bank conflicts.
extern "C" __global__ void __launch_bounds__(1024) shared_peak(const Arguments args) {
    __shared__ unsigned long long words[4096];
    for (int i = threadIdx.x; i < 4096; i += blockDim.x) {
        words[i] = i;
    }
    __syncthreads();
    const volatile unsigned long long* from = words + threadIdx.x;
    unsigned long long sum = 0;
    for (u32 round = 0; round < args.rounds; ++round) {
#pragma unroll
        for (int step = 0; step < 16; ++step) {
            sum ^= from[1024 * (step % 4)];
        }
    }
    keep(args, static_cast<float>(sum));
}

// The grid reads all words once a round, 16 bytes a thread and load, past the L1 cache.
extern "C" __global__ void __launch_bounds__(1024) l2_peak(const Arguments args) {
    const u32 threads = gridDim.x * blockDim.x;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    u32 sum = 0;
    for (u32 round = 0; round < args.rounds; ++round) {
#pragma unroll 4
        for (u32 word = thread; word < args.words; word += threads) {
            // Another place in each round: a load whose address repeats could be left out.
            const uint4 found = __ldcg(args.data + ((word + round * 1024) & (args.words - 1)));
            sum ^= found.x ^ found.y ^ found.z ^ found.w;
        }
    }
    keep(args, static_cast<float>(sum));
}

#ifdef MMA
// 4 * chains products a warp and round.
extern "C" __global__ void __launch_bounds__(1024) mma_peak(const Arguments args) {
    float c[chains][4] = {};
    // Operands of many bits, since zeros take less power, and none of them NaN in any format.
    u32 a[6];
    for (u32 i = 0; i < 6; ++i) {
        a[i] = 0x3c003c00u ^ ((threadIdx.x * 6 + i + args.rounds) * 2654435761u & 0x83bf83bfu);
    }
    const u32 rows[4] = {a[0], a[1], a[2], a[3]};
    for (u32 round = 0; round < args.rounds; ++round) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int i = 0; i < chains; ++i) {
                MMA(c[i], rows, a[4], a[5]);
            }
        }
    }
    float sum = 0.0f;
    for (int i = 0; i < chains; ++i) {
        sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    }
    keep(args, sum);
}
#endif
