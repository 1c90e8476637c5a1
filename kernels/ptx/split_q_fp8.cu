// "split-q" of 8-bit Q, K and V.
#include "flash.cuh"

struct Tiling : Build {
    // Q's fragments take as many registers as those of 16 bits where they are converted to fp16
    // first (sm_90, sm_100), and sums take more.
    static constexpr Query query = head_dim < 128 ? Query::registers : Query::shared;
    static constexpr int depth = head_dim;
    static constexpr int width = head_dim;
    static constexpr int slots = 2 * stages;  // K and V in turn
};

FLASH_FORWARD(split_q_fp8)
