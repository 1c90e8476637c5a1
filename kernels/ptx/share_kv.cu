// "share-kv": K and V go through the same tiles, one after the other.
#include "flash.cuh"

struct Tiling : Build {
    static constexpr Query query = Query::shared;
    static constexpr int depth = head_dim;
    static constexpr int width = head_dim;
    static constexpr int slots = stages;
};

FLASH_FORWARD(share_kv)
