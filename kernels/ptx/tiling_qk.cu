// "tiling-qk": Q and K come in slices of head_dim; V has a tile, filled slice by slice beside them.
#include "flash.cuh"

struct Tiling : Build {
    static constexpr Query query = Query::sliced;
    static constexpr int depth = QK_DEPTH;
    static constexpr int width = 0;
    static constexpr int slots = stages;
};

FLASH_FORWARD(tiling_qk)
