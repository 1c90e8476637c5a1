// The PTX instructions that only these probes measure, one function each, beside kernels/cuda's
// ptx.cuh: the same conventions.
#pragma once

#include "ptx.cuh"

namespace ptx {

// "Matrix Fragments for mma.m16n8k4, .m16n8k8, .m16n8k16, .m16n8k32" and "Multiply-and-Accumulate
// Instruction: mma"
//
// The other shapes and types, accumulating in place.  Counted in bytes along K, of which a row has
// 16 or 32, all are alike: byte i of a[r] is byte 4t + 16 (r / 2) + i of row g + 8 (r % 2) of A,
// byte i of b[r] is byte 4t + 16 r + i of column g of B.  C and D as in ptx.cuh.  tf32 is a
// register that holds fp32.  8-bit types need sm_89.
#define PTX_MMA_K16(NAME, SHAPE, TYPE)                                                        \
    __device__ __forceinline__ void NAME##_f32(float (&c)[4], const u32 (&a)[2], u32 b) {     \
        asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                   \
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"                           \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                  \
            : "r"(a[0]), "r"(a[1]), "r"(b));                                                  \
    }
#define PTX_MMA_K16_HALF(NAME, SHAPE, TYPE)                                                   \
    __device__ __forceinline__ void NAME##_f16(u32 (&c)[2], const u32 (&a)[2], u32 b) {       \
        asm("mma.sync.aligned." SHAPE ".row.col.f16." TYPE "." TYPE ".f16 "                   \
            "{%0, %1}, {%2, %3}, {%4}, {%0, %1};\n"                                           \
            : "+r"(c[0]), "+r"(c[1])                                                          \
            : "r"(a[0]), "r"(a[1]), "r"(b));                                                  \
    }
#define PTX_MMA_K32(NAME, SHAPE, TYPE)                                                        \
    __device__ __forceinline__ void NAME##_f32(                                               \
        float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1                                      \
    ) {                                                                                       \
        asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                   \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"               \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                  \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                  \
    }
#define PTX_MMA_K32_HALF(NAME, SHAPE, TYPE)                                                   \
    __device__ __forceinline__ void NAME##_f16(                                               \
        u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1                                        \
    ) {                                                                                       \
        asm("mma.sync.aligned." SHAPE ".row.col.f16." TYPE "." TYPE ".f16 "                   \
            "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};\n"                               \
            : "+r"(c[0]), "+r"(c[1])                                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                  \
    }
PTX_MMA_K16(mma_m16n8k8_f16, "m16n8k8", "f16")
PTX_MMA_K16_HALF(mma_m16n8k8_f16, "m16n8k8", "f16")
PTX_MMA_K16(mma_m16n8k8_bf16, "m16n8k8", "bf16")
PTX_MMA_K16(mma_m16n8k4_tf32, "m16n8k4", "tf32")
PTX_MMA_K32(mma_m16n8k8_tf32, "m16n8k8", "tf32")
PTX_MMA_K16(mma_m16n8k16_e4m3, "m16n8k16", "e4m3")
PTX_MMA_K16(mma_m16n8k16_e5m2, "m16n8k16", "e5m2")
PTX_MMA_K16_HALF(mma_m16n8k16_e4m3, "m16n8k16", "e4m3")
PTX_MMA_K16_HALF(mma_m16n8k16_e5m2, "m16n8k16", "e5m2")
PTX_MMA_K32_HALF(mma_m16n8k32_e4m3, "m16n8k32", "e4m3")
PTX_MMA_K32_HALF(mma_m16n8k32_e5m2, "m16n8k32", "e5m2")
#undef PTX_MMA_K16
#undef PTX_MMA_K16_HALF
#undef PTX_MMA_K32
#undef PTX_MMA_K32_HALF

// mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64, accumulating in place: a is row g, column t of
// A; b is row t, column g of B; c[0], c[1] row g, columns 2t, 2t + 1.
__device__ __forceinline__ void mma_m8n8k4_f64(double (&c)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
        : "+d"(c[0]), "+d"(c[1])
        : "d"(a), "d"(b));
}

// "Asynchronous Warpgroup Level Matrix Instructions" (sm_90a)
//
// D (64x8) = A (64x32 bytes) B (32 bytes x 8) + D over four warps, of which warp w has rows 16w to
// 16w + 15, its registers as those of an mma of 16 rows.  B is in shared memory, by its
// descriptor.

// wgmma.fence: registers, and shared memory written before, are ready for the products that
// follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// wgmma.commit_group and wgmma.wait_group 0: all products asked for so far are done.
__device__ __forceinline__ void wgmma_finish() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" :::
                 "memory");
}

// fence.proxy.async.shared::cta: what this thread wrote to shared memory by ordinary stores is
// there for wgmma.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// "Matrix Descriptor Format", without swizzling: a matrix that is K-major, as blocks of eight rows
// (of A) or columns (of B), 16 bytes each, one after the other.  `along_k` and `across`: bytes from
// one block to the next in K, and in M or N.
__device__ __forceinline__ unsigned long long wgmma_descriptor(
    u32 shared, u32 along_k, u32 across
) {
    const auto field = [](u32 bytes) {
        return static_cast<unsigned long long>((bytes & 0x3ffff) >> 4);
    };
    return field(shared) | field(along_k) << 16 | field(across) << 32;
}

#define PTX_WGMMA(NAME, SHAPE, TYPE, TRANSPOSED)                                              \
    __device__ __forceinline__ void NAME##_f32(                                               \
        float (&d)[4], const u32 (&a)[4], unsigned long long b                                \
    ) {                                                                                       \
        asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE              \
                     " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1" TRANSPOSED ";\n"      \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
    }
#define PTX_WGMMA_HALF(NAME, SHAPE, TYPE, TRANSPOSED)                                         \
    __device__ __forceinline__ void NAME##_f16(                                               \
        u32 (&d)[2], const u32 (&a)[4], unsigned long long b                                  \
    ) {                                                                                       \
        asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f16." TYPE "." TYPE              \
                     " {%0, %1}, {%2, %3, %4, %5}, %6, 1, 1, 1" TRANSPOSED ";\n"              \
                     : "+r"(d[0]), "+r"(d[1])                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
    }
// wgmma.mma_async with scale-d, imm-scale-a, imm-scale-b = 1 and, for 16-bit types, B not
// transposed.
PTX_WGMMA(wgmma_m64n8k16_f16, "m64n8k16", "f16", ", 0")
PTX_WGMMA_HALF(wgmma_m64n8k16_f16, "m64n8k16", "f16", ", 0")
PTX_WGMMA(wgmma_m64n8k16_bf16, "m64n8k16", "bf16", ", 0")
PTX_WGMMA(wgmma_m64n8k8_tf32, "m64n8k8", "tf32", "")
PTX_WGMMA(wgmma_m64n8k32_e4m3, "m64n8k32", "e4m3", "")
PTX_WGMMA(wgmma_m64n8k32_e5m2, "m64n8k32", "e5m2", "")
PTX_WGMMA_HALF(wgmma_m64n8k32_e4m3, "m64n8k32", "e4m3", "")
PTX_WGMMA_HALF(wgmma_m64n8k32_e5m2, "m64n8k32", "e5m2", "")
#undef PTX_WGMMA
#undef PTX_WGMMA_HALF

// Approximations of "Floating Point Instructions" and "Half Precision Floating Point Instructions",
// whose errors functions.cu measures

#define PTX_UNARY(NAME, INSTRUCTION)                                                          \
    __device__ __forceinline__ float NAME(float x) {                                          \
        float y;                                                                              \
        asm(INSTRUCTION " %0, %1;\n" : "=f"(y) : "f"(x));                                     \
        return y;                                                                             \
    }
#define PTX_UNARY_PAIR(NAME, INSTRUCTION)                                                     \
    __device__ __forceinline__ u32 NAME(u32 x) {                                              \
        u32 y;                                                                                \
        asm(INSTRUCTION " %0, %1;\n" : "=r"(y) : "r"(x));                                     \
        return y;                                                                             \
    }
PTX_UNARY(ex2_approx, "ex2.approx.f32")  // `ex2` is the one that flushes
PTX_UNARY(lg2_approx_ftz, "lg2.approx.ftz.f32")
PTX_UNARY(rcp_approx_ftz, "rcp.approx.ftz.f32")
PTX_UNARY(tanh_approx, "tanh.approx.f32")
PTX_UNARY_PAIR(ex2_approx_ftz_bf16x2, "ex2.approx.ftz.bf16x2")  // sm_90
PTX_UNARY_PAIR(tanh_approx_f16x2, "tanh.approx.f16x2")
PTX_UNARY_PAIR(tanh_approx_bf16x2, "tanh.approx.bf16x2")  // sm_90
#undef PTX_UNARY
#undef PTX_UNARY_PAIR

// div.full and div.approx: a / b within 2 ulp, the latter for divisors in [2^-126, 2^126]
#define PTX_DIVISION(NAME, INSTRUCTION)                                                       \
    __device__ __forceinline__ float NAME(float a, float b) {                                 \
        float y;                                                                              \
        asm(INSTRUCTION " %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));                         \
        return y;                                                                             \
    }
PTX_DIVISION(div_full, "div.full.f32")
PTX_DIVISION(div_full_ftz, "div.full.ftz.f32")
PTX_DIVISION(div_approx, "div.approx.f32")
#undef PTX_DIVISION

}  // namespace ptx
