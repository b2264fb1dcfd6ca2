// Movers of a backward launch: they bring rows of d_out and of x into their rings, and each row's weight.

#pragma once

#include "moe/backward/tiles.cuh"
#include "moe/movers.cuh"
#include "ptx.cuh"

// x is multiplied only for gradients of gate and up, or to have g and u again.
static __device__ __forceinline__ bool needs_x(const Gradient &g, u32 block) {
  return g.wants & (WANT_GATE | WANT_UP) || block >= g.saved_blocks;
}

// One row; `to` from the start of a ring. A peer's memory is read once it has entered.
static __device__ __forceinline__ void move_back(const Rank &r, const Gradient &g, u32 route, u64 to,
                                                 bool with_x, u64 &entered, u32 lane) {
  if (route == PADDING) {
    clear_row(g.d_ring + to, r.hidden_size, lane);
    if (with_x) clear_row(g.x_ring + to, r.hidden_size, lane);
    return;
  }
  const u32 peer = route >> ROUTE_BITS, token = (route & ((1u << ROUTE_BITS) - 1)) / r.slots;
  const u64 offset = (u64)token * r.hidden_size;
  const u16 *x = row_of(r, route, entered, lane);
  const BackPeer *from = g.peers + peer;
  move_row(g.d_ring + to, (peer == r.rank ? g.own_d_out : from->d_out) + offset, r.hidden_size, lane);
  if (with_x) move_row(g.x_ring + to, peer == r.rank ? x : from->x + offset, r.hidden_size, lane);
}

static __device__ __forceinline__ float weight_of(const Rank &r, const Gradient &g, u32 route) {
  const u32 peer = route >> ROUTE_BITS, slot = route & ((1u << ROUTE_BITS) - 1);
  if (route == PADDING) return 0.0f;
  return load_relaxed_float((peer == r.rank ? r.router : g.peers[peer].router) + slot);
}

static __device__ __forceinline__ void move_all_back(const Rank &rank, const Gradient &gradient,
                                                     const BackShared &s, u32 lane) {
  const u32 tickets = rank.counters[PLAN_DISPATCH];
  u64 entered = 0;
  for (;;) {
    const Rank &r = reread(rank, s);
    const Gradient &g = reread(gradient, s);
    u32 ticket = 0;
    if (lane == 0) ticket = draw(r.counters + COUNT_DISPATCH);
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= tickets) return;
    const u32 row = ticket * TICKET_ROWS, block = row / BLOCK;
    if (lane == 0) log_event(r, LOG_DISPATCH, ticket, LOG_DRAWN, 0);
    if (block >= g.ring && lane == 0) {
      const u32 segment = g.segment_of[block - g.ring];
      wait_device(r, used_of(r, g, segment), g.used_target[segment], WAIT_RING_X, block);
    }
    __syncwarp();
    if (lane == 0) log_event(r, LOG_DISPATCH, ticket, LOG_STARTED, 0);
    // a half of a block that has only padding is never multiplied
    const u32 wanted = BLOCK_ROWS(r.blocks[block]) <= 64 ? 64 : BLOCK;
    const u32 place = block % g.ring * BLOCK + row % BLOCK;
    if (row % BLOCK < wanted) {
      const u32 routes = r.routes[row + lane % TICKET_ROWS];
      const bool with_x = needs_x(g, block);
      for (u32 i = 0; i < TICKET_ROWS; ++i)
        move_back(r, g, __shfl_sync(~0u, routes, i), (u64)(place + i) * r.hidden_size, with_x, entered,
                  lane);
      if (lane < TICKET_ROWS) g.row_weights[place + lane] = weight_of(r, g, routes);  // all have entered
    }
    proxy_fence();  // the copy engine reads these rows
    __syncwarp();
    if (lane == 0) log_event(r, LOG_DISPATCH, ticket, LOG_DONE, 0);
    if (lane == 0) add_release_device(back_ready_of(r, g, block), TICKET_ROWS);
  }
}
