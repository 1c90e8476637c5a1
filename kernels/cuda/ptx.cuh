// The PTX instructions that the kernels use, one function each; no other file holds inline assembly.
//
// Headings name the sections of NVIDIA's "Parallel Thread Execution ISA", chapter "Instruction Set".  16-bit operands are plain
// bits: a register holds two, the one with the lower index in its lower half.  In layouts, g = lane / 4 is a lane's group of
// four and t = lane % 4 its place in it.  Everything here runs on sm_80 and later, unless it says what it needs.
#pragma once

namespace ptx {

using u32 = unsigned int;

// A 16-bit format: what mma.sync multiplies and what fp32 is rounded to.
enum class Format { float16, bfloat16 };

// The 32-bit address of something in shared memory, as instructions with a .shared operand take it.  (CUDA's own intrinsic.)
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// "Data Movement and Conversion Instructions: Non-bulk copy" (asynchronous copies)

// cp.async.cg.shared.global: copy `bytes` (0 to 16) from global to shared memory, both 16-byte aligned, and fill the rest of
// the 16 bytes with zeros.  Through L2 only.  With bytes = 0 nothing is read.
__device__ __forceinline__ void cp_async_cg(u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// cp.async.ca.shared.global: the same through L1, for what other blocks of the same multiprocessor will read as well.
__device__ __forceinline__ void cp_async_ca(u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// cp.async.commit_group: put this thread's copies since the last commit into a group, which may be empty.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// cp.async.wait_group N: wait until all but this thread's latest N groups have landed.  Only this thread may then rely on
// them; other threads need a barrier as well.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// "Warp-level matrix load instruction: ldmatrix"
//
// An 8x8 matrix of 16-bit elements is eight rows of 16 bytes.  Lane 8 i + r names the address of row r of matrix i (x1: lanes 0
// to 7, x2: 0 to 15, x4: all; other lanes' addresses are ignored).  Register i of a lane then holds elements (row g, columns 2t
// and 2t + 1) of matrix i, or with .trans (rows 2t and 2t + 1, column g).

// ldmatrix.sync.aligned.m8n8.x1.shared.b16
__device__ __forceinline__ void ldmatrix_x1(u32& d, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n" : "=r"(d) : "r"(row) : "memory");
}

// ldmatrix.sync.aligned.m8n8.x2.shared.b16
__device__ __forceinline__ void ldmatrix_x2(u32 (&d)[2], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(row)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ __forceinline__ void ldmatrix_x4(u32 (&d)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16
__device__ __forceinline__ void ldmatrix_x1_trans(u32& d, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n" : "=r"(d) : "r"(row) : "memory");
}

// ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&d)[2], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(row)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&d)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
}

// "Matrix Fragments for mma.m16n8k16 with floating point type" and "Multiply-and-Accumulate Instruction: mma"
//
// D (16x8) = A (16x16) B (16x8) + C (16x8), over the warp.
//   A: a[0] rows g,     columns 2t, 2t + 1        a[2] rows g,     columns 2t + 8, 2t + 9
//      a[1] rows g + 8, columns 2t, 2t + 1        a[3] rows g + 8, columns 2t + 8, 2t + 9
//   B: b0 rows 2t, 2t + 1, column g               b1 rows 2t + 8, 2t + 9, column g
//   C, D: c[0], c[1] row g, columns 2t, 2t + 1    c[2], c[3] row g + 8, columns 2t, 2t + 1
// A fp16 accumulator packs the same four into two registers, (c[0], c[1]) and (c[2], c[3]).

// mma.sync.aligned.m16n8k16.row.col.f32.{f16.f16 | bf16.bf16}.f32, accumulating in place.
template <Format format>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (format == Format::float16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16, accumulating in place.
__device__ __forceinline__ void mma_m16n8k16_f16(u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};\n"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "Floating Point Instructions": ex2, lg2, rcp

// ex2.approx.ftz.f32: 2^x within 2 ulp; subnormal inputs and results become zero; ex2(0) = 1, ex2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.f32: log2 x, within 2^-22 absolute on (0.5, 2) and relative elsewhere; lg2(0) = -inf.
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// rcp.approx.f32: 1 / x within 1 ulp.
__device__ __forceinline__ float rcp(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// "Data Movement and Conversion Instructions: cvt"

// cvt.rn.{f16x2 | bf16x2}.f32: two fp32 rounded to nearest even, `low` into the lower half.
template <Format format>
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    if constexpr (format == Format::float16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// "Data Movement and Conversion Instructions: shfl.sync"

// shfl.sync.bfly.b32 over the whole warp: the value of the lane whose index differs in the bits of `bits`.
__device__ __forceinline__ float shfl_bfly(float x, int bits) {
    float y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;\n" : "=f"(y) : "f"(x), "r"(bits));
    return y;
}

// Below: what only verify/probes measures.

// "Matrix Fragments for mma.m16n8k4, .m16n8k8, .m16n8k16, .m16n8k32" and "Multiply-and-Accumulate Instruction: mma"
//
// The other shapes and types, accumulating in place.  Counted in bytes along K, of which a row has 16 or 32, all are alike:
// byte i of a[r] is byte 4t + 16 (r / 2) + i of row g + 8 (r % 2) of A, byte i of b[r] is byte 4t + 16 r + i of column g of B.
// C and D as above.  tf32 is a register that holds fp32.  8-bit types need sm_89.
#define PTX_MMA_K16(NAME, SHAPE, TYPE)                                                                                         \
    __device__ __forceinline__ void NAME##_f32(float (&c)[4], const u32 (&a)[2], u32 b) {                                      \
        asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                                                    \
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"                                                            \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                   \
            : "r"(a[0]), "r"(a[1]), "r"(b));                                                                                   \
    }
#define PTX_MMA_K16_HALF(NAME, SHAPE, TYPE)                                                                                    \
    __device__ __forceinline__ void NAME##_f16(u32 (&c)[2], const u32 (&a)[2], u32 b) {                                        \
        asm("mma.sync.aligned." SHAPE ".row.col.f16." TYPE "." TYPE ".f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};\n"               \
            : "+r"(c[0]), "+r"(c[1])                                                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(b));                                                                                   \
    }
#define PTX_MMA_K32(NAME, SHAPE, TYPE)                                                                                         \
    __device__ __forceinline__ void NAME##_f32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {                             \
        asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                                                    \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"                                                \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                   \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                                   \
    }
#define PTX_MMA_K32_HALF(NAME, SHAPE, TYPE)                                                                                    \
    __device__ __forceinline__ void NAME##_f16(u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1) {                               \
        asm("mma.sync.aligned." SHAPE ".row.col.f16." TYPE "." TYPE ".f16 "                                                    \
            "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};\n"                                                                \
            : "+r"(c[0]), "+r"(c[1])                                                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                                   \
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
PTX_MMA_K32(mma_m16n8k32_e4m3, "m16n8k32", "e4m3")
PTX_MMA_K32(mma_m16n8k32_e5m2, "m16n8k32", "e5m2")
PTX_MMA_K32_HALF(mma_m16n8k32_e4m3, "m16n8k32", "e4m3")
PTX_MMA_K32_HALF(mma_m16n8k32_e5m2, "m16n8k32", "e5m2")
#undef PTX_MMA_K16
#undef PTX_MMA_K16_HALF
#undef PTX_MMA_K32
#undef PTX_MMA_K32_HALF

// mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64, accumulating in place: a is row g, column t of A; b is row t, column g of B;
// c[0], c[1] row g, columns 2t, 2t + 1.
__device__ __forceinline__ void mma_m8n8k4_f64(double (&c)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
        : "+d"(c[0]), "+d"(c[1])
        : "d"(a), "d"(b));
}

// "Asynchronous Warpgroup Level Matrix Instructions" (sm_90a)
//
// D (64x8) = A (64x32 bytes) B (32 bytes x 8) + D over four warps, of which warp w has rows 16w to 16w + 15, its registers as
// those of an mma of 16 rows.  B is in shared memory, by its descriptor.

// wgmma.fence: registers, and shared memory written before, are ready for the products that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// wgmma.commit_group and wgmma.wait_group 0: all products asked for so far are done.
__device__ __forceinline__ void wgmma_finish() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" ::: "memory");
}

// fence.proxy.async.shared::cta: what this thread wrote to shared memory by ordinary stores is there for wgmma.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// "Matrix Descriptor Format", without swizzling: a matrix that is K-major, as blocks of eight rows (of A) or columns (of B), 16
// bytes each, one after the other.  `along_k` and `across`: bytes from one block to the next in K, and in M or N.
__device__ __forceinline__ unsigned long long wgmma_descriptor(u32 shared, u32 along_k, u32 across) {
    const auto field = [](u32 bytes) { return static_cast<unsigned long long>((bytes & 0x3ffff) >> 4); };
    return field(shared) | field(along_k) << 16 | field(across) << 32;
}

#define PTX_WGMMA(NAME, SHAPE, TYPE, TRANSPOSED)                                                                               \
    __device__ __forceinline__ void NAME##_f32(float (&d)[4], const u32 (&a)[4], unsigned long long b) {                       \
        asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE                                               \
                     " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1" TRANSPOSED ";\n"                                       \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                    \
    }
#define PTX_WGMMA_HALF(NAME, SHAPE, TYPE, TRANSPOSED)                                                                          \
    __device__ __forceinline__ void NAME##_f16(u32 (&d)[2], const u32 (&a)[4], unsigned long long b) {                         \
        asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f16." TYPE "." TYPE                                               \
                     " {%0, %1}, {%2, %3, %4, %5}, %6, 1, 1, 1" TRANSPOSED ";\n"                                               \
                     : "+r"(d[0]), "+r"(d[1])                                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                    \
    }
// wgmma.mma_async with scale-d, imm-scale-a, imm-scale-b = 1 and, for 16-bit types, B not transposed.
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

// "Floating Point Instructions" and "Half Precision Floating Point Instructions" that approximate, for what is measured of them

#define PTX_UNARY(NAME, INSTRUCTION)                                                                                           \
    __device__ __forceinline__ float NAME(float x) {                                                                           \
        float y;                                                                                                               \
        asm(INSTRUCTION " %0, %1;\n" : "=f"(y) : "f"(x));                                                                      \
        return y;                                                                                                              \
    }
#define PTX_UNARY_PAIR(NAME, INSTRUCTION)                                                                                      \
    __device__ __forceinline__ u32 NAME(u32 x) {                                                                               \
        u32 y;                                                                                                                 \
        asm(INSTRUCTION " %0, %1;\n" : "=r"(y) : "r"(x));                                                                      \
        return y;                                                                                                              \
    }
PTX_UNARY(ex2_approx, "ex2.approx.f32")  // `ex2` is the one that flushes
PTX_UNARY(lg2_approx_ftz, "lg2.approx.ftz.f32")
PTX_UNARY(rcp_approx_ftz, "rcp.approx.ftz.f32")
PTX_UNARY(tanh_approx, "tanh.approx.f32")
PTX_UNARY_PAIR(ex2_approx_f16x2, "ex2.approx.f16x2")
PTX_UNARY_PAIR(ex2_approx_ftz_bf16x2, "ex2.approx.ftz.bf16x2")  // sm_90
PTX_UNARY_PAIR(tanh_approx_f16x2, "tanh.approx.f16x2")
PTX_UNARY_PAIR(tanh_approx_bf16x2, "tanh.approx.bf16x2")  // sm_90
#undef PTX_UNARY
#undef PTX_UNARY_PAIR

// div.full and div.approx: a / b within 2 ulp, the latter for divisors in [2^-126, 2^126]
#define PTX_DIVISION(NAME, INSTRUCTION)                                 \
    __device__ __forceinline__ float NAME(float a, float b) {           \
        float y;                                                        \
        asm(INSTRUCTION " %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));   \
        return y;                                                       \
    }
PTX_DIVISION(div_full, "div.full.f32")
PTX_DIVISION(div_full_ftz, "div.full.ftz.f32")
PTX_DIVISION(div_approx, "div.approx.f32")
#undef PTX_DIVISION

}  // namespace ptx
