// "split-kv": warps share the rows and divide the keys of S and the columns of O between them.
#include "flash.cuh"

struct Tiling : Build {
    static constexpr Query query = Query::shared;
    static constexpr int depth = head_dim;
    static constexpr int width = head_dim;
    static constexpr int slots = 2 * stages;  // K and V in turn
};

FLASH_FORWARD(split_kv)
