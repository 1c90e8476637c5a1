// FlashAttention-2 forward, "split-q": four warps share a tile of 64 query rows, 16 rows each, and every warp sees all keys.
// split_q.py explains the algorithm, who owns which fragment, and where tiles lie in shared memory.
//
// A build defines FORMAT (float16 or bfloat16), HEAD_DIM (64 or 128), BLOCK_N (32 or 64), STAGES (1 or 2) and CAUSAL (0 or 1).
#include "ptx.cuh"

using ptx::u32;

constexpr auto format = ptx::Format::FORMAT;
constexpr int block_m = 64;
constexpr int threads = 128;
constexpr int row_bytes = 2 * HEAD_DIM;
constexpr int chunks = row_bytes / 16;  // of 16 bytes: what one cp.async copies, and one row of an 8x8 matrix
constexpr int dim_steps = HEAD_DIM / 16;
constexpr int key_steps = BLOCK_N / 16;
constexpr u32 tile_bytes = BLOCK_N * row_bytes;

// The tensors' rows begin at data + batch, head and row times these strides, all in bytes and multiples of 16.
struct Tensor {
    char* data;
    long long batch, head, row;
};

struct Arguments {
    Tensor q, k, v, out;
    float* lse;  // (batch, heads_q, seqlen_q), contiguous
    int heads_q;
    int group;  // query heads per key head
    int seqlen_q;
    int seqlen_kv;
    int diagonal;  // row r sees keys up to r + diagonal (CAUSAL)
    float scale_log2;
};

// Where a chunk of a tile's row lies.  The eight rows of a matrix have different r % 8, so their chunks lie in different banks.
__device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    return row * row_bytes + 16 * (chunk ^ row % 8);
}

// Copy rows first ... first + ROWS - 1 into a tile, zeros from `end` on (end > 0): what lies there is not read.
template <int ROWS>
__device__ __forceinline__ void copy_tile(u32 tile, const char* rows, long long stride, int first, int end) {
#pragma unroll
    for (int i = 0; i < ROWS * chunks / threads; ++i) {
        const int row = (i * threads + static_cast<int>(threadIdx.x)) / chunks;
        const int chunk = threadIdx.x % chunks;
        const int position = min(first + row, end - 1);
        ptx::cp_async_cg(tile + place(row, chunk), rows + position * stride + 16 * chunk, first + row < end ? 16 : 0);
    }
}

// Two blocks per multiprocessor: without that word ptxas aims at more, with fewer registers, and spills.
extern "C" __global__ void __launch_bounds__(threads, 2) split_q(const Arguments a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 q_tile = ptx::shared_address(shared);
    const u32 k_tiles = q_tile + block_m * row_bytes;
    const u32 v_tiles = k_tiles + STAGES * tile_bytes;

    // One grid axis, so that batch x heads may exceed 65535; the last tile first, since causal rows grow longer.
    const int tiles = (a.seqlen_q + block_m - 1) / block_m;
    const int first_row = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * block_m;
    const int head = static_cast<int>(blockIdx.x) / tiles % a.heads_q;
    const int batch = static_cast<int>(blockIdx.x) / tiles / a.heads_q;
    const char* q = a.q.data + batch * a.q.batch + head * a.q.head;
    const char* k = a.k.data + batch * a.k.batch + head / a.group * a.k.head;
    const char* v = a.v.data + batch * a.v.batch + head / a.group * a.v.head;

    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16;
    const int row = first_row + warp_row + lane / 4;  // this lane's rows are row and row + 8
    const int column = lane % 4 * 2;                  // and its columns column and column + 1 of every eight

    // Row r sees keys [0, visible(r)).
    const auto visible = [&](int r) { return CAUSAL ? max(min(r + a.diagonal + 1, a.seqlen_kv), 0) : a.seqlen_kv; };
    const int end = visible(min(first_row + block_m, a.seqlen_q) - 1);  // keys from here on no row sees: they are not loaded
    const int blocks = (end + BLOCK_N - 1) / BLOCK_N;
    const int whole = visible(first_row) / BLOCK_N;  // blocks that every row sees whole come first and need no mask

    // Every call makes one group of copies, empty if there is no such block, so that waits may count groups.
    const auto copy_k = [&](int block) {
        if (block < blocks) {
            copy_tile<BLOCK_N>(k_tiles + block % STAGES * tile_bytes, k, a.k.row, block * BLOCK_N, end);
        }
        ptx::cp_async_commit_group();
    };
    const auto copy_v = [&](int block) {
        if (block < blocks) {
            copy_tile<BLOCK_N>(v_tiles + block % STAGES * tile_bytes, v, a.v.row, block * BLOCK_N, end);
        }
        ptx::cp_async_commit_group();
    };

    copy_tile<block_m>(q_tile, q, a.q.row, first_row, a.seqlen_q);
    ptx::cp_async_commit_group();
    copy_k(0);
    if (STAGES == 2) {
        copy_v(0);
    }

    ptx::cp_async_wait_group<STAGES>();
    __syncthreads();  // Q: its rows were copied by other threads than those that read them
    u32 q_fragments[dim_steps][4];
#pragma unroll
    for (int d = 0; d < dim_steps; ++d) {
        ptx::ldmatrix_x4(q_fragments[d], q_tile + place(warp_row + lane % 16, 2 * d + lane / 16));
    }

    const float infinity = __int_as_float(0x7f800000);
    float m[2] = {-infinity, -infinity};
    float l[2] = {0.0f, 0.0f};  // of this lane's columns only, until the end
    float o[2 * dim_steps][4] = {};
    for (int block = 0; block < blocks; ++block) {
        const u32 k_tile = k_tiles + block % STAGES * tile_bytes;
        const u32 v_tile = v_tiles + block % STAGES * tile_bytes;

        ptx::cp_async_wait_group<STAGES - 1>();
        __syncthreads();  // K: all threads' copies have landed; and all warps are done with the V that the next copy overwrites
        if (STAGES == 1) {
            copy_v(block);
        } else {
            copy_k(block + 1);
        }

        float s[2 * key_steps][4] = {};
#pragma unroll
        for (int d = 0; d < dim_steps; ++d) {
#pragma unroll
            for (int n = 0; n < key_steps; ++n) {
                u32 b[4];  // keys 0-7 and 8-15 of these 16, dims 0-7 and 8-15 each
                ptx::ldmatrix_x4(b, k_tile + place(16 * n + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
                ptx::mma_m16n8k16<format>(s[2 * n], q_fragments[d], b[0], b[1]);
                ptx::mma_m16n8k16<format>(s[2 * n + 1], q_fragments[d], b[2], b[3]);
            }
        }

        // Product and difference stay apart (no fused multiply-add): the row maximum's own exponent must be exactly 0.
#pragma unroll
        for (int n = 0; n < 2 * key_steps; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[n][e] = __fmul_rn(s[n][e], a.scale_log2);
            }
        }
        if (block >= whole) {
#pragma unroll
            for (int n = 0; n < 2 * key_steps; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (block * BLOCK_N + 8 * n + column + e % 2 >= visible(row + e / 2 * 8)) {
                        s[n][e] = -infinity;
                    }
                }
            }
        }
        float new_m[2] = {m[0], m[1]};
#pragma unroll
        for (int n = 0; n < 2 * key_steps; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                new_m[e / 2] = fmaxf(new_m[e / 2], s[n][e]);
            }
        }
        float shift[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            new_m[h] = fmaxf(new_m[h], ptx::shfl_bfly(new_m[h], 1));
            new_m[h] = fmaxf(new_m[h], ptx::shfl_bfly(new_m[h], 2));
            // While a row has seen no key, m is -inf: subtract 0 instead, since -inf - -inf is NaN.
            shift[h] = new_m[h] == -infinity ? 0.0f : new_m[h];
            const float alpha = ptx::ex2(__fsub_rn(m[h], shift[h]));
            m[h] = new_m[h];
            l[h] *= alpha;
#pragma unroll
            for (int n = 0; n < 2 * dim_steps; ++n) {
                o[n][2 * h] *= alpha;
                o[n][2 * h + 1] *= alpha;
            }
        }
        u32 p[key_steps][4];  // an accumulator's two tiles of 8 keys are one operand of 16
#pragma unroll
        for (int n = 0; n < 2 * key_steps; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float low = ptx::ex2(__fsub_rn(s[n][2 * h], shift[h]));
                const float high = ptx::ex2(__fsub_rn(s[n][2 * h + 1], shift[h]));
                l[h] += low + high;
                p[n / 2][n % 2 * 2 + h] = ptx::pack<format>(low, high);
            }
        }

        ptx::cp_async_wait_group<STAGES - 1>();
        __syncthreads();  // V: all threads' copies have landed; and all warps are done with the K that the next copy overwrites
        if (STAGES == 1) {
            copy_k(block + 1);
        } else {
            copy_v(block + 1);
        }
#pragma unroll
        for (int n = 0; n < key_steps; ++n) {
#pragma unroll
            for (int d = 0; d < dim_steps; ++d) {
                u32 b[4];  // dims 0-7 and 8-15 of these 16, keys 0-7 and 8-15 each
                ptx::ldmatrix_x4_trans(b, v_tile + place(16 * n + lane % 16, 2 * d + lane / 16));
                ptx::mma_m16n8k16<format>(o[2 * d], p[n], b[0], b[1]);
                ptx::mma_m16n8k16<format>(o[2 * d + 1], p[n], b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        l[h] += ptx::shfl_bfly(l[h], 1);
        l[h] += ptx::shfl_bfly(l[h], 2);
        const int r = row + 8 * h;
        if (r < a.seqlen_q) {
            // An empty row has l = 0, o = 0 and m = -inf, so O = 0 and LSE = -inf.
            const float denominator = l[h] == 0.0f ? 1.0f : l[h];
            const float inverse = 1.0f / denominator;
            char* out = a.out.data + batch * a.out.batch + head * a.out.head + r * a.out.row;
#pragma unroll
            for (int n = 0; n < 2 * dim_steps; ++n) {
                const u32 pair = ptx::pack<format>(o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse);
                *reinterpret_cast<u32*>(out + 2 * (8 * n + column)) = pair;
            }
            if (column == 0) {
                const long long index = (static_cast<long long>(batch) * a.heads_q + head) * a.seqlen_q + r;
                a.lse[index] = 0.69314718f * (m[h] + ptx::lg2(denominator));
            }
        }
    }
}
