// verify/probes/ptx_probes.cuh for the CPU: fragments are gathered as the PTX manual's figures have
// them, and multiplied by the function that stands for the tensor core.
#pragma once

#include "ptx.cuh"

// a: 16 (fp64: 8) rows of A, b: 8 columns of B, contiguous, of `bytes` bytes each; c: as many rows x 8, in place.
using Multiply = void (*)(const unsigned char* a, const unsigned char* b, void* c, int bytes);
inline Multiply tensor_core;
extern "C" __attribute__((used)) inline void set_tensor_core(Multiply multiply) { tensor_core = multiply; }

inline long long __double_as_longlong(double value) {
    long long bits;
    std::memcpy(&bits, &value, 8);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}

namespace ptx {

// Functions for a pair in one register: both halves get the same.
inline u32 tanh_approx_f16x2(u32 x) {
    const auto half = [](u32 bits) {
        return detail::narrow(Format::float16, std::tanh(detail::widen(Format::float16, bits)));
    };
    return half(x & 0xffff) | half(x >> 16) << 16;
}
inline float div_full(float a, float b) { return a / b; }

namespace detail {

template <int SIZE, int DEPTH, typename Element>
void synchronous(void* const (&operands)[warp_size]) {
    unsigned char a[16 * SIZE * DEPTH], b[8 * SIZE * DEPTH];
    gather<SIZE, DEPTH>(operands, a, b);
    accumulate<Element>(operands, [&](void* c) { tensor_core(a, b, c, SIZE * DEPTH); });
}

// B by its descriptor: bits 0-13 the address, 16-29 and 32-45 the distances, all in units of 16 bytes; 62-63, no swizzle.
template <int SIZE, int DEPTH, typename Element>
void warpgroup(void* const (&operands)[warp_size]) {
    unsigned char a[16 * 32], b[8 * 32];
    const auto descriptor = *static_cast<const unsigned long long*>(static_cast<Fragments*>(operands[0])->b);
    for (int lane = 0; lane < warp_size; ++lane) {
        auto& own = *static_cast<Fragments*>(operands[lane]);
        if (*static_cast<const unsigned long long*>(own.b) != descriptor || descriptor >> 62) {
            host::fail("a bad descriptor", lane);
        }
        own.b = nullptr;
    }
    gather<SIZE, DEPTH>(operands, a, b);
    const unsigned address = (descriptor & 0x3fff) << 4, along_k = (descriptor >> 16 & 0x3fff) << 4;
    for (int column = 0; column < 8; ++column) {
        for (int half = 0; half < 2; ++half) {
            std::memcpy(b + 32 * column + 16 * half, host::shared_at(address + half * along_k + 16 * column), 16);
        }
    }
    accumulate<Element>(operands, [&](void* c) { tensor_core(a, b, c, 32); });
}

inline void doubles(void* const (&operands)[warp_size]) {
    double a[8][4], b[8][4], c[8][8];
    for (int lane = 0; lane < warp_size; ++lane) {
        const auto& own = *static_cast<Fragments*>(operands[lane]);
        a[lane >> 2][lane % 4] = *static_cast<const double*>(own.a);
        b[lane >> 2][lane % 4] = *static_cast<const double*>(own.b);
        std::memcpy(&c[lane >> 2][lane % 4 * 2], own.c, sizeof(double[2]));
    }
    tensor_core(reinterpret_cast<unsigned char*>(a), reinterpret_cast<unsigned char*>(b), c, 32);
    for (int lane = 0; lane < warp_size; ++lane) {
        std::memcpy(static_cast<Fragments*>(operands[lane])->c, &c[lane >> 2][lane % 4 * 2], sizeof(double[2]));
    }
}

}  // namespace detail

// K of 16 bytes, of 32 bytes, and wgmma, with elements of SIZE bytes; f32 and f16 accumulators.
#define HOST_K16(NAME, SIZE, DEPTH, C, ELEMENT)                                 \
    inline void NAME(C, const u32 (&a)[2], u32 b) {                             \
        detail::Fragments operands{c, a, &b};                                   \
        host::together(detail::synchronous<SIZE, DEPTH, ELEMENT>, &operands);   \
    }
#define HOST_K32(NAME, SIZE, DEPTH, C, ELEMENT)                                 \
    inline void NAME(C, const u32 (&a)[4], u32 b0, u32 b1) {                    \
        const u32 b[2] = {b0, b1};                                              \
        detail::Fragments operands{c, a, b};                                    \
        host::together(detail::synchronous<SIZE, DEPTH, ELEMENT>, &operands);   \
    }
#define HOST_WGMMA(NAME, SIZE, DEPTH, C, ELEMENT)                               \
    inline void NAME(C, const u32 (&a)[4], unsigned long long b) {              \
        detail::Fragments operands{c, a, &b};                                   \
        host::together(detail::warpgroup<SIZE, DEPTH, ELEMENT>, &operands);     \
    }
#define SINGLE float (&c)[4]
#define HALF_PAIRS u32 (&c)[2]
HOST_K16(mma_m16n8k8_f16_f32, 2, 8, SINGLE, float)
HOST_K16(mma_m16n8k8_f16_f16, 2, 8, HALF_PAIRS, std::uint16_t)
HOST_K16(mma_m16n8k4_tf32_f32, 4, 4, SINGLE, float)
HOST_K16(mma_m16n8k16_e4m3_f32, 1, 16, SINGLE, float)
HOST_K32(mma_m16n8k8_tf32_f32, 4, 8, SINGLE, float)
HOST_K32(mma_m16n8k32_e5m2_f16, 1, 32, HALF_PAIRS, std::uint16_t)
HOST_WGMMA(wgmma_m64n8k16_f16_f32, 2, 16, SINGLE, float)
HOST_WGMMA(wgmma_m64n8k8_tf32_f32, 4, 8, SINGLE, float)
HOST_WGMMA(wgmma_m64n8k32_e4m3_f16, 1, 32, HALF_PAIRS, std::uint16_t)

inline void mma_m8n8k4_f64(double (&c)[2], double a, double b) {
    detail::Fragments operands{c, &a, &b};
    host::together(detail::doubles, &operands);
}

inline void fence_proxy_async() {}
inline void wgmma_fence() {}
inline void wgmma_finish() {}
inline unsigned long long wgmma_descriptor(u32 shared, u32 along_k, u32 across) {
    const auto field = [](u32 bytes) { return static_cast<unsigned long long>((bytes & 0x3ffff) >> 4); };
    return field(shared) | field(along_k) << 16 | field(across) << 32;
}

}  // namespace ptx
