// Movers: warps that bring rows of x, from this rank and from peers, into the ring of routed rows.
//
// They copy through registers (the fastest way over NVLink on Hopper, and it needs no shared memory),
// in the order in which tiles need the rows, as far ahead as the ring allows. Rows of padding become
// zero, so that nothing old is ever multiplied.

#pragma once

#include "moe/log.cuh"
#include "moe/pipeline.cuh"
#include "moe/waits.cuh"

#ifndef IN_FLIGHT  // 16-byte loads of a lane before the first store
#define IN_FLIGHT (GROUP || LOG ? 4 : 8)
#endif

static __device__ __forceinline__ void move_row(u16 *to, const u16 *from, u32 hidden_size, u32 lane) {
  const u32 vectors = hidden_size / 8;
  const uint4 *source = (const uint4 *)from;
  uint4 *target = (uint4 *)to;
  for (u32 first = lane; first < vectors; first += 32 * IN_FLIGHT) {
    uint4 v[IN_FLIGHT];
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; ++i)
      if (first + 32 * i < vectors) v[i] = load_streaming(source + first + 32 * i);
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; ++i)
      if (first + 32 * i < vectors) store_streaming(target + first + 32 * i, v[i]);
  }
}

static __device__ __forceinline__ void clear_row(u16 *to, u32 hidden_size, u32 lane) {
  for (u32 i = lane; i < hidden_size / 8; i += 32)
    store_streaming((uint4 *)to + i, make_uint4(0, 0, 0, 0));
}

// Rows of this rank are its own x; a peer's are read once it has entered.
static __device__ __forceinline__ const u16 *row_of(const Rank &r, u32 route, u64 &entered, u32 lane) {
  const u32 peer = route >> ROUTE_BITS, token = (route & ((1u << ROUTE_BITS) - 1)) / r.slots;
  const u64 offset = (u64)token * r.hidden_size;
  if (peer == r.rank) return r.own_x + offset;
  if (!(entered >> peer & 1)) {
    if (lane == 0)
      wait_system(r, r.peers[r.rank].flags + FLAG_ENTERED * MAX_RANKS + peer, epoch_of(r),
                  WAIT_ENTERED, peer);
    __syncwarp();
    entered |= 1ull << peer;
  }
  return r.peers[peer].x + offset;
}

static __device__ __forceinline__ void move(const Rank &r, u32 lane) {
  const u32 tickets = r.counters[PLAN_DISPATCH], up_done = up_columns(r.width);
  u64 entered = 0;
  for (;;) {
    u32 ticket = 0;
    if (lane == 0) ticket = draw(r.counters + COUNT_DISPATCH);
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= tickets) return;
    const u32 row = ticket * TICKET_ROWS, block = row / BLOCK;
    if (lane == 0) log_event(r, LOG_DISPATCH, ticket, LOG_DRAWN, 0);
    if (block >= r.ring_x && lane == 0)
      wait_device(r, up_of(r, block - r.ring_x), up_done, WAIT_RING_X, block);
    __syncwarp();
    if (lane == 0) log_event(r, LOG_DISPATCH, ticket, LOG_STARTED, 0);
    // a half of a block that has only padding is never multiplied
    const u32 wanted = BLOCK_ROWS(r.blocks[block]) <= 64 ? 64 : BLOCK;
    u16 *to = r.x_ring + ((u64)(block % r.ring_x) * BLOCK + row % BLOCK) * r.hidden_size;
    if (row % BLOCK < wanted) {
      const u32 routes = r.routes[row + lane % TICKET_ROWS];
      for (u32 i = 0; i < TICKET_ROWS; ++i, to += r.hidden_size) {
        const u32 route = __shfl_sync(~0u, routes, i);
        if (route == PADDING) clear_row(to, r.hidden_size, lane);
        else move_row(to, row_of(r, route, entered, lane), r.hidden_size, lane);
      }
    }
    proxy_fence();  // the copy engine reads these rows
    __syncwarp();
    if (lane == 0) log_event(r, LOG_DISPATCH, ticket, LOG_DONE, 0);
    if (lane == 0) add_release_device(ready_of(r, block), TICKET_ROWS);
  }
}
