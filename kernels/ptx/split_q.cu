// "split-q": every warp has rows of its own and sees all keys; K and V have tiles of their own.
#include "flash.cuh"

struct Tiling : Build {
    static constexpr Query query = Query::registers;
    static constexpr int depth = head_dim;
    static constexpr int width = head_dim;
    static constexpr int slots = 2 * stages;  // K and V in turn
};

FLASH_FORWARD(split_q)
