// "split-q" of 8-bit Q, K and V.
#include "flash.cuh"

struct Tiling : Build {
    // Where an MMA is made of two of fp16, Q's fragments, converted, take as many registers as
    // those of 16 bits, and its sums take more.
    static constexpr Query query = head_dim < 128 ? Query::registers : Query::shared;
    static constexpr int depth = head_dim;
    static constexpr int width = head_dim;
    static constexpr int slots = 2 * stages;  // K and V in turn
};

FLASH_FORWARD(split_q_fp8)
