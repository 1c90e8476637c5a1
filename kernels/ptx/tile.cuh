// Tiles in shared memory: where their parts lie, and how they are filled.
#pragma once

#include "ptx.cuh"

using ptx::u32;

// How the rows of a tile lie: `padded` by 16 bytes each, or `swizzled` without a gap.
enum class Rows { padded, swizzled };

// A tile of `ROWS` rows of `BYTES` bytes.  A chunk is 16 bytes: what one cp.async copies, and one
// row of an 8x8 matrix.
template <int ROWS, int BYTES, Rows PLACED>
struct Tile {
    static_assert(BYTES % 32 == 0);
    static constexpr int rows = ROWS;
    static constexpr int chunks = BYTES / 16;
    static constexpr int pitch = 16 * (chunks + (PLACED == Rows::padded));
    static constexpr int bytes = ROWS * pitch;

    // ldmatrix reads the same chunk of eight rows at once, and eight lanes of a copy write up to
    // eight chunks of a row.  Both need eight different sixteenths of the banks' 128 bytes.  A
    // padded row has an odd number of chunks, so eight rows begin at eight of them.  Rows of 8 n
    // chunks all begin at the same one: chunk c of row r lies at place c ^ r % 8.  Rows of 4 n
    // (2 n) begin at two (four), in turn: c ^ r / 2 % 4 (c ^ r / 4 % 2).
    static constexpr int apart = chunks % 8 == 0 ? 1 : chunks % 4 == 0 ? 2 : 4;

    __device__ __forceinline__ static u32 place(u32 row, u32 chunk) {
        if constexpr (PLACED == Rows::padded) {
            return row * pitch + 16 * chunk;
        } else {
            return row * pitch + 16 * (chunk ^ row / apart % (8 / apart));
        }
    }
};

// Copy CHUNKS of rows first ... into a tile of T's shape, from its chunk `tile_chunk` on; zeros
// from row `end` on (end > 0) and, if rows END, from byte `row_end` of each on: what lies there is
// not read.  Rows are `row_bytes` apart.  A chunk in which rows end is left to `copy_part`.
//
// THREADS copy so many rows at once that a thread keeps its chunk and, where there is room for
// eight rows, its place in the pattern of a swizzle: from one row to its next only constants
// change.
template <class T, int THREADS, int CHUNKS = T::chunks, bool END = false>
__device__ __forceinline__ void copy(
    u32 tile, const char* data, long long row_bytes, int first, int end, int tile_chunk = 0,
    int row_end = 0
) {
    constexpr int most = THREADS / CHUNKS;
    constexpr int rows = most < 8 ? most : most / 8 * 8;
    static_assert(rows > 0);
    const int row = static_cast<int>(threadIdx.x) / CHUNKS;
    const int chunk = static_cast<int>(threadIdx.x) % CHUNKS;
    const int left = end - first - row;
    const bool whole = !END || 16 * chunk + 16 <= row_end;
    const char* from = data + (first + row) * row_bytes + 16 * chunk;
    if ((rows * CHUNKS < THREADS && row >= rows) || (!whole && 16 * chunk < row_end)) {
        return;
    }
#pragma unroll
    for (int i = 0; i < T::rows; i += rows) {
        if (T::rows % rows == 0 || row + i < T::rows) {
            const u32 to = tile + T::place(row + i, tile_chunk + chunk);
            ptx::cp_async_cg(to, from, whole && i < left ? 16 : 0);
        }
        from += rows * row_bytes;
    }
}

// The chunk in which all rows of a tile of 16-bit elements end, from byte `row_end` on zeros.  By
// elements: memcheck takes an asynchronous copy of a part of a chunk for a read of all of it.
template <class T, int THREADS>
__device__ __forceinline__ void copy_part(
    unsigned char* tile, const char* data, long long row_bytes, int row_end
) {
    const int chunk = row_end / 16;
    if (row_end % 16 == 0 || chunk >= T::chunks) {
        return;
    }
    const int byte = 2 * (static_cast<int>(threadIdx.x) % 8);
    const bool there = 16 * chunk + byte < row_end;
    int row = static_cast<int>(threadIdx.x) / 8;
    const char* from = data + row * row_bytes + 16 * chunk + byte;
#pragma unroll 1
    for (; row < T::rows; row += THREADS / 8) {
        *reinterpret_cast<unsigned short*>(tile + T::place(row, chunk) + byte) =
            there ? *reinterpret_cast<const unsigned short*>(from) : 0;
        from += THREADS / 8 * row_bytes;
    }
}
