// The PTX instructions that kernels use, one function each; no other file of kernels/ holds inline
// assembly.
//
// Headings name the sections of NVIDIA's "Parallel Thread Execution ISA", chapter "Instruction
// Set".  Operands of 8 and 16 bits are plain bits: the element with the lowest index is in a
// register's lowest bits.  In layouts, g = lane / 4 is a lane's group of four and t = lane % 4 its
// place in it.  Everything here runs on sm_80 and later, unless it says what it needs.
#pragma once

namespace ptx {

using u32 = unsigned int;

// What mma.sync multiplies and what fp32 is rounded to.  The names are those of dtypes.
enum class Format { float16, bfloat16, float8_e4m3fn, float8_e5m2 };

// Bytes of an element.
template <Format format>
constexpr int size_of = format == Format::float16 || format == Format::bfloat16 ? 2 : 1;

// The 32-bit address of something in shared memory, as instructions with a .shared operand take
// it.  (CUDA's own intrinsic.)
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// "Data Movement and Conversion Instructions: Non-bulk copy" (asynchronous copies)

// cp.async.cg.shared.global: copy `bytes` (0 to 16) from global to shared memory, both 16-byte
// aligned, and fill the rest of the 16 bytes with zeros.  Through L2 only.  With bytes = 0 nothing
// is read.
__device__ __forceinline__ void cp_async_cg(u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::
                 "r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// cp.async.ca.shared.global: the same for 4, 8 or 16 bytes, aligned to as many.  Through L1: for
// what other blocks of the same multiprocessor will read as well.
template <int size = 16>
__device__ __forceinline__ void cp_async_ca(u32 shared, const void* global, u32 bytes) {
    static_assert(size == 4 || size == 8 || size == 16);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::
                 "r"(shared), "l"(global), "n"(size), "r"(bytes)
                 : "memory");
}

// cp.async.commit_group: put this thread's copies since the last commit into a group, which may be
// empty.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// cp.async.wait_group N: wait until all but this thread's latest N groups have landed.  Only this
// thread may then rely on them; other threads need a barrier as well.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// "Warp-level matrix load instruction: ldmatrix", "Warp-level matrix store instruction: stmatrix"
//
// An 8x8 matrix of 16-bit elements is eight rows of 16 bytes, each aligned to 16 bytes.  Lane
// 8 i + r names the address of row r of matrix i (x1: lanes 0 to 7, x2: 0 to 15, x4: all; other
// lanes' addresses are ignored).  Register i of a lane holds elements (row g, columns 2t and
// 2t + 1) of matrix i, or with .trans (rows 2t and 2t + 1, column g).

// ldmatrix.sync.aligned.m8n8.x1.shared.b16
__device__ __forceinline__ void ldmatrix_x1(u32& d, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
                 : "=r"(d)
                 : "r"(row)
                 : "memory");
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
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n"
                 : "=r"(d)
                 : "r"(row)
                 : "memory");
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

// stmatrix.sync.aligned.m8n8.x1.shared.b16 (sm_90)
__device__ __forceinline__ void stmatrix_x1(u32 row, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};\n" ::"r"(row), "r"(d)
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x2.shared.b16 (sm_90)
__device__ __forceinline__ void stmatrix_x2(u32 row, const u32 (&d)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};\n" ::
                 "r"(row), "r"(d[0]), "r"(d[1])
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16 (sm_90)
__device__ __forceinline__ void stmatrix_x4(u32 row, const u32 (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                 "r"(row), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 (sm_90)
__device__ __forceinline__ void stmatrix_x1_trans(u32 row, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};\n" ::
                 "r"(row), "r"(d)
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 (sm_90)
__device__ __forceinline__ void stmatrix_x2_trans(u32 row, const u32 (&d)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};\n" ::
                 "r"(row), "r"(d[0]), "r"(d[1])
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 (sm_90)
__device__ __forceinline__ void stmatrix_x4_trans(u32 row, const u32 (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                 "r"(row), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
}

// "Matrix Fragments for mma.m16n8k16 with floating point type", the same for mma.m16n8k32, and
// "Multiply-and-Accumulate Instruction: mma"
//
// D (16x8) = A (16xK) B (Kx8) + C (16x8), over the warp.  K is 32 bytes: 16 or 32 elements.
//   A: a[0] row g,     bytes 4t ... 4t + 3        a[2] row g,     bytes 16 + 4t ... 16 + 4t + 3
//      a[1] row g + 8, bytes 4t ... 4t + 3        a[3] row g + 8, bytes 16 + 4t ... 16 + 4t + 3
//   B: b0 column g,    bytes 4t ... 4t + 3        b1 column g,    bytes 16 + 4t ... 16 + 4t + 3
//   C, D: c[0], c[1] row g, columns 2t, 2t + 1    c[2], c[3] row g + 8, columns 2t, 2t + 1
// So a register of A has columns 2t, 2t + 1 (+ 8) of 16-bit elements, or 4t ... 4t + 3 (+ 16) of
// 8-bit ones.  A fp16 accumulator packs the same four into two registers, (c[0], c[1]) and
// (c[2], c[3]).

#define PTX_MMA(SHAPE, TYPE)                                                                  \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 "                       \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"                   \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// mma.sync.aligned.m16n8k16.row.col.f32.{f16.f16 | bf16.bf16}.f32, accumulating in place.
template <Format format>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(size_of<format> == 2);
    if constexpr (format == Format::float16) {
        PTX_MMA("m16n8k16", "f16");
    } else {
        PTX_MMA("m16n8k16", "bf16");
    }
}

// mma.sync.aligned.m16n8k32.row.col.f32.{e4m3.e4m3 | e5m2.e5m2}.f32, accumulating in place.
// (sm_89)
template <Format format>
__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(size_of<format> == 1);
    if constexpr (format == Format::float8_e4m3fn) {
        PTX_MMA("m16n8k32", "e4m3");
    } else {
        PTX_MMA("m16n8k32", "e5m2");
    }
}
#undef PTX_MMA

// mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16, accumulating in place.
__device__ __forceinline__ void mma_m16n8k16_f16(u32 (&c)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
        "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};\n"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "Floating Point Instructions" and "Half Precision Floating Point Instructions": ex2, lg2, rcp

// ex2.approx.ftz.f32: 2^x within 2 ulp; subnormal inputs and results become zero; ex2(0) = 1,
// ex2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// ex2.approx.f16x2: 2^x of two fp16, each within 2^-9.9 relative; subnormals are kept.
__device__ __forceinline__ u32 ex2_approx_f16x2(u32 x) {
    u32 y;
    asm("ex2.approx.f16x2 %0, %1;\n" : "=r"(y) : "r"(x));
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

// "Data Movement and Conversion Instructions: cvt, prmt"

// cvt.rn.{f16x2 | bf16x2}.f32: two fp32 rounded to nearest even, `low` into the lower half.
template <Format format>
__device__ __forceinline__ u32 pack(float low, float high) {
    static_assert(size_of<format> == 2);
    u32 packed;
    if constexpr (format == Format::float16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

#define PTX_PACK(TYPE)                                                                        \
    asm("{\n.reg .b16 low, high;\n"                                                           \
        "cvt.rn.satfinite." TYPE ".f32 low, %2, %1;\n"                                        \
        "cvt.rn.satfinite." TYPE ".f32 high, %4, %3;\n"                                       \
        "mov.b32 %0, {low, high};\n}\n"                                                       \
        : "=r"(packed)                                                                        \
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3))

// cvt.rn.satfinite.{e4m3x2 | e5m2x2}.f32, twice: four fp32 rounded to nearest even, x0 into the
// lowest byte.  What is beyond the largest finite number, infinity too, becomes that number; NaN
// stays NaN.  (sm_89)
template <Format format>
__device__ __forceinline__ u32 pack(float x0, float x1, float x2, float x3) {
    static_assert(size_of<format> == 1);
    u32 packed;
    if constexpr (format == Format::float8_e4m3fn) {
        PTX_PACK("e4m3x2");
    } else {
        PTX_PACK("e5m2x2");
    }
    return packed;
}
#undef PTX_PACK

// cvt.f32.{f16 | bf16}: the two elements of a register, exactly.
template <Format format>
__device__ __forceinline__ void unpack(u32 packed, float& low, float& high) {
    static_assert(size_of<format> == 2);
    if constexpr (format == Format::float16) {
        asm("{\n.reg .b16 low, high;\n"
            "mov.b32 {low, high}, %2;\n"
            "cvt.f32.f16 %0, low;\n"
            "cvt.f32.f16 %1, high;\n}\n"
            : "=f"(low), "=f"(high)
            : "r"(packed));
    } else {
        low = __uint_as_float(packed << 16);
        high = __uint_as_float(packed & 0xffff0000);
    }
}

// prmt.b32: byte i of the result is byte (selector >> 4 i) & 7 of b:a, of which a has bytes 0 to 3
// and b has 4 to 7.  ldmatrix.trans moves pairs of 8-bit elements; this takes the pairs apart.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// "Data Movement and Conversion Instructions: shfl.sync", over the whole warp

// shfl.sync.bfly.b32: the value of the lane whose index differs in the bits of `bits`.
__device__ __forceinline__ float shfl_bfly(float x, int bits) {
    float y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;\n"
                 : "=f"(y)
                 : "f"(x), "r"(bits));
    return y;
}

// The same of a register.
__device__ __forceinline__ u32 shfl_bfly(u32 x, int bits) {
    u32 y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;\n"
                 : "=r"(y)
                 : "r"(x), "r"(bits));
    return y;
}

// shfl.sync.idx.b32: the value of lane `lane`, which each lane chooses.
__device__ __forceinline__ u32 shfl_idx(u32 x, int lane) {
    u32 y;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;\n"
                 : "=r"(y)
                 : "r"(x), "r"(lane));
    return y;
}

}  // namespace ptx
