// What differs between the tilings and the builds of this folder, and where a build keeps what in
// shared memory.
#pragma once

#include "arguments.cuh"
#include "tile.cuh"

using Arguments = ArgumentsOf<char>;  // strides in bytes, multiples of 16

enum class Query {
    registers,  // in a tile, from which its fragments are read once
    shared,     // in a tile, from which its fragments are read for every block of keys
    ring,       // through the ring's slots, before the first item, into registers
    sliced,     // with every item of K
};

// The keys that rows see: all; those from a diagonal to a diagonal; those in a table by batch and
// row.
enum class Mask { full, band, table };

// How K lies in memory: a row of columns for each key, or a row of keys for each column.
enum class Storage { strided, transposed };

struct Interval {
    int low, high;  // [low, high)
};

// Of a sum of 8-bit products sm_89 keeps 13 bits, the others keep as many as fp32 has.
#if __CUDA_ARCH__ == 890
constexpr bool coarse_sums = true;
#else
constexpr bool coarse_sums = false;
#endif

// C += A B, in fp32: where sums are coarse, 32 products begin at zero, and fp32 adds them.
template <ptx::Format format>
__device__ __forceinline__ void add_product(
    float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1
) {
    if constexpr (ptx::size_of<format> == 2) {
        ptx::mma_m16n8k16<format>(c, a, b0, b1);
    } else if constexpr (!coarse_sums) {
        ptx::mma_m16n8k32<format>(c, a, b0, b1);
    } else {
        float part[4] = {};
        ptx::mma_m16n8k32<format>(part, a, b0, b1);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            c[e] += part[e];
        }
    }
}

// A 16x8 accumulator in fp32.
struct Wide {
    float c[4] = {};

    template <ptx::Format format>
    __device__ __forceinline__ void multiply(const u32 (&a)[4], u32 b0, u32 b1) {
        add_product<format>(c, a, b0, b1);
    }
    __device__ __forceinline__ void read(float (&to)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            to[e] = c[e];
        }
    }
};

// The same in fp16.
struct Narrow {
    u32 c[2] = {};

    template <ptx::Format format>
    __device__ __forceinline__ void multiply(const u32 (&a)[4], u32 b0, u32 b1) {
        static_assert(format == ptx::Format::float16);
        ptx::mma_m16n8k16_f16(c, a, b0, b1);
    }
    __device__ __forceinline__ void read(float (&to)[4]) const {
        ptx::unpack<ptx::Format::float16>(c[0], to[0], to[1]);
        ptx::unpack<ptx::Format::float16>(c[1], to[2], to[3]);
    }
};

// What the defines of a build say; a .cu file derives its tiling from it.
struct Build {
    static constexpr ptx::Format format = ptx::Format::FORMAT;
    static constexpr int element = ptx::size_of<format>;  // bytes
    static constexpr bool eight_bits = element == 1;
    static constexpr int mma_depth = 32 / element;  // terms of a sum in one MMA
    static constexpr ptx::Format out_format = eight_bits ? ptx::Format::bfloat16 : format;
    // P is 2^p_exponent times as large: 8 bits hold little of what is far below 1.
    static constexpr int p_exponent = eight_bits ? 8 : 0;
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int block_m = BLOCK_M;
    static constexpr int block_n = BLOCK_N;
    static constexpr int stages = STAGES;
    static constexpr int warps_m = WARPS_M;
    static constexpr int warps_n = WARPS_N;
    static constexpr int threads = 32 * WARPS_M * WARPS_N;
    static constexpr Mask mask = Mask::MASK;
    static constexpr Storage storage_k = Storage::K_STORAGE;
    static constexpr Rows rows_q = Rows::ROWS_Q;
    static constexpr Rows rows_k = Rows::ROWS_K;
    static constexpr Rows rows_v = Rows::ROWS_V;
    static constexpr bool heads_first = HEADS_FIRST;
    using Scores = SCORES;  // accumulators of Q K^T: Wide or Narrow
    using Values = VALUES;  // and of P V, in a block of keys
    // Whether Q is multiplied by the scale first, so that sums in fp16 are scores.
    static constexpr bool prescaled = sizeof(SCORES) == sizeof(Narrow);
};

// Where everything lies in shared memory; family.py computes the same number of bytes.
template <class T>
struct Memory {
    static constexpr bool v_apart = T::width == 0;
    static constexpr int width = v_apart ? T::head_dim : T::width;
    static constexpr bool q_resident = T::query == Query::registers || T::query == Query::shared;
    static constexpr bool q_sliced = T::query == Query::sliced;
    static constexpr bool k_transposed = T::storage_k == Storage::transposed;
    static_assert(!k_transposed || !T::eight_bits);  // ldmatrix transposes 16 bits

    static constexpr int row_bytes = T::element * T::head_dim;
    static constexpr int depth_bytes = T::element * T::depth;
    static constexpr int width_bytes = T::element * width;
    static constexpr int keys_bytes = T::element * T::block_n;

    using QTile = Tile<T::block_m, row_bytes, T::rows_q>;
    using QSlice = Tile<T::block_m, depth_bytes, T::rows_q>;
    using KSlice = Tile<
        k_transposed ? T::depth : T::block_n, k_transposed ? keys_bytes : depth_bytes, T::rows_k>;
    using VSlice = Tile<T::block_n, width_bytes, T::rows_v>;
    using PTile = Tile<T::block_m, keys_bytes, Rows::swizzled>;
    // As many rows of Q as the ring holds, where Q goes through it.
    using QPiece = Tile<T::slots * T::block_n, row_bytes, T::rows_q>;

    __device__ static constexpr int larger(int a, int b) { return a > b ? a : b; }
    static constexpr int k_offset = q_sliced ? QSlice::bytes : 0;  // of K in an item
    static constexpr int item = larger(k_offset + KSlice::bytes, v_apart ? 0 : VSlice::bytes);
    static constexpr int ring_items = T::slots * item;

    static constexpr int ring = q_resident ? QTile::bytes : 0;
    static constexpr int v =
        ring + (T::query == Query::ring ? larger(ring_items, QPiece::bytes) : ring_items);
    static constexpr int p = v + (v_apart ? VSlice::bytes : 0);
    static constexpr int partial = p + (T::warps_n > 1 ? PTile::bytes : 0);
    static constexpr int bytes = partial + (T::warps_n > 1 ? 4 * T::warps_n * T::block_m : 0);
};
