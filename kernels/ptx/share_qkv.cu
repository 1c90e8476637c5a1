// "share-qkv": Q goes through the tiles of K and V first, and stays in registers.
#include "flash.cuh"

struct Tiling : Build {
    static constexpr Query query = Query::ring;
    static constexpr int depth = head_dim;
    static constexpr int width = head_dim;
    static constexpr int slots = stages;
};

FLASH_FORWARD(share_qkv)
