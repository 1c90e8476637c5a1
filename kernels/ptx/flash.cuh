// FlashAttention-2 forward for mma.sync: one template for all tilings of this folder.
//
// A block owns BLOCK_M query rows of one head and walks over the keys in blocks of BLOCK_N.  Each
// block of keys takes a fixed number of steps: first S = Q K^T, in one step or in slices of
// head_dim, then O += P V, in one step or in slices of V's columns.  What a step reads from memory
// is an *item*: it goes through one of the SLOTS of a ring in shared memory, in the order of the
// steps.  Items of the next SLOTS - 1 steps travel while a step computes.
//
// A tiling says, and nothing else is different between two of them:
//
//     query         where Q stays: see `Query`
//     depth         columns of Q and K in an item (head_dim: one step)
//     width         columns of V in an item (head_dim: one step; 0: V has a tile of its own, which
//                   is filled beside the items of Q K^T)
//     slots         items in shared memory
//     warps_m, _n   warps that share the rows, and warps that share the keys of S and the columns
//                   of O; with warps_n > 1 statistics and P go through shared memory
//
// tiling.py and the .cu files say what each is for; docs/ptx.md draws them.
#pragma once

#include "pipeline.cuh"

template <class T>
struct Flash {
    using M = Memory<T>;
    using Pipe = Pipeline<T>;
    using Scores = typename T::Scores;
    using Values = typename T::Values;
    static constexpr int row_tiles = Pipe::row_tiles;
    static constexpr int key_tiles = Pipe::key_tiles;
    static constexpr int width_tiles = Pipe::width_tiles;
    static constexpr int out_tiles = Pipe::out_tiles;
    static constexpr bool values_wide = sizeof(Values) == sizeof(Wide);
    // Columns of O, in tiles of 8, whose sums in fp16 are in registers at once.
    static constexpr int part_tiles =
        values_wide ? width_tiles : width_tiles % 8 == 0 ? 8 : 2;
    static constexpr bool shares_rows = T::warps_n > 1;  // with other warps
    static constexpr int depth_steps = T::depth / T::mma_depth;
    static constexpr int value_keys = T::block_n / T::mma_depth;  // steps of P V
    static constexpr int kept_steps = Pipe::q_kept ? T::head_dim / T::mma_depth : 1;
    static_assert(T::depth % T::mma_depth == 0 && T::block_n % T::mma_depth == 0);
    static_assert(!T::eight_bits || !shares_rows);
    // Loops whose counter names no register are not unrolled whole: the addresses of all their
    // turns would take registers, and MMAs of 8 bits some of their own.
    static constexpr int score_unroll = Pipe::q_kept ? depth_steps : T::eight_bits ? 2 : 4;
    static constexpr int value_unroll = shares_rows ? 2 : value_keys;

    const Arguments& a;
    unsigned char* memory;
    float* partial;  // (warps_n, block_m) of maxima, and of sums at the end
    Pipe pipe;

    // In registers: of each row tile, the two rows that a lane holds.
    u32 kept[row_tiles][kept_steps][4];  // Q
    float m[row_tiles][2];
    float l[row_tiles][2];  // of this lane's columns only, until the end
    float o[row_tiles][out_tiles][4];
    float s[row_tiles][key_tiles][4];
    float shift[row_tiles][2];
    // P as a left operand, rounded; where warps share rows, it stays in shared memory
    u32 p[row_tiles][shares_rows ? 1 : value_keys][4];

    __device__ __forceinline__ Flash(const Arguments& arguments, unsigned char* memory_)
        : a(arguments),
          memory(memory_),
          partial(reinterpret_cast<float*>(memory_ + M::partial)),
          pipe(arguments, memory_) {}

    __device__ __forceinline__ static float infinity() { return __int_as_float(0x7f800000); }

    // Calls f(i, h) for every row that this lane holds.
    template <class F>
    __device__ __forceinline__ static void for_each_row(const F& f) {
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                f(i, h);
            }
        }
    }

    // This warp's place for a row in `partial`.
    __device__ __forceinline__ float& partial_of(int warp, int i, int h) const {
        return partial[warp * T::block_m + pipe.row_of(i, h)];
    }

    __device__ __forceinline__ void run() {
        pipe.start(kept);
        for_each_row([&](int i, int h) {
            m[i][h] = -infinity();
            l[i][h] = 0.0f;
#pragma unroll
            for (int n = 0; n < out_tiles; ++n) {
                o[i][n][2 * h] = 0.0f;
                o[i][n][2 * h + 1] = 0.0f;
            }
        });
        for (int block = pipe.first_block; block < pipe.end_block; ++block) {
            multiply_keys(block);
            hide_keys(block);
            raise_maxima();
            weigh_keys();
            multiply_values(block);
        }
        finish();
    }

    // S = Q K^T, with the scale's sign.
    __device__ __forceinline__ void multiply_keys(int block) {
        Scores sums[row_tiles][key_tiles];
#pragma unroll 1
        for (int step = 0; step < Pipe::score_steps; ++step) {
            const u32 item = pipe.begin(block, step);
#pragma unroll score_unroll
            for (int d = 0; d < depth_steps; ++d) {
                u32 fresh[row_tiles][4];
                if constexpr (!Pipe::q_kept) {
                    pipe.read_fresh_q(fresh, item, d);
                }
#pragma unroll
                for (int n = 0; n < key_tiles; n += 2) {
                    u32 b[4];  // keys 0-7 and 8-15 of these 16, both halves of 32 bytes each
                    pipe.read_k(b, item + M::k_offset, n, d);
#pragma unroll
                    for (int i = 0; i < row_tiles; ++i) {
                        const u32(&left)[4] = Pipe::q_kept ? kept[i][d % kept_steps] : fresh[i];
                        sums[i][n].template multiply<T::format>(left, b[0], b[1]);
                        if constexpr (key_tiles > 1) {
                            sums[i][n + 1].template multiply<T::format>(left, b[2], b[3]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
            for (int n = 0; n < key_tiles; ++n) {
                sums[i][n].read(s[i][n]);
            }
        }
        if (!T::prescaled && pipe.q_factor < 0.0f) {
#pragma unroll
            for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        s[i][n][e] = -s[i][n][e];
                    }
                }
            }
        }
    }

    // Scores of keys that a row does not see become -inf.
    __device__ __forceinline__ void hide_keys(int block) {
        const int first = block * T::block_n;
        if (first >= pipe.masked_below && first + T::block_n <= pipe.masked_from) {
            return;
        }
        const int key = first + 8 * pipe.warp_n * key_tiles + pipe.lane % 4 * 2;
        for_each_row([&](int i, int h) {
            // Few blocks come here: kept, the intervals would take registers in all of them.
            const Interval seen = pipe.visible(pipe.first_row + pipe.row_of(i, h));
#pragma unroll
            for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int place = key + 8 * n + e;
                    if (place < seen.low || place >= seen.high) {
                        s[i][n][2 * h + e] = -infinity();
                    }
                }
            }
        });
    }

    // The new maxima; l and O are rescaled if one of this warp's rows has a greater one.
    __device__ __forceinline__ void raise_maxima() {
        float raised[row_tiles][2];
        for_each_row([&](int i, int h) {
            float most = m[i][h];
#pragma unroll
            for (int n = 0; n < key_tiles; ++n) {
                most = fmaxf(most, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
            }
            most = fmaxf(most, ptx::shfl_bfly(most, 1));
            raised[i][h] = fmaxf(most, ptx::shfl_bfly(most, 2));
            if (shares_rows && pipe.lane % 4 == 0) {
                partial_of(pipe.warp_n, i, h) = raised[i][h];
            }
        });
        if constexpr (shares_rows) {
            __syncthreads();  // maxima: of all warps that share these rows
            for_each_row([&](int i, int h) {
#pragma unroll
                for (int w = 0; w < T::warps_n; ++w) {
                    raised[i][h] = fmaxf(raised[i][h], partial_of(w, i, h));
                }
            });
        }

        float alpha[row_tiles][2];
        bool rises = false;
        for_each_row([&](int i, int h) {
            // While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is NaN.
            const float base = raised[i][h] == -infinity() ? 0.0f : raised[i][h];
            alpha[i][h] = ptx::ex2((m[i][h] - base) * pipe.scale_log2);
            shift[i][h] = base * pipe.scale_log2 - T::p_exponent;
            rises = rises || m[i][h] != raised[i][h];
            m[i][h] = raised[i][h];
        });
        if (__any_sync(0xffffffff, rises)) {  // else every alpha is 1
            for_each_row([&](int i, int h) {
                l[i][h] *= alpha[i][h];
#pragma unroll
                for (int n = 0; n < out_tiles; ++n) {
                    o[i][n][2 * h] *= alpha[i][h];
                    o[i][n][2 * h + 1] *= alpha[i][h];
                }
            });
        }
    }

    // 2^(score scale_log2 - shift), with one rounding before the exponential.
    __device__ __forceinline__ float weight(float score, float shift) const {
        return ptx::ex2(__fmaf_rn(score, pipe.scale_log2, -shift));
    }

    // P, rounded, and the row sums of P before that.  An accumulator's two tiles of 8 keys are one
    // operand of 16; four tiles are one of 32 keys of 8 bits, two and two to a register, so that
    // the sum over keys has another order (docs/ptx.md).  Where warps share a row, they exchange P
    // through shared memory.
    __device__ __forceinline__ void weigh_keys() {
        for_each_row([&](int i, int h) {
            float even[2] = {};
#pragma unroll
            for (int n = 0; n < key_tiles; ++n) {
                const float low = weight(s[i][n][2 * h], shift[i][h]);
                const float high = weight(s[i][n][2 * h + 1], shift[i][h]);
                l[i][h] += low + high;
                if constexpr (T::eight_bits) {
                    if (n % 2 == 0) {
                        even[0] = low;
                        even[1] = high;
                    } else {
                        p[i][n / 4][n % 4 / 2 * 2 + h] =
                            ptx::pack<T::format>(even[0], even[1], low, high);
                    }
                } else {
                    const u32 pair = ptx::pack<T::format>(low, high);
                    if constexpr (shares_rows) {
                        const int chunk = pipe.warp_n * key_tiles + n;
                        const u32 place =
                            M::PTile::place(pipe.row_of(i, h), chunk) + pipe.lane % 4 * 4;
                        *reinterpret_cast<u32*>(memory + M::p + place) = pair;
                    } else {
                        p[i][n / 2][n % 2 * 2 + h] = pair;
                    }
                }
            }
        });
        if constexpr (shares_rows && M::v_apart) {
            __syncthreads();  // P: of all warps that share these rows; else V's item brings one
        }
    }

    // P of 16 keys, where it is in shared memory.
    __device__ __forceinline__ void read_p(int keys) {
        pipe.for_each_row_tile([&](int i, int row) {
            const u32 place = M::PTile::place(row + pipe.lane % 16, 2 * keys + pipe.lane / 16);
            ptx::ldmatrix_x4(p[i][0], pipe.shared + M::p + place);
        });
    }

    // O += P V.  V has no step of its own where it has a tile: the last item of S brought it.
    __device__ __forceinline__ void multiply_values(int block) {
#pragma unroll
        for (int step = 0; step < Pipe::value_steps; ++step) {
            const u32 tile =
                M::v_apart ? pipe.shared + M::v : pipe.begin(block, Pipe::score_steps + step);
#pragma unroll
            for (int first = 0; first < width_tiles; first += part_tiles) {
                Values parts[row_tiles][values_wide ? 1 : part_tiles];
#pragma unroll value_unroll
                for (int n = 0; n < value_keys; ++n) {
                    if constexpr (shares_rows) {
                        read_p(n);
                    }
#pragma unroll
                    for (int d = 0; d < part_tiles; d += 2) {
                        u32 b[4];  // eight and eight of 16 columns, both halves of the keys each
                        pipe.read_v(b, tile, n, first + d);
#pragma unroll
                        for (int i = 0; i < row_tiles; ++i) {
                            const u32(&left)[4] = p[i][shares_rows ? 0 : n];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const u32 b0 = b[2 * e];
                                const u32 b1 = b[2 * e + 1];
                                if constexpr (values_wide) {
                                    float(&sum)[4] = o[i][step * width_tiles + first + d + e];
                                    add_product<T::format>(sum, left, b0, b1);
                                } else {
                                    parts[i][d + e].template multiply<T::format>(left, b0, b1);
                                }
                            }
                        }
                    }
                }
                if constexpr (!values_wide) {
#pragma unroll
                    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
                        for (int d = 0; d < part_tiles; ++d) {
                            float part[4];
                            parts[i][d].read(part);
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                o[i][step * width_tiles + first + d][e] += part[e];
                            }
                        }
                    }
                }
            }
        }
    }

    // The sums of all lanes and warps that share a row; LSE and O.
    __device__ __forceinline__ void finish() {
        for_each_row([&](int i, int h) {
            l[i][h] += ptx::shfl_bfly(l[i][h], 1);
            l[i][h] += ptx::shfl_bfly(l[i][h], 2);
            if (shares_rows && pipe.lane % 4 == 0) {
                partial_of(pipe.warp_n, i, h) = l[i][h];
            }
        });
        if constexpr (shares_rows) {
            __syncthreads();  // sums: of all warps that share these rows
        }
        const float v_factor = pipe.v_factor();
        for_each_row([&](int i, int h) {
            const int row = pipe.first_row + pipe.row_of(i, h);
            if constexpr (shares_rows) {
                l[i][h] = 0.0f;
#pragma unroll
                for (int w = 0; w < T::warps_n; ++w) {
                    l[i][h] += partial_of(w, i, h);
                }
            }
            // An empty row has l = 0, o = 0 and m = -inf, so O = 0 and LSE = -inf.
            const float denominator = l[i][h] == 0.0f ? 1.0f : l[i][h];
            if (row < a.seqlen_q && pipe.warp_n == 0 && pipe.lane % 4 == 0) {
                const long long of_head =
                    static_cast<long long>(pipe.batch) * a.heads_q + pipe.head;
                constexpr float p_scale = 1 << T::p_exponent;
                a.lse[of_head * a.seqlen_q + row] =
                    0.69314718f
                    * (m[i][h] * pipe.scale_log2 + ptx::lg2(denominator * (1 / p_scale)));
            }
            store_row(o[i], h, 1.0f / denominator * v_factor, row);
        });
    }

    // Write a row's part of O.  Four lanes hold a row, two neighbouring columns of every eight:
    // they trade until each has the eight of every fourth tile, which are stored at once.  Of 8-bit
    // V two tiles hold even and odd columns, so a lane has four neighbouring ones of every sixteen.
    __device__ __forceinline__ void store_row(
        const float (&o)[out_tiles][4], int h, float inverse, int row
    ) const {
        const int t = pipe.lane % 4;
        char* out =
            a.out.data + pipe.batch * a.out.batch + pipe.head * a.out.head + row * a.out.row;
#pragma unroll
        for (int first = 0; first < out_tiles; first += 4) {
            u32 pairs[4] = {};
#pragma unroll
            for (int n = 0; n < 4 && first + n < out_tiles; ++n) {
                const int even = first + n / 2 * 2;
                const float low = T::eight_bits ? o[even][2 * h + n % 2] : o[first + n][2 * h];
                const float high =
                    T::eight_bits ? o[even + 1][2 * h + n % 2] : o[first + n][2 * h + 1];
                pairs[n] = ptx::pack<T::out_format>(low * inverse, high * inverse);
            }
            // pairs[n] of lane t becomes pairs[t] of lane n.  Of 8-bit V: lanes t and t ^ 1 have
            // eight columns of each of two times sixteen, and trade until each has one of these
            // eights.
#pragma unroll
            for (int bit = 1; bit <= (T::eight_bits ? 1 : 2); ++bit) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int step = T::eight_bits ? 2 : bit;
                    const int low = step == 1 ? 2 * i : i;
                    const u32 got = ptx::shfl_bfly(t & bit ? pairs[low] : pairs[low + step], bit);
                    pairs[low] = t & bit ? got : pairs[low];
                    pairs[low + step] = t & bit ? pairs[low + step] : got;
                }
            }
            const int n = first + (T::eight_bits ? t % 2 * 2 + t / 2 : t);
            if (row < a.seqlen_q && n < out_tiles) {
                const int tile = pipe.warp_n * width_tiles + n % width_tiles;
                const int column = n / width_tiles * M::width + 8 * tile;
                const uint4 eight = {pairs[0], pairs[1], pairs[2], pairs[3]};
                *reinterpret_cast<uint4*>(out + 2 * column) = eight;
            }
        }
    }
};

// The kernel of a tiling.  At most 255 registers: without the number of blocks, ptxas can aim at
// fewer, and spill.
#define FLASH_FORWARD(NAME)                                                                   \
    static_assert(Memory<Tiling>::bytes == SHARED_BYTES);                                     \
    extern "C" __global__ void __launch_bounds__(Tiling::threads, 256 / Tiling::threads)     \
        NAME(const Arguments arguments) {                                                     \
        extern __shared__ __align__(128) unsigned char shared[];                              \
        Flash<Tiling>(arguments, shared).run();                                               \
    }
