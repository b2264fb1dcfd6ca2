// Shared memory of a CTA: the ring of stages that the producer fills, the ring of tasks that it
// announces, and the staging memory of the consumer warps.
//
// 384 threads: warp 0 produces, warp 1 tells the counters what is done, warps 2 and 3 move rows, warps 4
// to 11 consume: two warpgroups with 64 rows each of a tile of 128 x 256, 64 of K a stage. Everything
// that a consumer warp does outside of wgmma concerns its own 16 rows only, so warps never wait for each
// other at a tile's end.

#pragma once

#include "moe/rank.cuh"
#include "ptx.cuh"

#define STAGES 4
#define TASKS 4
#define CONSUMER_WARPS 8
#define THREADS 384
#ifndef PRODUCER_REGISTERS
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
#endif

#define A_HALF 8192u    // 64 rows x 64
#define A_BYTES 16384u
#define B_HALF 16384u   // 128 rows x 64
#define B_BYTES 32768u
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define STAGING 4096u   // of a consumer warp: 16 rows x 128 columns
// Dynamic shared memory of a launch, with what aligning to 1024 may take.
#define SHARED_BYTES (STAGES * STAGE_BYTES + CONSUMER_WARPS * STAGING + 1024)

struct Task {
  u32 kind, block, column, rows, ticket;  // kind: GROUP_*
};

struct Rings {
  u64 full[STAGES], empty[STAGES];
  // Of a task: it is there; all consumer warps are done; its place is free.
  u64 announced[TASKS], finished[TASKS], taken[TASKS];
};
// The task of the ticket after the one at work, the producer's own: registers are dear to it.
struct Upcoming {
  Group group;
  const Group *following;
  u32 until;  // the first ticket of the following group
  u32 expert;
  u32 ready;  // all that it depends on has been seen
  Task task;
};
struct Shared : Rings {
  typedef ::Task Task;
  Task tasks[TASKS];
  Upcoming upcoming;
};

// Position in a ring of N places, with the parity that its barriers have in this round.
template <u32 N> struct Position {
  u32 place = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++place == N) {
      place = 0;
      parity ^= 1;
    }
  }
};

static __device__ __forceinline__ void init_barriers(Rings &s) {
  for (int i = 0; i < STAGES; ++i) {
    barrier_init(shared_address(&s.full[i]), 1);
    barrier_init(shared_address(&s.empty[i]), CONSUMER_WARPS);
  }
  for (int i = 0; i < TASKS; ++i) {
    barrier_init(shared_address(&s.announced[i]), 1);
    barrier_init(shared_address(&s.finished[i]), CONSUMER_WARPS);
    barrier_init(shared_address(&s.taken[i]), CONSUMER_WARPS + 1);  // and the teller
  }
  barrier_init_fence();
}

static __device__ __forceinline__ u32 up_columns(u32 width) { return (width + 127) / 128; }
static __device__ __forceinline__ u32 down_columns(u32 hidden_size) { return (hidden_size + 255) / 256; }

// K of a tile of this kind.
static __device__ __forceinline__ u32 depth_of(const Rank &r, u32 kind) {
  return kind == GROUP_UP || kind == GROUP_SHARED_UP ? r.hidden_size
         : kind == GROUP_DOWN                        ? r.width
                                                     : r.shared_width;
}

static __device__ __forceinline__ u32 *ready_of(const Rank &r, u32 block) {
  return r.counters + COUNTER_HEAD + block;
}
static __device__ __forceinline__ u32 *up_of(const Rank &r, u32 block) {
  return r.counters + COUNTER_HEAD + r.max_blocks + block;
}
static __device__ __forceinline__ u32 *down_of(const Rank &r, u32 block) {
  return r.counters + COUNTER_HEAD + 2 * r.max_blocks + block;
}
static __device__ __forceinline__ u32 *shared_of(const Rank &r, u32 block) {
  return r.counters + COUNTER_HEAD + 3 * r.max_blocks + block;
}
static __device__ __forceinline__ u32 epoch_of(const Rank &r) { return r.counters[COUNT_EPOCH]; }
// Tells every peer, in its own memory, that this rank has reached something in this epoch. A rank whose
// waits have failed is silent: what it has, nobody may use.
static __device__ __forceinline__ void tell_peers(const Rank &r, u32 kind) {
  fence_system();
  if (load_relaxed(r.counters + COUNT_FAILED)) return;
  for (u32 p = 0; p < r.ranks; ++p)
    store_release_system(r.peers[p].flags + kind * MAX_RANKS + r.rank, epoch_of(r));
}
