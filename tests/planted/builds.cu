// A pipelined matrix product of one warp, for tests of what builds declare: copies (cp.async or
// loads and stores), ldmatrix, mma in a loop.  COPIES_ASYNC: 0 or 1.  KEPT: floats that a thread
// keeps through the loop; __launch_bounds__ leaves it 32 registers, so that many of them spill.

#define ASM asm volatile

#if KEPT > 8
#define BOUNDS __launch_bounds__(1024, 2)
#else
#define BOUNDS __launch_bounds__(32)
#endif

extern "C" __global__ void BOUNDS product(const float4* in, float* out, int steps) {
    __shared__ float4 tile[64];
    int lane = threadIdx.x;
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + lane);
    float c[4] = {0, 0, 0, 0}, kept[KEPT];
    for (int i = 0; i < KEPT; ++i) kept[i] = out[lane + 1024 * i];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#if COPIES_ASYNC
        ASM("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + 32 * step + lane));
        ASM("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
#else
        tile[lane] = in[32 * step + lane];
#endif
        __syncthreads();
        unsigned a[4];
        ASM("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
            : "r"(to)
            : "memory");
        ASM("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
            " {%4, %5, %6, %7}, {%4, %5}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
        for (int i = 0; i < KEPT; ++i) kept[i] = kept[i] * c[0] + kept[(i + 1) % KEPT];
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = c[i];
    for (int i = 0; i < KEPT; ++i) out[lane + 1024 * i] = kept[i];
}
