// One matrix instruction, as often as asked for, on operands as they lie in memory: what
// verify.probes.instructions lists.
//
// FUNCTION: of ptx.cuh or ptx_probes.cuh.  ROW_BYTES: of a row of A or a column of B, 16 or 32.
// HALF: 1 for a fp16 accumulator, else fp32.  WARPGROUP: 1 for wgmma, else mma.sync.  DOUBLE: 1 for
// fp64, whose fragments are others.
//
// A tile is ROWS rows of A, eight columns of B and ROWS x 8 of C and of D, each contiguous, row
// after row of A, column after column of B.  A warp, or a warpgroup, takes one tile.  Layouts are
// those of ptx.cuh.
#include "ptx_probes.cuh"

using u32 = ptx::u32;
using u8 = unsigned char;

constexpr int columns = 8;

struct Arguments {
    const u8* a;  // (tiles, ROWS, ROW_BYTES)
    const u8* b;  // (tiles, 8, ROW_BYTES)
    const u8* c;  // (tiles, ROWS, 8) of the accumulator's type
    u8* d;        // the same
    u32 tiles;
};

#if DOUBLE

extern "C" __global__ void __launch_bounds__(128) mma(const Arguments args) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 tile = blockIdx.x * 4 + threadIdx.x / 32;
    if (tile >= args.tiles) {
        return;
    }
    const double* a = reinterpret_cast<const double*>(args.a) + tile * 8 * 4;
    const double* b = reinterpret_cast<const double*>(args.b) + tile * 8 * 4;
    const u32 place = tile * 8 * columns + g * columns + 2 * t;
    const double* from = reinterpret_cast<const double*>(args.c) + place;
    double* to = reinterpret_cast<double*>(args.d) + place;
    double c[2] = {from[0], from[1]};
    FUNCTION(c, a[4 * g + t], b[4 * g + t]);
    to[0] = c[0];
    to[1] = c[1];
}

#else

constexpr int rows = WARPGROUP ? 64 : 16;
constexpr int registers = ROW_BYTES / 8;  // of A per lane; B has half as many

#if HALF
using Element = unsigned short;
#else
using Element = float;
#endif

// Registers that the instruction takes as C and D, from and to rows g and g + 8, columns 2t and 2t + 1.
struct Accumulator {
#if HALF
    u32 c[2];

    __device__ __forceinline__ void read(int i, const Element* from) {
        c[i] = static_cast<u32>(from[0]) | static_cast<u32>(from[1]) << 16;
    }
    __device__ __forceinline__ void write(int i, Element* to) const {
        to[0] = static_cast<Element>(c[i] & 0xffff);
        to[1] = static_cast<Element>(c[i] >> 16);
    }
#else
    float c[4];

    __device__ __forceinline__ void read(int i, const Element* from) {
        c[2 * i] = from[0];
        c[2 * i + 1] = from[1];
    }
    __device__ __forceinline__ void write(int i, Element* to) const {
        to[0] = c[2 * i];
        to[1] = c[2 * i + 1];
    }
#endif
};

__device__ __forceinline__ u32 word(const u8* from) {
    return *reinterpret_cast<const u32*>(from);
}

#if WARPGROUP
// The tile's B, two blocks of eight columns and 16 bytes along K: everything that one instruction reads of it.
__device__ __forceinline__ unsigned long long shared_b(const u8* b, u8* blocks) {
    if (threadIdx.x < 2 * columns) {
        const u32 half = threadIdx.x / columns, column = threadIdx.x % columns;
        for (u32 i = 0; i < 16; i += 4) {
            *reinterpret_cast<u32*>(blocks + 128 * half + 16 * column + i) = word(b + column * ROW_BYTES + 16 * half + i);
        }
    }
    ptx::fence_proxy_async();
    __syncthreads();
    return ptx::wgmma_descriptor(ptx::shared_address(blocks), 128, 128);
}
#endif

extern "C" __global__ void __launch_bounds__(128) mma(const Arguments args) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if WARPGROUP
    extern __shared__ __align__(1024) u8 shared[];
    const u32 tile = blockIdx.x, first = 16 * warp;
#else
    const u32 tile = blockIdx.x * 4 + warp, first = 0;
#endif
    if (tile >= args.tiles) {
        return;
    }
    const u8* a = args.a + (tile * rows + first + g) * ROW_BYTES + 4 * t;
    const u8* b = args.b + tile * columns * ROW_BYTES;
    const u32 place = (tile * rows + first + g) * columns + 2 * t;
    const Element* from = reinterpret_cast<const Element*>(args.c) + place;
    Element* to = reinterpret_cast<Element*>(args.d) + place;

    Accumulator accumulator;
    accumulator.read(0, from);
    accumulator.read(1, from + 8 * columns);
    u32 left[registers];
    for (int r = 0; r < registers; ++r) {
        left[r] = word(a + r % 2 * 8 * ROW_BYTES + r / 2 * 16);
    }
#if WARPGROUP
    const unsigned long long right = shared_b(b, shared);
    ptx::wgmma_fence();
    FUNCTION(accumulator.c, left, right);
    ptx::wgmma_finish();
#elif ROW_BYTES == 16
    FUNCTION(accumulator.c, left, word(b + g * ROW_BYTES + 4 * t));
#else
    FUNCTION(accumulator.c, left, word(b + g * ROW_BYTES + 4 * t), word(b + g * ROW_BYTES + 4 * t + 16));
#endif
    accumulator.write(0, to);
    accumulator.write(1, to + 8 * columns);
}

#endif
