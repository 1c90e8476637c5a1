// What the producer of a forward for Hopper loads, tile by tile.  Include the forward's own tiles
// first: they say in pieces of how many columns (kPiece, kPieces) a tile lies.
#pragma once

namespace parts {

using tiles::kPiece;
using tiles::kPieces;

// Begin to copy the rows row, row + 1... of a head into a tile, piece by piece; the barrier counts
// the bytes, zeros out of bounds among them.  Where all heads or batches are the same memory, the
// map has one of them.
CUTE_DEVICE void fetch(TmaDescriptor const& map, Strided<Element> const& tensor, int row, int head,
                       int batch, int rows, Element* tile, uint64_t& here) {
  set_barrier_transaction_bytes(here, rows * HEAD_DIM * sizeof(Element));
  CUTE_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    SM90_TMA_LOAD_4D::copy(&map, &here, uint64_t(TMA::CacheHintSm90::EVICT_NORMAL),
                           tile + piece * rows * kPiece, piece * kPiece, row,
                           tensor.head ? head : 0, tensor.batch ? batch : 0);
  }
}

// What a tile of rows needs, every part as soon as its slot is free.
template <class Arguments, class Shared>
CUTE_DEVICE void load_tile(Arguments const& a, Shared& shared, Walk const& walk, BlockRows tile,
                           Turns const& turns) {
  bool leader = threadIdx.x == 0;
  int blocks = walk.blocks();
  int head_kv = tile.head / a.group;
  for (int t = 0; t < blocks; ++t) {
    Turn turn(turns.keys + t);
    bool refills = turns.keys + t >= STAGES;
    int key = (walk.first_block() + t) * BLOCK_N;
    int place = turn.slot * BLOCK_N * HEAD_DIM;
    // The tile before it in this slot has been read in the phase before this turn's.  No lane may
    // miss that phase: a later one has the same parity.
    if (refills) {
      wait_barrier(shared.k_read[turn.slot], turn.parity ^ 1);
    }
    __syncwarp();
    if (leader) {
      fetch(a.map_k, a.k, key, head_kv, tile.batch, BLOCK_N, shared.k + place,
            shared.k_here[turn.slot]);
    }
    if (t == 0) {
      QueryTurn query(turns.queries);
      if constexpr (kPersistent) {
        // O of the tile before it in this slot has left.
        if (turns.queries >= QUERY_SLOTS) {
          wait_barrier(shared.q_read[query.slot], query.parity ^ 1);
        }
        __syncwarp();
      }
      if (leader) {
        fetch(a.map_q, a.q, tile.first_row, tile.head, tile.batch, BLOCK_M,
              shared.q + query.slot * BLOCK_M * HEAD_DIM, shared.q_here[query.slot]);
      }
    }
    if (refills) {
      wait_barrier(shared.v_read[turn.slot], turn.parity ^ 1);
    }
    __syncwarp();
    if (leader) {
      fetch(a.map_v, a.v, key, head_kv, tile.batch, BLOCK_N, shared.v + place,
            shared.v_here[turn.slot]);
    }
  }
}

// The first warp of the producer: all tiles of rows, one behind the other, so that the first keys
// of a tile are here when the one before it ends.
template <class Arguments, class Shared>
CUTE_DEVICE void load(Arguments const& a, Shared& shared) {
  Turns turns;
  int rounds = rounds_of(a);
  for (int round = 0; round < rounds; ++round) {
    BlockRows tile = rows_of(a, round);
    Walk walk = walk_of(a, tile.batch, tile.first_row);
    load_tile(a, shared, walk, tile, turns);
    turns.pass(walk.blocks());
  }
}

}  // namespace parts
