// A kernel of a dozen lines with at most one planted fault: O is Q mirrored inside every 128
// elements, through shared memory.
//
// A build defines NAME, and FAULT as one of these.
#define NOTHING 0
#define OVERRUN 1     // one thread more than there are elements writes its own
#define OVERREAD 2    // one thread more than there are elements reads one
#define SHARED 3      // every thread writes behind the tile
#define MISALIGNED 4  // four floats are loaded at once from an address that 16 does not divide
#define BARRIER 5     // no thread waits for what the other warps write
#define COPY 6        // no thread waits until its asynchronous copy has landed
#define MBARRIER 7    // every thread arrives at an mbarrier, and none waits there
#define DIVERGENT 8   // a part of a warp arrives at the barrier
#define UNWRITTEN 9   // no thread writes the tile; the compiler does not know that rows > 0
#define HALVED 10     // none here: halves what it reads, for one that is given other memory as Q

extern "C" __global__ void __launch_bounds__(128)
NAME(const float* q, float* out, float* lse, int elements, int rows) {
    __shared__ float tile[128];
    const int i = blockIdx.x * 128 + threadIdx.x;
    const int behind = FAULT == SHARED ? rows : 0;
    float element = i < elements + (FAULT == OVERREAD) ? q[i] : 0.0f;
    if (FAULT == HALVED) {
        element *= 0.5f;  // else it would leave the poison's own bits
    }
    if (FAULT == MISALIGNED) {
        const float4 four = *reinterpret_cast<const float4*>(q + 1);
        element = four.x + four.y + four.z + four.w;  // else a narrower load would do
    }
    if (FAULT == COPY) {
        const int source = i < elements ? i : 0;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n\tcp.async.commit_group;"
                     :: "r"((unsigned)__cvta_generic_to_shared(tile + threadIdx.x)),
                        "l"(__cvta_generic_to_global(q + source)) : "memory");
    } else if (FAULT != UNWRITTEN || rows <= 0) {
        tile[threadIdx.x + behind] = element;
    }
    if (FAULT == MBARRIER) {
        __shared__ unsigned long long arrivals;
        const unsigned barrier = (unsigned)__cvta_generic_to_shared(&arrivals);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared.b64 [%0], 128;" :: "r"(barrier) : "memory");
        }
        __syncthreads();
        tile[threadIdx.x] = element + 1.0f;
        asm volatile("{ .reg .b64 token; mbarrier.arrive.shared.b64 token, [%0]; }"
                     :: "r"(barrier) : "memory");
    } else if (FAULT != BARRIER && (FAULT != DIVERGENT || threadIdx.x < 100)) {
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
