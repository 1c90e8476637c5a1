// One warp reads four 8x8 matrices with ldmatrix from rows of PITCH bytes.  At 128 bytes the eight
// rows of a matrix start in one bank; at 144 bytes they lie in different banks, all 32 of them.

extern "C" __global__ void __launch_bounds__(32) matrices(unsigned* out) {
    __shared__ __align__(128) unsigned char tile[32 * PITCH];
    int lane = threadIdx.x;
    for (int i = lane; i < 32 * PITCH / 4; i += 32) ((unsigned*)tile)[i] = i;
    __syncthreads();
    unsigned row = (unsigned)__cvta_generic_to_shared(tile + PITCH * lane), r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
    for (int i = 0; i < 4; ++i) out[32 * i + lane] = r[i];
}
