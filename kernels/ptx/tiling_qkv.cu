// "tiling-qkv": Q, K and V come in slices of head_dim: shared memory does not grow with it.
#include "flash.cuh"

struct Tiling : Build {
    static constexpr Query query = Query::sliced;
    static constexpr int depth = QK_DEPTH;
    static constexpr int width = V_WIDTH;
    static constexpr int slots = stages;
};

FLASH_FORWARD(tiling_qkv)
