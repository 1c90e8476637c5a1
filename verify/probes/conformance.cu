// One instruction of ptx.cuh on the state of one warp: what verify.probes.conformance lists.
//
// A block of 32 lanes takes a state: twelve registers of each lane, x[0] to x[3], d[0] to d[3] and
// e[0] to e[3], and the block's shared memory.  The instruction changes it, and all of it is left
// for comparison.  Macros number the instructions.  A lane's address in shared memory is x[0].
#include "ptx.cuh"

using ptx::Format;
using ptx::u32;
using u8 = unsigned char;

#ifdef __CUDA_ARCH__
constexpr int arch = __CUDA_ARCH__;
#else
constexpr int arch = 10000;  // the emulation has every instruction
#endif

struct Arguments {
    const u8* before;  // (blocks, 32 * 12 * 4 + shared_bytes)
    u8* after;         // the same
    const u8* memory;  // what is copied from, at the offset x[1]
    u32 shared_bytes;
    u32 instruction;
};

struct Lane {
    u32 x[4], d[4], e[4];
};

__device__ __forceinline__ float real(u32 bits) { return __uint_as_float(bits); }

template <Format format>
__device__ __forceinline__ void unpack(u32 packed, u32 (&d)[4]) {
    float low, high;
    ptx::unpack<format>(packed, low, high);
    d[0] = __float_as_uint(low);
    d[1] = __float_as_uint(high);
}

template <typename Multiply>
__device__ __forceinline__ void with_floats(u32 (&x)[4], Multiply multiply) {
    float c[4] = {real(x[0]), real(x[1]), real(x[2]), real(x[3])};
    multiply(c);
    for (int i = 0; i < 4; ++i) {
        x[i] = __float_as_uint(c[i]);
    }
}

// Copies of 16 bytes in four groups, of two copies, one, none and one; a word of each copy as soon
// as its group is waited for.
__device__ __forceinline__ void copy_groups(Lane& lane, u32 at, const u8* from, const u8* shared) {
    const auto copy = [&](int i) { ptx::cp_async_cg(at + 512 * i, from + 512 * i, 16); };
    const auto word = [&](int i) {
        return *reinterpret_cast<const volatile u32*>(shared + lane.x[0] + 512 * i);
    };
    copy(0);
    copy(1);
    ptx::cp_async_commit_group();
    copy(2);
    ptx::cp_async_commit_group();
    ptx::cp_async_commit_group();
    copy(3);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<3>();
    lane.d[0] = word(0);
    lane.d[1] = word(1);
    ptx::cp_async_wait_group<2>();
    lane.d[2] = word(2);
    ptx::cp_async_wait_group<0>();
    lane.d[3] = word(3);
}

__device__ __forceinline__ void act(u32 instruction, Lane& lane, const u8* memory, u8* shared) {
    u32(&x)[4] = lane.x, (&d)[4] = lane.d, (&e)[4] = lane.e;
    u32 pair[2] = {d[0], d[1]};
    const u32 at = ptx::shared_address(shared) + x[0];
    const auto set = [](u32 (&to)[4], const u32 (&from)[2]) {
        to[0] = from[0];
        to[1] = from[1];
    };
    switch (instruction) {
        case LDMATRIX_X1:
            ptx::ldmatrix_x1(d[0], at);
            break;
        case LDMATRIX_X2:
            ptx::ldmatrix_x2(pair, at);
            set(d, pair);
            break;
        case LDMATRIX_X4:
            ptx::ldmatrix_x4(d, at);
            break;
        case LDMATRIX_X1_TRANS:
            ptx::ldmatrix_x1_trans(d[0], at);
            break;
        case LDMATRIX_X2_TRANS:
            ptx::ldmatrix_x2_trans(pair, at);
            set(d, pair);
            break;
        case LDMATRIX_X4_TRANS:
            ptx::ldmatrix_x4_trans(d, at);
            break;
        case MMA_FLOAT16:
            with_floats(x, [&](float (&c)[4]) {
                ptx::mma_m16n8k16<Format::float16>(c, d, e[0], e[1]);
            });
            break;
        case MMA_BFLOAT16:
            with_floats(x, [&](float (&c)[4]) {
                ptx::mma_m16n8k16<Format::bfloat16>(c, d, e[0], e[1]);
            });
            break;
        case MMA_FLOAT16_HALF:
            pair[0] = x[0];
            pair[1] = x[1];
            ptx::mma_m16n8k16_f16(pair, d, e[0], e[1]);
            set(x, pair);
            break;
        case CP_ASYNC_CG:
            ptx::cp_async_cg(at, memory + x[1], x[2]);
            break;
        case CP_ASYNC_CA_16:
            ptx::cp_async_ca(at, memory + x[1], x[2]);
            break;
        case CP_ASYNC_CA_8:
            ptx::cp_async_ca<8>(at, memory + x[1], x[2]);
            break;
        case CP_ASYNC_CA_4:
            ptx::cp_async_ca<4>(at, memory + x[1], x[2]);
            break;
        case CP_ASYNC_GROUPS:
            copy_groups(lane, at, memory + x[1], shared);
            break;
        case SHFL_BFLY:
            d[0] = ptx::shfl_bfly(x[0], static_cast<int>(x[1]));
            break;
        case SHFL_BFLY_FLOAT:
            d[0] = __float_as_uint(ptx::shfl_bfly(real(x[0]), static_cast<int>(x[1])));
            break;
        case SHFL_IDX:
            d[0] = ptx::shfl_idx(x[0], static_cast<int>(x[1]));
            break;
        case PRMT:
            d[0] = ptx::prmt(x[0], x[1], x[2]);
            break;
        case EX2:
            d[0] = __float_as_uint(ptx::ex2(real(x[0])));
            break;
        case EX2_F16X2:
            d[0] = ptx::ex2_approx_f16x2(x[0]);
            break;
        case LG2:
            d[0] = __float_as_uint(ptx::lg2(real(x[0])));
            break;
        case RCP:
            d[0] = __float_as_uint(ptx::rcp(real(x[0])));
            break;
        case PACK_FLOAT16:
            d[0] = ptx::pack<Format::float16>(real(x[0]), real(x[1]));
            break;
        case PACK_BFLOAT16:
            d[0] = ptx::pack<Format::bfloat16>(real(x[0]), real(x[1]));
            break;
        case UNPACK_FLOAT16:
            unpack<Format::float16>(x[0], d);
            break;
        case UNPACK_BFLOAT16:
            unpack<Format::bfloat16>(x[0], d);
            break;
    }
    if constexpr (arch >= 890) {
        switch (instruction) {
            case MMA_E4M3:
                with_floats(x, [&](float (&c)[4]) {
                    ptx::mma_m16n8k32<Format::float8_e4m3fn>(c, d, e[0], e[1]);
                });
                break;
            case MMA_E5M2:
                with_floats(x, [&](float (&c)[4]) {
                    ptx::mma_m16n8k32<Format::float8_e5m2>(c, d, e[0], e[1]);
                });
                break;
            case PACK_E4M3:
                d[0] = ptx::pack<Format::float8_e4m3fn>(
                    real(x[0]), real(x[1]), real(x[2]), real(x[3])
                );
                break;
            case PACK_E5M2:
                d[0] = ptx::pack<Format::float8_e5m2>(
                    real(x[0]), real(x[1]), real(x[2]), real(x[3])
                );
                break;
        }
    }
    if constexpr (arch >= 900) {
        switch (instruction) {
            case STMATRIX_X1:
                ptx::stmatrix_x1(at, d[0]);
                break;
            case STMATRIX_X2:
                ptx::stmatrix_x2(at, pair);
                break;
            case STMATRIX_X4:
                ptx::stmatrix_x4(at, d);
                break;
            case STMATRIX_X1_TRANS:
                ptx::stmatrix_x1_trans(at, d[0]);
                break;
            case STMATRIX_X2_TRANS:
                ptx::stmatrix_x2_trans(at, pair);
                break;
            case STMATRIX_X4_TRANS:
                ptx::stmatrix_x4_trans(at, d);
                break;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32) conformance(const Arguments args) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 of_lanes = 32 * sizeof(Lane), thread = threadIdx.x;
    const unsigned long long block = blockIdx.x;
    const u8* before = args.before + block * (of_lanes + args.shared_bytes);
    u8* after = args.after + block * (of_lanes + args.shared_bytes);
    for (u32 i = 4 * thread; i < args.shared_bytes; i += 4 * 32) {
        *reinterpret_cast<u32*>(shared + i) =
            *reinterpret_cast<const u32*>(before + of_lanes + i);
    }
    Lane lane = reinterpret_cast<const Lane*>(before)[thread];
    __syncthreads();
    act(args.instruction, lane, args.memory, shared);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    reinterpret_cast<Lane*>(after)[thread] = lane;
    for (u32 i = 4 * thread; i < args.shared_bytes; i += 4 * 32) {
        *reinterpret_cast<u32*>(after + of_lanes + i) = *reinterpret_cast<u32*>(shared + i);
    }
}
