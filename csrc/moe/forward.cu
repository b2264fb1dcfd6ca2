// The forward pass of the layer in one persistent launch: dispatch, experts, combine.
//
// out = bf16(shared + sum over k of w_k y_k), y = bf16(h w_down^T), h = bf16(silu(g) u), g and u in
// fp32; see ARCHITECTURE.md for the numerics contract, NOTES.md for what was tried. Launch: one CTA per
// SM or fewer; THREADS threads; SHARED_BYTES. GROUP 0: the rank is `one`. GROUP 1: `many` ranks share this
// launch, one CTA in `ranks_here` each, at least one. `enter` runs before, in stream order.

#ifndef GROUP
#define GROUP 0
#endif

#include "moe/consumer.cuh"
#include "moe/movers.cuh"
#include "moe/producer.cuh"
#include "moe/sums.cuh"
#include "moe/teller.cuh"

static __device__ __forceinline__ void consume(const Rank &r, Shared &s, u32 stages, u32 thread) {
  Consumer c;
  c.half = thread / 128;
  c.warp = thread / 32 % 4;
  c.lane = thread % 32;
  c.staging = stages + STAGES * STAGE_BYTES + thread / 32 * STAGING;
  c.unseen = 0;
  Task task;
  for (;; c.task.advance()) {
    task = next_task(s, c);
    if (task.kind >= GROUP_SUM) break;  // sums come last: accumulators need no place beside them
    const u32 finished = shared_address(&s.finished[c.task.place]);
    const bool up = task.kind == GROUP_UP || task.kind == GROUP_SHARED_UP;
    const u32 row = row_in_block(c) + c.lane % 16;
    const u32 route = route_of(r, task, task.kind == GROUP_DOWN, row);
    u64 target = 0;
    const bool idle = task.rows <= c.half * 64;  // a half without rows
    float d[128];
    multiply<multiply_stage>(d, s, c, stages, depth_of(r, task.kind) / 64, idle, 1, [&] {
      if (!up) target = (u64)result_of(r, task, row, route);
    });
    if (!idle && up) finish_up(d, r, c, task);
    if (!idle && !up) finish_down(d, r, c, task, target);
    if (up) c.unseen = finished;
    else if (c.lane == 0) barrier_arrive(finished);
  }
  while (task.kind == GROUP_SUM) {
    sum_token(r, task.block * SUM_TOKENS + thread / 32, c.lane);
    if (c.lane == 0) barrier_arrive(shared_address(&s.finished[c.task.place]));
    c.task.advance();
    task = next_task(s, c);
  }
  see_stores(c);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ Rank one, const Rank *many, u32 ranks_here) {
  extern __shared__ unsigned char raw[];
  __shared__ Shared s;
  __shared__ u32 failed;
#if GROUP
  const u32 mine = blockIdx.x % ranks_here;
  const Rank &r = many[mine];
#else
  const u32 mine = 0;
  const Rank &r = one;
#endif
  const u32 stages = (shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
#if GROUP
    for (const TensorMap *map = &r.x_rows; map <= &r.shared_saved_up; ++map) tma_acquire_map(map);
#endif
    init_barriers(s);
    failed = load_relaxed(r.counters + COUNT_FAILED);
  }
  __syncthreads();
  if (failed) return;  // one thread's answer for all: the roles need each other
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    registers_lower<PRODUCER_REGISTERS>();
    if (warp == 0) {
      if (lane == 0) {
        if (blockIdx.x == mine && r.ranks > 1 && r.counters[PLAN_DOWN] == 0)
          tell_peers(r, FLAG_PUSHED);  // who has nothing to do has done it
        produce(r, s, stages);
      }
      __syncwarp();
    } else if (warp == 1) {
      if (lane == 0) tell(r, s);
      __syncwarp();
    } else {
      move(r, lane);
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    consume(r, s, stages, threadIdx.x - 128);
  }
}
