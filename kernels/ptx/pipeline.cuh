// The part of a kernel that moves data: which rows and keys a block has, and the ring of items
// through which they come.  flash.cuh computes with it.
//
// What a step reads is an item.  Items lie in the ring's slots in the order of the steps, so one
// barrier a step is enough: it makes an item's copies visible to all threads, and it keeps the next
// copy from overwriting what a slower warp still reads.
#pragma once

#include "policies.cuh"

template <class T>
struct Pipeline {
    using M = Memory<T>;
    static constexpr int row_tiles = T::block_m / (16 * T::warps_m);  // of a warp
    static constexpr int key_tiles = T::block_n / (8 * T::warps_n);   // of a warp, in S
    static constexpr int width_tiles = M::width / (8 * T::warps_n);   // of a warp, in P V's step
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

    const Arguments& a;
    unsigned char* memory;
    u32 shared;  // its address
    const char *q, *k, *v;
    int first_row, batch, head;
    int lane, warp_m, warp_n;
    int first_block, end_block, end_key;
    int masked_below, masked_from;  // keys outside [masked_below, masked_from) need a mask
    float q_factor, scale_log2;     // what Q or a sum, and what a score is multiplied by
    u32 read_slot = 0, write_slot = 0;

    __device__ __forceinline__ explicit Pipeline(const Arguments& arguments, unsigned char* memory_)
        : a(arguments), memory(memory_), shared(ptx::shared_address(memory_)) {
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
        find_factors();
        find_blocks();
    }

    // The factors of 8-bit Q and K are a sum's; q_factor is the sign of all of them, or 0.
    __device__ __forceinline__ void find_factors() {
        q_factor = a.q_factor;
        scale_log2 = a.scale_log2;
        if constexpr (T::eight_bits) {
            scale_log2 *= factor(a.descale_q) * factor(a.descale_k);
            q_factor = scale_log2 == 0.0f ? 0.0f : scale_log2 < 0.0f ? -1.0f : 1.0f;
            scale_log2 = scale_log2 == 0.0f ? 1.0f : fabsf(scale_log2);
        }
    }

    __device__ __forceinline__ float factor(const Factors& of) const {
        const long long place = batch * of.batch + head / a.group * of.head;
        return of.data == nullptr ? 1.0f : of.data[place];
    }

    // Of O.  Read when it is wanted: no register is to spare before.
    __device__ __forceinline__ float v_factor() const {
        return T::eight_bits ? factor(a.descale_v) : 1.0f;
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
                const int column = M::depth_bytes * step;
                const u32 k_slice = item + M::k_offset;
                if constexpr (M::q_sliced) {
                    copy<typename M::QSlice, T::threads>(
                        item, q + column, a.q.row, first_row, a.seqlen_q
                    );
                }
                if constexpr (M::k_transposed) {
                    const char* const from =
                        k + T::depth * step * a.k.row + static_cast<long long>(key) * T::element;
                    const int row_end = T::element * min(end_key - key, T::block_n);
                    copy<typename M::KSlice, T::threads, M::KSlice::chunks, true>(
                        k_slice, from, a.k.row, 0, T::depth, 0, row_end
                    );
                    copy_part<typename M::KSlice, T::threads>(
                        memory + (k_slice - shared), from, a.k.row, row_end
                    );
                } else {
                    copy<typename M::KSlice, T::threads>(
                        k_slice, k + column, a.k.row, key, end_key
                    );
                }
                if constexpr (M::v_apart) {
                    // V's tile is free from the first step on, when items ahead + 0 ... are issued.
                    const auto copy_v = [&](int slice) {
                        constexpr int chunks = M::depth_bytes / 16;
                        copy<typename M::VSlice, T::threads, chunks>(
                            shared + M::v, v + M::depth_bytes * slice, a.v.row, key, end_key,
                            chunks * slice
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
                const int column = M::width_bytes * (step - score_steps);
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
        if constexpr (M::q_sliced && !T::prescaled) {
            if (factor_in_q() && (M::v_apart || step < score_steps)) {
                multiply_q_tile<typename M::QSlice>(item);
            }
        }
        return item;
    }

    // Q in registers.

    // A fragment of 16 rows and 32 bytes of Q.
    template <class QT>
    __device__ __forceinline__ void read_q(u32 (&fragment)[4], u32 tile, int row, int step) const {
        ptx::ldmatrix_x4(fragment, tile + QT::place(row + lane % 16, 2 * step + lane / 16));
    }

    // Whether Q itself is multiplied by q_factor.  Otherwise sums take its sign: but by 0, sums out
    // of range would be multiplied too late.
    __device__ __forceinline__ bool factor_in_q() const {
        return T::prescaled || q_factor == 0.0f;
    }

    // Elements of Q in a register, times q_factor.
    __device__ __forceinline__ u32 multiplied(u32 elements) const {
        if constexpr (T::eight_bits) {
            return times_zero(elements);
        } else {
            float low, high;
            ptx::unpack<T::format>(elements, low, high);
            return ptx::pack<T::format>(low * q_factor, high * q_factor);
        }
    }

    __device__ __forceinline__ void multiply_q(u32 (&fragment)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            fragment[i] = multiplied(fragment[i]);
        }
    }

    // The same in shared memory, where Q is not kept in registers and a factor is rare.
    template <class QT>
    __device__ __forceinline__ void multiply_q_tile(u32 tile) const {
        u32* const elements = reinterpret_cast<u32*>(memory + (tile - shared));
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < QT::bytes / 4; i += T::threads) {
            elements[i] = multiplied(elements[i]);
        }
        __syncthreads();  // factor: of all of Q's elements
    }

    // Four 8-bit elements times 0: NaN where they are NaN or infinite.
    __device__ __forceinline__ static u32 times_zero(u32 four) {
        constexpr u32 last = T::format == ptx::Format::float8_e4m3fn ? 0x7f : 0x7c;
        const u32 carries = ((four & 0x7f7f7f7f) + 0x01010101 * (0x80 - last)) & 0x80808080;
        return carries - (carries >> 7);
    }

    // The fragments of 32 bytes of Q where it is not kept, from its tile or from the item.
    __device__ __forceinline__ void read_fresh_q(
        u32 (&fresh)[row_tiles][4], u32 item, int step
    ) const {
        for_each_row_tile([&](int i, int row) {
            if constexpr (M::q_sliced) {
                read_q<typename M::QSlice>(fresh[i], item, row, step);
            } else {
                read_q<typename M::QTile>(fresh[i], shared, row, step);
            }
            if constexpr (T::prescaled) {
                multiply_q(fresh[i]);
            }
        });
    }

    // 16 keys of V, two tiles of eight columns each.  Of 8 bits: 32 keys in the order of P's, and
    // even columns in one tile, odd ones in the other.
    __device__ __forceinline__ void read_v(u32 (&b)[4], u32 slice, int keys, int tile) const {
        if constexpr (T::eight_bits) {
            u32 pairs[4];  // keys 2t and 2t + 1 of eight each, columns 2g and 2g + 1
            const int chunk = (warp_n * width_tiles + tile) / 2;
            ptx::ldmatrix_x4_trans(pairs, slice + M::VSlice::place(32 * keys + lane, chunk));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                b[i] = ptx::prmt(pairs[2 * i], pairs[2 * i + 1], 0x6420);
                b[2 + i] = ptx::prmt(pairs[2 * i], pairs[2 * i + 1], 0x7531);
            }
        } else {
            const int chunk = warp_n * width_tiles + tile + lane / 16;
            ptx::ldmatrix_x4_trans(b, slice + M::VSlice::place(16 * keys + lane % 16, chunk));
        }
    }

    // Two tiles of eight keys of K (one where a warp has no more), 32 bytes each.
    __device__ __forceinline__ void read_k(u32 (&b)[4], u32 slice, int tile, int step) const {
        const int keys = warp_n * key_tiles + tile;  // in tiles of eight
        const int second = key_tiles > 1 ? lane / 16 : 0;
        u32 place;
        if constexpr (M::k_transposed) {
            place = M::KSlice::place(16 * step + lane % 16, keys + second);
        } else {
            place = M::KSlice::place(8 * (keys + second) + lane % 8, 2 * step + lane / 8 % 2);
        }
        load_k(b, slice + place);
    }

    __device__ __forceinline__ static void load_k(u32 (&b)[4], u32 row) {
        u32 one[2];
        if constexpr (key_tiles > 1 && M::k_transposed) {
            ptx::ldmatrix_x4_trans(b, row);
        } else if constexpr (key_tiles > 1) {
            ptx::ldmatrix_x4(b, row);
        } else {
            if constexpr (M::k_transposed) {
                ptx::ldmatrix_x2_trans(one, row);
            } else {
                ptx::ldmatrix_x2(one, row);
            }
            b[0] = one[0];
            b[1] = one[1];
        }
    }

    // Q and the first items begin to travel; Q arrives in registers where it is kept there.
    template <int COUNT>
    __device__ __forceinline__ void start(u32 (&kept)[row_tiles][COUNT][4]) {
        if constexpr (M::q_resident) {
            copy<typename M::QTile, T::threads>(shared, q, a.q.row, first_row, a.seqlen_q);
            ptx::cp_async_commit_group();
        }
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
        if constexpr (T::query == Query::shared && !T::prescaled) {
            if (factor_in_q()) {
                ptx::cp_async_wait_group<0>();
                __syncthreads();  // tile: all copies have landed
                multiply_q_tile<typename M::QTile>(shared);
            }
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
        if (q_kept && factor_in_q()) {
#pragma unroll
            for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                for (int d = 0; d < COUNT; ++d) {
                    multiply_q(kept[i][d]);
                }
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
};
