// Tiles of an expert's weights, 128 x 256 each: how many there are, and what each one is.

#pragma once

#include "moe/backward/record.cuh"

static __device__ __forceinline__ u32 gate_and_up(u32 wants) {
  return (wants & WANT_GATE ? 1 : 0) + (wants & WANT_UP ? 1 : 0);
}
static __device__ __forceinline__ u32 tiles_of_weights(u32 wants, u32 width, u32 hidden_size) {
  return gate_and_up(wants) * ((width + 127) / 128) * ((hidden_size + 255) / 256) +
         (wants & WANT_DOWN ? (hidden_size + 127) / 128 * ((width + 255) / 256) : 0);
}

struct WeightTile {
  u32 of;           // WANT_GATE, WANT_UP or WANT_DOWN
  u32 row, column;  // the first ones
  u32 rows;         // how many are inside
  u32 height, width;  // of the weight: rows, columns
};
// Tile `tile` of those wanted. Tiles that read the same columns of x, or rows of d_out, are neighbours.
static __device__ __forceinline__ WeightTile weight_tile(u32 wants, u32 width, u32 hidden_size,
                                                         u32 tile) {
  const u32 blocks = (width + 127) / 128, gu = gate_and_up(wants) * blocks;
  const u32 first = gu * ((hidden_size + 255) / 256);
  WeightTile t;
  if (tile < first) {
    const u32 n = tile / gu, m = tile - n * gu;
    t.of = m < blocks && wants & WANT_GATE ? WANT_GATE : WANT_UP;
    t.row = (m < blocks ? m : m - blocks) * 128;
    t.column = n * 256;
    t.height = width;
    t.width = hidden_size;
  } else {
    const u32 across = (width + 255) / 256, m = (tile - first) / across;
    t.of = WANT_DOWN;
    t.row = m * 128;
    t.column = (tile - first - m * across) * 256;
    t.height = hidden_size;
    t.width = width;
  }
  t.rows = min(BLOCK, t.height - t.row);
  return t;
}
