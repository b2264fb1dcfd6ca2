// What the roles of a backward launch say to each other: its tasks, its counters, how many tiles there are.

#pragma once

#include "moe/backward/record.cuh"
#include "moe/backward/weight_tiles.cuh"
#include "moe/pipeline.cuh"

#ifndef GROUP  // as in kernels that run no tiles
#define GROUP 0
#endif

#define BOX 8192u  // bytes of 64 x 64

// block, column, rows: of WEIGHTS tile `column` of an expert's weights, `rows` of its 128 rows are inside.
struct BackTask : Task {
  u32 segment;
  u32 steps;   // of K, 64 each
  u32 expert;
  u32 part;    // PART_*
};

struct BackShared : Rings {
  typedef BackTask Task;
  BackTask tasks[TASKS];
  const Rank *rank;  // the records of this CTA
  const Gradient *gradient;
};
// The same records, with GROUP read from shared memory again, so that registers need not keep where they
// are across the products of a tile. Without, they are parameters of the launch.
static __device__ __forceinline__ const Rank &reread(const Rank &r, const BackShared &s) {
  return GROUP ? *s.rank : r;
}
static __device__ __forceinline__ const Gradient &reread(const Gradient &g, const BackShared &s) {
  return GROUP ? *s.gradient : g;
}

static __device__ __forceinline__ bool is_hidden(u32 kind) {
  return kind == BACK_HIDDEN || kind == BACK_SHARED_HIDDEN;
}
static __device__ __forceinline__ bool is_input(u32 kind) {
  return kind == BACK_INPUT || kind == BACK_SHARED_INPUT;
}
static __device__ __forceinline__ bool is_weights(u32 kind) {
  return kind == BACK_WEIGHTS || kind == BACK_SHARED_WEIGHTS;
}
static __device__ __forceinline__ bool is_again(u32 kind) {
  return kind == BACK_AGAIN || kind == BACK_SHARED_AGAIN;
}
static __device__ __forceinline__ bool is_shared(u32 kind) {
  return kind == BACK_SHARED_HIDDEN || kind == BACK_SHARED_INPUT || kind == BACK_SHARED_WEIGHTS ||
         kind == BACK_SHARED_AGAIN;
}
static __device__ __forceinline__ u32 width_of(const Rank &r, u32 kind) {
  return is_shared(kind) ? r.shared_width : r.width;
}
// WANT_GATE, WANT_UP, WANT_DOWN of the experts, or of the shared expert.
static __device__ __forceinline__ u32 wants_of(const Gradient &g, u32 kind) {
  return is_shared(kind) ? g.wants >> 3 & 7 : g.wants & 7;
}
// Where block `block` lies: in the ring, or in the memory of the shared expert.
static __device__ __forceinline__ u32 place_of(const Gradient &g, const Task &task) {
  return is_shared(task.kind) ? task.block : task.block % g.ring;
}

// How many 64 columns of a tile of HIDDEN are inside.
static __device__ __forceinline__ u32 pieces_of(u32 width, u32 column) {
  return min(4u, width / 64 - column * 4);
}

// ---- counters -----------------------------------------------------------------------------------

static __device__ __forceinline__ u32 *back_ready_of(const Rank &r, const Gradient &g, u32 block) {
  return g.counters + BACK_HEAD + block;
}
static __device__ __forceinline__ u32 *again_of(const Rank &r, const Gradient &g, u32 block) {
  return g.counters + BACK_HEAD + r.max_blocks + block;
}
static __device__ __forceinline__ u32 *hidden_of(const Rank &r, const Gradient &g, u32 segment) {
  return g.counters + BACK_HEAD + 2 * r.max_blocks + segment;
}
static __device__ __forceinline__ u32 *used_of(const Rank &r, const Gradient &g, u32 segment) {
  return g.counters + BACK_HEAD + 3 * r.max_blocks + segment;
}
