// A kernel of a dozen lines with at most one planted fault: O is Q mirrored inside every 128 elements, by way of shared memory.
//
// A build defines NAME, and FAULT as one of these.
#define NOTHING 0
#define OVERRUN 1   // one thread more than there are elements writes its own
#define OVERREAD 2  // one thread more than there are elements reads one
#define BARRIER 3   // nobody waits for what the other warps write

extern "C" __global__ void __launch_bounds__(128) NAME(const float* q, float* out, float* lse, int elements, int rows) {
    __shared__ float tile[128];
    const int i = blockIdx.x * 128 + threadIdx.x;
    tile[threadIdx.x] = i < elements + (FAULT == OVERREAD) ? q[i] : 0.0f;
    if (FAULT != BARRIER) {
        __syncthreads();  // the mirrored element is another warp's
    }
    const float mirrored = tile[127 - threadIdx.x];
    if (i < elements + (FAULT == OVERRUN)) {
        out[i] = mirrored;
    }
    if (i < rows) {
        lse[i] = mirrored;
    }
}
