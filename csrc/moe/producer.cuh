// The producer: draws tickets, waits for what a tile needs, announces it, and loads it by TMA.
//
// One thread. A ticket waits only on lower ones of its rank, on rows that movers bring in the same
// order, or on peers, so the lowest unfinished one can always go on, however many CTAs are resident.

#pragma once

#include "moe/log.cuh"
#include "moe/pipeline.cuh"
#include "moe/waits.cuh"

#define AHEAD 8  // steps of K before a tile's end at which the next ticket is drawn
#define LOOK 2   // steps later its number is there

struct Producer {
  Position<STAGES> stage;
  Position<TASKS> task;
  u32 next;  // the ticket after the one at work
};

template <class S>
static __device__ __forceinline__ void announce(S &s, Producer &p, typename S::Task task) {
  barrier_wait(shared_address(&s.taken[p.task.place]), p.task.parity ^ 1);
  s.tasks[p.task.place] = task;
  barrier_arrive(shared_address(&s.announced[p.task.place]));
  p.task.advance();
}

// Whether all that a ticket depends on is in memory already. Acquires. False also where it takes more
// than a look.
static __device__ __forceinline__ bool has_all(const Rank &r, const Group &group, u32 block) {
  switch (group.kind) {
    case GROUP_UP:
      return load_acquire_device(ready_of(r, block)) >= BLOCK &&
             (block < r.ring_h || load_acquire_device(down_of(r, block - r.ring_h)) >=
                                      down_columns(r.hidden_size));
    case GROUP_DOWN: return load_acquire_device(up_of(r, block)) >= up_columns(r.width);
    case GROUP_SHARED_UP: return true;
  }
  return false;
}

// Waits until it is.
static __device__ __forceinline__ void await(const Rank &r, const Group &group, u32 block) {
  switch (group.kind) {
    case GROUP_UP:
      wait_device(r, ready_of(r, block), BLOCK, WAIT_ROWS, block);
      if (block >= r.ring_h)
        wait_device(r, down_of(r, block - r.ring_h), down_columns(r.hidden_size), WAIT_RING_H, block);
      break;
    case GROUP_DOWN:
      wait_device(r, up_of(r, block), up_columns(r.width), WAIT_HIDDEN, block);
      break;
    case GROUP_SHARED_DOWN:
      wait_device(r, shared_of(r, block), up_columns(r.shared_width), WAIT_HIDDEN, block);
      break;
    case GROUP_SUM:
      wait_device(r, r.counters + COUNT_DOWN, r.counters[PLAN_DOWN], WAIT_RESULTS, 0);
      if (r.ranks > 1)
        for (u32 p = 0; p < r.ranks; ++p)
          wait_system(r, r.peers[r.rank].flags + FLAG_PUSHED * MAX_RANKS + p, epoch_of(r), WAIT_PUSHED,
                      p);
      break;
  }
}

// Finds the task of ticket p.next. `looks`: whether to see if it can begin.
static __device__ __forceinline__ void look_ahead(const Rank &r, const Producer &p, Upcoming &u, bool looks) {
  while (u.until <= p.next) {
    u.group = *u.following++;
    u.until = u.group.kind == GROUP_END ? ~0u : u.following->ticket;
  }
  u.ready = false;
  const u32 kind = u.group.kind;
  if (kind == GROUP_END) return;
  const u32 local = p.next - u.group.ticket, column = local / u.group.blocks;
  u.task = {kind, u.group.block + local - column * u.group.blocks, column, BLOCK, p.next};
  u.expert = 0;
  log_event(r, kind, p.next, LOG_DRAWN, column);
  const bool routed = kind == GROUP_UP || kind == GROUP_DOWN;
  const u32 word = routed ? r.blocks[u.task.block] : 0;  // on its way while the counter is
  if (looks) u.ready = has_all(r, u.group, u.task.block);
  if (routed) {
    u.expert = BLOCK_EXPERT(word);
    u.task.rows = BLOCK_ROWS(word);
  } else if (kind != GROUP_SUM) {
    u.task.rows = min(BLOCK, r.tokens - u.task.block * BLOCK);
  }
}

// The tiles of A: 64 or 128 rows by all of K. B: 128 rows of two maps, or 256 of one.
//
// The next ticket is drawn near the end, and looked at while there are stages to spare, so that its
// loads follow without a pause: finding a task and seeing a counter take 1,500 clocks, three stages.
// Drawn at the start, it would wait for as long as this tile takes, tiles of different length would begin
// in another order than that of tickets, and what neighbouring tiles share would leave L2 in between.
static __device__ __forceinline__ void load_tile(const Rank &r, Shared &s, Producer &p, Upcoming &u,
                                                 u32 stages, const void *map_a, int row, bool half,
                                                 const void *map_b, const void *second, int column,
                                                 int expert, u32 steps) {
  const u32 bytes = (half ? A_HALF : A_BYTES) + B_BYTES;
  const u32 drawn = steps > AHEAD ? steps - AHEAD : 0;
  u32 turn = drawn;
  for (u32 k = 0; k < steps; ++k) {
    const u32 full = shared_address(&s.full[p.stage.place]);
    const u32 a = stages + p.stage.place * STAGE_BYTES, b = a + A_BYTES;
    barrier_wait(shared_address(&s.empty[p.stage.place]), p.stage.parity ^ 1);
    barrier_expect(full, bytes);
    tma_load_2d(a, map_a, full, k * 64, row);
    if (!half) tma_load_2d(a + A_HALF, map_a, full, k * 64, row + 64);
    tma_load_3d(b, map_b, full, k * 64, column, expert);
    if (second) tma_load_3d(b + B_HALF, second, full, k * 64, column, expert);
    p.stage.advance();
    if (k == turn) {
      if (k == drawn) p.next = draw(r.counters + COUNT_COMPUTE);
      else look_ahead(r, p, u, true);
      turn = k == drawn ? drawn + LOOK : steps;
    }
  }
  if (steps <= drawn + LOOK) look_ahead(r, p, u, false);
}

static __device__ __forceinline__ void load_task(const Rank &r, Shared &s, Producer &p, Upcoming &u,
                                                 u32 stages) {
  const Task task = u.task;
  const bool half = task.rows <= 64;
  const void *a, *b, *second = nullptr;
  u32 row = task.block;
  switch (task.kind) {
    case GROUP_UP: a = &r.x_rows, b = &r.gate, second = &r.up, row %= r.ring_x; break;
    case GROUP_DOWN: a = &r.hidden, b = &r.down, row %= r.ring_h; break;
    case GROUP_SHARED_UP: a = &r.x, b = &r.shared_gate, second = &r.shared_up; break;
    default: a = &r.shared_hidden, b = &r.shared_down; break;
  }
  load_tile(r, s, p, u, stages, a, row * BLOCK, half, b, second, task.column * (second ? 128 : 256),
            u.expert, depth_of(r, task.kind) / 64);
}

static __device__ __forceinline__ void produce(const Rank &r, Shared &s, u32 stages) {
  Producer p;
  Upcoming &u = s.upcoming;
  u.group = r.groups[0];
  u.following = r.groups + 1;
  u.until = u.group.kind == GROUP_END ? ~0u : u.following->ticket;
  p.next = draw(r.counters + COUNT_COMPUTE);
  look_ahead(r, p, u, false);
  while (u.group.kind != GROUP_END) {
    const u32 kind = u.group.kind;
    if (!u.ready) await(r, u.group, u.task.block);
    proxy_fence();  // what was seen, the copy engine sees
    log_event(r, kind, u.task.ticket, LOG_STARTED, u.task.column);
    announce(s, p, u.task);
    if (kind == GROUP_SUM) {
      p.next = draw(r.counters + COUNT_COMPUTE);
      look_ahead(r, p, u, false);
    } else {
      load_task(r, s, p, u, stages);
    }
  }
  announce(s, p, Task{GROUP_END, 0, 0, 0, 0});
}
