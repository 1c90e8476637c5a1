// FlashAttention-2 forward for mma.sync: one template for all tilings of this folder.
//
// A block owns BLOCK_M query rows of one head and walks over the keys in blocks of BLOCK_N.  Each
// block of keys takes a fixed number of steps: first S = Q K^T, in one step or in slices of head_dim,
// then O += P V, in one step or in slices of V's columns.  What a step reads from memory is an
// *item*: it goes through one of the SLOTS of a ring in shared memory, in the order of the steps.
// Items of the next SLOTS - 1 steps travel while a step computes.
//
// A tiling says, and nothing else is different between two of them:
//
//     query         where Q stays: see `Query`
//     depth         columns of Q and K in an item (head_dim: one step)
//     width         columns of V in an item (head_dim: one step; 0: V has a tile of its own, which is
//                   filled beside the items of Q K^T)
//     slots         items in shared memory
//     warps_m, _n   warps that share the rows, and warps that share the keys of S and the columns of
//                   O; with warps_n > 1 statistics and P go through shared memory
//
// forward.py and the .cu files say what each is for; docs/ptx.md draws them.
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

struct Interval {
    int low, high;  // [low, high)
};

// A 16x8 accumulator in fp32.
struct Wide {
    float c[4] = {};

    template <ptx::Format format>
    __device__ __forceinline__ void multiply(const u32 (&a)[4], u32 b0, u32 b1) {
        ptx::mma_m16n8k16<format>(c, a, b0, b1);
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
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int block_m = BLOCK_M;
    static constexpr int block_n = BLOCK_N;
    static constexpr int stages = STAGES;
    static constexpr int warps_m = WARPS_M;
    static constexpr int warps_n = WARPS_N;
    static constexpr int threads = 32 * WARPS_M * WARPS_N;
    static constexpr Mask mask = Mask::MASK;
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

    using QTile = Tile<T::block_m, T::head_dim, T::rows_q>;
    using QSlice = Tile<T::block_m, T::depth, T::rows_q>;
    using KSlice = Tile<T::block_n, T::depth, T::rows_k>;
    using VSlice = Tile<T::block_n, width, T::rows_v>;
    using PTile = Tile<T::block_m, T::block_n, Rows::swizzled>;
    // As many rows of Q as the ring holds, where Q goes through it.
    using QPiece = Tile<T::slots * T::block_n, T::head_dim, T::rows_q>;

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

template <class T>
struct Flash {
    using M = Memory<T>;
    static constexpr int row_tiles = T::block_m / (16 * T::warps_m);     // of a warp
    static constexpr int key_tiles = T::block_n / (8 * T::warps_n);      // of a warp, in S
    static constexpr int width_tiles = M::width / (8 * T::warps_n);      // of a warp, in a step of P V
    static constexpr int score_steps = T::head_dim / T::depth;
    static constexpr int value_steps = T::head_dim / M::width;
    static constexpr int steps = score_steps + (M::v_apart ? 0 : value_steps);
    static constexpr int out_tiles = value_steps * width_tiles;
    static constexpr int ahead = T::slots - 1;
    static constexpr bool q_kept = T::query == Query::registers || T::query == Query::ring;
    static_assert(T::block_m % (16 * T::warps_m) == 0);
    static_assert((key_tiles == 1 || key_tiles % 2 == 0) && width_tiles % 2 == 0);
    static_assert(!M::v_apart || (score_steps > ahead && ahead <= 1));
    static_assert(score_steps == 1 || M::q_sliced);

    using Scores = typename T::Scores;
    using Values = typename T::Values;
    static constexpr bool values_wide = sizeof(Values) == sizeof(Wide);

    const Arguments& a;
    u32 shared;
    const char *q, *k, *v;
    int first_row, batch, head;
    int lane, warp_m, warp_n;
    int first_block, end_block, end_key;
    int masked_below, masked_from;  // keys outside [masked_below, masked_from) need a mask
    u32 read_slot = 0, write_slot = 0;

    __device__ __forceinline__ explicit Flash(const Arguments& arguments, u32 shared_)
        : a(arguments), shared(shared_) {
        lane = threadIdx.x % 32;
        const int warp = threadIdx.x / 32;
        warp_m = warp / T::warps_n;
        warp_n = warp % T::warps_n;

        // One grid axis, so that batch x heads can exceed 65535.
        const int tiles = (a.seqlen_q + T::block_m - 1) / T::block_m;
        const int block = static_cast<int>(blockIdx.x);
        int tile, rest;
        if (T::heads_first) {
            const int rows_of_heads = static_cast<int>(gridDim.x) / tiles;
            tile = block / rows_of_heads;
            rest = block % rows_of_heads;
        } else {
            tile = block % tiles;
            rest = block / tiles;
        }
        first_row = (tiles - 1 - tile) * T::block_m;  // the last first: causal rows grow longer
        head = rest % a.heads_q;
        batch = rest / a.heads_q;
        q = a.q.data + batch * a.q.batch + head * a.q.head;
        k = a.k.data + batch * a.k.batch + head / a.group * a.k.head;
        v = a.v.data + batch * a.v.batch + head / a.group * a.v.head;
        find_blocks();
    }

    // The keys that a row sees; a row past the end sees what the last row sees.
    __device__ __forceinline__ Interval visible(int row) const {
        if constexpr (T::mask == Mask::full) {
            return {0, a.seqlen_kv};
        } else if constexpr (T::mask == Mask::band) {
            const int r = min(row, a.seqlen_q - 1);
            const int low = min(max(r + a.diagonal_low, 0), a.seqlen_kv);
            return {low, max(min(r + a.diagonal_high + 1, a.seqlen_kv), low)};
        } else {
            const long long place =
                static_cast<long long>(batch) * a.seqlen_q + min(row, a.seqlen_q - 1);
            return {a.row_low[place], a.row_high[place]};
        }
    }

    // Blocks that some row of the tile sees, and keys that all of its rows see.
    __device__ __forceinline__ void find_blocks() {
        int low = a.seqlen_kv, high = 0;  // of some
        masked_below = 0, masked_from = a.seqlen_kv;
        if constexpr (T::mask == Mask::table) {
            // Each warp looks at all rows.
#pragma unroll
            for (int i = 0; i < T::block_m; i += 32) {
                const Interval seen = visible(first_row + i + lane);
                if (seen.low < seen.high) {
                    low = min(low, seen.low);
                    high = max(high, seen.high);
                }
                masked_below = max(masked_below, seen.low);
                masked_from = min(masked_from, seen.high);
            }
#pragma unroll
            for (int bits = 1; bits < 32; bits *= 2) {
                low = min(low, shuffled(low, bits));
                high = max(high, shuffled(high, bits));
                masked_below = max(masked_below, shuffled(masked_below, bits));
                masked_from = min(masked_from, shuffled(masked_from, bits));
            }
        } else {
            const Interval first = visible(first_row);
            const Interval last = visible(first_row + T::block_m - 1);
            low = first.low;
            high = last.high;
            masked_below = last.low;
            masked_from = first.high;
        }
        end_key = high;
        first_block = low / T::block_n;
        end_block = low < high ? (high + T::block_n - 1) / T::block_n : first_block;
    }

    __device__ __forceinline__ static int shuffled(int x, int bits) {
        return static_cast<int>(ptx::shfl_bfly(static_cast<u32>(x), bits));
    }

    // Items.

    __device__ __forceinline__ static void advance(u32& slot) {
        slot = T::slots == 1 || slot == T::slots - 1 ? 0 : slot + 1;
    }

    // Copy the item of a step into the next slot.  Every call makes one group of copies, empty
    // behind the last block, so that waits can count groups.
    __device__ __forceinline__ void issue(int block, int step) {
        block += step / steps;
        step %= steps;
        if (block < end_block) {
            const u32 item = shared + M::ring + write_slot * M::item;
            const int key = block * T::block_n;
            if (M::v_apart || step < score_steps) {
                const int column = 2 * T::depth * step;
                if constexpr (M::q_sliced) {
                    copy<typename M::QSlice, T::threads>(
                        item, q + column, a.q.row, first_row, a.seqlen_q
                    );
                }
                copy<typename M::KSlice, T::threads>(
                    item + M::k_offset, k + column, a.k.row, key, end_key
                );
                if constexpr (M::v_apart) {
                    // V's tile is free from the first step on, when items ahead + 0 ... are issued.
                    const auto copy_v = [&](int slice) {
                        copy<typename M::VSlice, T::threads, T::depth / 8>(
                            shared + M::v, v + 2 * T::depth * slice, a.v.row, key, end_key,
                            T::depth / 8 * slice
                        );
                    };
                    if (ahead == 1 && step == 1) {
                        copy_v(0);
                    }
                    if (step >= ahead) {
                        copy_v(step);
                    }
                }
            } else {
                const int column = 2 * M::width * (step - score_steps);
                copy<typename M::VSlice, T::threads>(item, v + column, a.v.row, key, end_key);
            }
        }
        ptx::cp_async_commit_group();
        advance(write_slot);
    }

    // Wait for the item of a step and issue a later one; returns where the item lies.
    __device__ __forceinline__ u32 begin(int block, int step) {
        if constexpr (ahead > 0) {
            ptx::cp_async_wait_group<ahead - 1>();
            __syncthreads();  // item: all copies have landed, and all warps are done with the slot
            issue(block, step + ahead);
        } else {
            __syncthreads();  // slot: all warps are done with it
            issue(block, step);
            ptx::cp_async_wait_group<0>();
            __syncthreads();  // item: all copies have landed
        }
        const u32 item = shared + M::ring + read_slot * M::item;
        advance(read_slot);
        return item;
    }

    // Q in registers.

    // A fragment of 16 rows and 16 columns of Q.
    template <class QT>
    __device__ __forceinline__ void read_q(u32 (&fragment)[4], u32 tile, int row, int step) const {
        ptx::ldmatrix_x4(fragment, tile + QT::place(row + lane % 16, 2 * step + lane / 16));
        if constexpr (T::prescaled) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float low, high;
                ptx::unpack<T::format>(fragment[i], low, high);
                fragment[i] = ptx::pack<T::format>(low * a.scale, high * a.scale);
            }
        }
    }

    // Two tiles of eight keys of K (one where a warp has no more), 16 columns each.
    __device__ __forceinline__ void read_k(u32 (&b)[4], u32 slice, int tile, int step) const {
        const int key = 8 * (warp_n * key_tiles + tile) + lane % 8;
        const int chunk = 2 * step + lane / 8 % 2;
        if constexpr (key_tiles > 1) {
            ptx::ldmatrix_x4(b, slice + M::KSlice::place(key + lane / 16 * 8, chunk));
        } else {
            u32 one[2];
            ptx::ldmatrix_x2(one, slice + M::KSlice::place(key, chunk));
            b[0] = one[0];
            b[1] = one[1];
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void keep_q(u32 (&kept)[row_tiles][COUNT][4]) {
        if constexpr (T::query == Query::registers) {
            ptx::cp_async_wait_group<ahead>();
            __syncthreads();  // Q: its rows were copied by other threads than those that read them
            for_each_row_tile([&](int i, int row) {
#pragma unroll
                for (int d = 0; d < COUNT; ++d) {
                    read_q<typename M::QTile>(kept[i][d], shared, row, d);
                }
            });
        } else if constexpr (T::query == Query::ring) {
            using Piece = typename M::QPiece;
#pragma unroll
            for (int first = 0; first < T::block_m; first += Piece::rows) {
                __syncthreads();  // piece: all warps are done with the one before
                copy<Piece, T::threads>(
                    shared + M::ring, q, a.q.row, first_row + first, a.seqlen_q
                );
                ptx::cp_async_commit_group();
                ptx::cp_async_wait_group<0>();
                __syncthreads();  // Q: all copies have landed
                for_each_row_tile([&](int i, int row) {
                    if (first <= row && row < first + Piece::rows) {
#pragma unroll
                        for (int d = 0; d < COUNT; ++d) {
                            read_q<Piece>(kept[i][d], shared + M::ring, row - first, d);
                        }
                    }
                });
            }
            if constexpr (ahead > 0) {
                __syncthreads();  // ring: all warps are done with Q
            }
        }
    }

    // Calls f(i, row of the block) for the first row of each row tile of this warp.
    template <class F>
    __device__ __forceinline__ void for_each_row_tile(const F& f) const {
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
            f(i, 16 * (warp_m * row_tiles + i));
        }
    }

    // Row h (0 or 1) of the two that this lane holds of row tile i, counted from the block's first.
    __device__ __forceinline__ int row_of(int i, int h) const {
        return 16 * (warp_m * row_tiles + i) + lane / 4 + 8 * h;
    }

    // Write a row's part of O.  Four lanes hold a row, two neighbouring columns of every eight: they
    // trade until each has the eight of every fourth tile, which are stored at once.
    __device__ __forceinline__ void store_row(
        const float (&o)[out_tiles][4], int h, float inverse, int row
    ) const {
        const int t = lane % 4;
        char* out = a.out.data + batch * a.out.batch + head * a.out.head + row * a.out.row;
#pragma unroll
        for (int first = 0; first < out_tiles; first += 4) {
            u32 pairs[4] = {};
#pragma unroll
            for (int n = 0; n < 4 && first + n < out_tiles; ++n) {
                pairs[n] = ptx::pack<T::format>(
                    o[first + n][2 * h] * inverse, o[first + n][2 * h + 1] * inverse
                );
            }
            // pairs[n] of lane t becomes pairs[t] of lane n.
#pragma unroll
            for (int bit = 1; bit <= 2; ++bit) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int low = bit == 1 ? 2 * i : i;
                    const u32 got = ptx::shfl_bfly(t & bit ? pairs[low] : pairs[low + bit], bit);
                    pairs[low] = t & bit ? got : pairs[low];
                    pairs[low + bit] = t & bit ? pairs[low + bit] : got;
                }
            }
            const int n = first + t;
            if (row < a.seqlen_q && n < out_tiles) {
                const int tile = warp_n * width_tiles + n % width_tiles;
                const int column = n / width_tiles * M::width + 8 * tile;
                const uint4 eight = {pairs[0], pairs[1], pairs[2], pairs[3]};
                *reinterpret_cast<uint4*>(out + 2 * column) = eight;
            }
        }
    }

    __device__ void run(unsigned char* memory);
};

template <class T>
__device__ __forceinline__ void Flash<T>::run(unsigned char* memory) {
    constexpr int depth_steps = T::depth / 16;
    const float infinity = __int_as_float(0x7f800000);
    float* partial = reinterpret_cast<float*>(memory + M::partial);

    // Q and the first items travel.
    if constexpr (M::q_resident) {
        copy<typename M::QTile, T::threads>(shared, q, a.q.row, first_row, a.seqlen_q);
        ptx::cp_async_commit_group();
    }
    constexpr int kept_steps = q_kept ? T::head_dim / 16 : 1;
    u32 kept[row_tiles][kept_steps][4];
    if constexpr (T::query == Query::ring) {
        keep_q(kept);
    }
#pragma unroll
    for (int step = 0; step < ahead; ++step) {
        issue(first_block, step);
    }
    if constexpr (T::query == Query::registers) {
        keep_q(kept);
    }

    Interval seen[row_tiles][2];
    float m[row_tiles][2], l[row_tiles][2];
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            seen[i][h] = visible(first_row + row_of(i, h));
            m[i][h] = -infinity;
            l[i][h] = 0.0f;  // of this lane's columns only, until the end
        }
    }
    float o[row_tiles][out_tiles][4] = {};

    for (int block = first_block; block < end_block; ++block) {
        // S = Q K^T.
        Scores sums[row_tiles][key_tiles];
#pragma unroll 1
        for (int step = 0; step < score_steps; ++step) {
            const u32 item = begin(block, step);
#pragma unroll
            for (int d = 0; d < depth_steps; ++d) {
                u32 fresh[row_tiles][4];
                if constexpr (!q_kept) {
                    for_each_row_tile([&](int i, int row) {
                        if constexpr (M::q_sliced) {
                            read_q<typename M::QSlice>(fresh[i], item, row, d);
                        } else {
                            read_q<typename M::QTile>(
                                fresh[i], shared, row, step * depth_steps + d
                            );
                        }
                    });
                }
#pragma unroll
                for (int n = 0; n < key_tiles; n += 2) {
                    u32 b[4];  // keys 0-7 and 8-15 of these 16, columns 0-7 and 8-15 each
                    read_k(b, item + M::k_offset, n, d);
#pragma unroll
                    for (int i = 0; i < row_tiles; ++i) {
                        const u32(&left)[4] = q_kept ? kept[i][d % kept_steps] : fresh[i];
                        sums[i][n].template multiply<T::format>(left, b[0], b[1]);
                        if constexpr (key_tiles > 1) {
                            sums[i][n + 1].template multiply<T::format>(left, b[2], b[3]);
                        }
                    }
                }
            }
        }

        // Product and difference stay apart (no fused multiply-add): the row maximum's own exponent
        // must be exactly 0.
        float s[row_tiles][key_tiles][4];
        const bool edge = block * T::block_n < masked_below
            || (block + 1) * T::block_n > masked_from;
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
            for (int n = 0; n < key_tiles; ++n) {
                sums[i][n].read(s[i][n]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[i][n][e] = __fmul_rn(s[i][n][e], a.scale_log2);
                }
            }
        }
        if (edge) {
            const int key = block * T::block_n + 8 * warp_n * key_tiles + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const Interval row = seen[i][e / 2];
                        const int place = key + 8 * n + e % 2;
                        if (place < row.low || place >= row.high) {
                            s[i][n][e] = -infinity;
                        }
                    }
                }
            }
        }

        float new_m[row_tiles][2];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float most = m[i][h];
#pragma unroll
                for (int n = 0; n < key_tiles; ++n) {
                    most = fmaxf(most, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
                }
                most = fmaxf(most, ptx::shfl_bfly(most, 1));
                new_m[i][h] = fmaxf(most, ptx::shfl_bfly(most, 2));
                if (T::warps_n > 1 && lane % 4 == 0) {
                    partial[warp_n * T::block_m + row_of(i, h)] = new_m[i][h];
                }
            }
        }
        if constexpr (T::warps_n > 1) {
            __syncthreads();  // maxima: of all warps that share these rows
#pragma unroll
            for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int w = 0; w < T::warps_n; ++w) {
                        new_m[i][h] =
                            fmaxf(new_m[i][h], partial[w * T::block_m + row_of(i, h)]);
                    }
                }
            }
        }

        // P, rounded: an accumulator's two tiles of 8 keys are one operand of 16.
        u32 p[row_tiles][T::block_n / 16][4];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is
                // NaN.
                const float shift = new_m[i][h] == -infinity ? 0.0f : new_m[i][h];
                const float alpha = ptx::ex2(__fsub_rn(m[i][h], shift));
                m[i][h] = new_m[i][h];
                l[i][h] *= alpha;
#pragma unroll
                for (int n = 0; n < out_tiles; ++n) {
                    o[i][n][2 * h] *= alpha;
                    o[i][n][2 * h + 1] *= alpha;
                }
#pragma unroll
                for (int n = 0; n < key_tiles; ++n) {
                    const float low = ptx::ex2(__fsub_rn(s[i][n][2 * h], shift));
                    const float high = ptx::ex2(__fsub_rn(s[i][n][2 * h + 1], shift));
                    l[i][h] += low + high;
                    const u32 pair = ptx::pack<T::format>(low, high);
                    if constexpr (T::warps_n == 1) {
                        p[i][n / 2][n % 2 * 2 + h] = pair;
                    } else {
                        const u32 place =
                            M::PTile::place(row_of(i, h), warp_n * key_tiles + n) + lane % 4 * 4;
                        *reinterpret_cast<u32*>(memory + M::p + place) = pair;
                    }
                }
            }
        }
        if constexpr (T::warps_n > 1) {
            __syncthreads();  // P: of all warps that share these rows
            for_each_row_tile([&](int i, int row) {
#pragma unroll
                for (int n = 0; n < T::block_n / 16; ++n) {
                    const u32 place = M::PTile::place(row + lane % 16, 2 * n + lane / 16);
                    ptx::ldmatrix_x4(p[i][n], shared + M::p + place);
                }
            });
        }

        // O += P V.  V has no step of its own where it has a tile: the last item of S brought it.
#pragma unroll
        for (int step = 0; step < value_steps; ++step) {
            const u32 tile = M::v_apart ? shared + M::v : begin(block, score_steps + step);
            Values parts[row_tiles][values_wide ? 1 : width_tiles];
#pragma unroll
            for (int n = 0; n < T::block_n / 16; ++n) {
#pragma unroll
                for (int d = 0; d < width_tiles; d += 2) {
                    u32 b[4];  // columns 0-7 and 8-15 of these 16, keys 0-7 and 8-15 each
                    const int chunk = warp_n * width_tiles + d + lane / 16;
                    ptx::ldmatrix_x4_trans(b, tile + M::VSlice::place(16 * n + lane % 16, chunk));
#pragma unroll
                    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            if constexpr (values_wide) {
                                ptx::mma_m16n8k16<T::format>(
                                    o[i][step * width_tiles + d + half], p[i][n], b[2 * half],
                                    b[2 * half + 1]
                                );
                            } else {
                                parts[i][d + half].template multiply<T::format>(
                                    p[i][n], b[2 * half], b[2 * half + 1]
                                );
                            }
                        }
                    }
                }
            }
            if constexpr (!values_wide) {
#pragma unroll
                for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                    for (int d = 0; d < width_tiles; ++d) {
                        float part[4];
                        parts[i][d].read(part);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            o[i][step * width_tiles + d][e] += part[e];
                        }
                    }
                }
            }
        }
    }

    // The row sums of all lanes and warps that share a row.
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            l[i][h] += ptx::shfl_bfly(l[i][h], 1);
            l[i][h] += ptx::shfl_bfly(l[i][h], 2);
            if (T::warps_n > 1 && lane % 4 == 0) {
                partial[warp_n * T::block_m + row_of(i, h)] = l[i][h];
            }
        }
    }
    if constexpr (T::warps_n > 1) {
        __syncthreads();  // sums: of all warps that share these rows
    }
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + row_of(i, h);
            if constexpr (T::warps_n > 1) {
                l[i][h] = 0.0f;
#pragma unroll
                for (int w = 0; w < T::warps_n; ++w) {
                    l[i][h] += partial[w * T::block_m + row_of(i, h)];
                }
            }
            // An empty row has l = 0, o = 0 and m = -inf, so O = 0 and LSE = -inf.
            const float denominator = l[i][h] == 0.0f ? 1.0f : l[i][h];
            const float inverse = 1.0f / denominator;
            if (row < a.seqlen_q && warp_n == 0 && lane % 4 == 0) {
                const long long index =
                    (static_cast<long long>(batch) * a.heads_q + head) * a.seqlen_q + row;
                a.lse[index] = 0.69314718f * (m[i][h] + ptx::lg2(denominator));
            }
            store_row(o[i], h, inverse, row);
        }
    }
}

// The kernel of a tiling.  At most 255 registers: without the number of blocks, ptxas can aim at
// fewer, and spill.
#define FLASH_FORWARD(NAME)                                                                   \
    static_assert(Memory<Tiling>::bytes == SHARED_BYTES);                                     \
    extern "C" __global__ void __launch_bounds__(Tiling::threads, 256 / Tiling::threads)     \
        NAME(const Arguments arguments) {                                                     \
        extern __shared__ __align__(128) unsigned char shared[];                              \
        Flash<Tiling>(arguments, ptx::shared_address(shared)).run(shared);                    \
    }
