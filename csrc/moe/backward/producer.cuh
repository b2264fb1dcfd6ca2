// The producer of a backward launch: as that of forward, with more kinds of tiles.
//
// Operands whose rows are K come as boxes of 64 columns x 64 rows: A one box for each half, B four.

#pragma once

#include "moe/backward/tiles.cuh"
#include "moe/producer.cuh"

#define BACK_AHEAD 8  // as AHEAD of forward, for tiles of WEIGHTS with few steps

// A map is chosen by its place in the record, so that registers do not keep the addresses of all.
typedef TensorMap Gradient::*Map;

struct BackProducer : Producer {
  u32 before_draw;  // stages until the next ticket is drawn
};

// Whether all tickets of such a group wait for the same: then a producer waits once for its group. Where
// experts have few rows a read of a counter, 700 clocks, weighs beside a tile's products.
static __device__ __forceinline__ bool waits_once(u32 kind) {
  return kind != BACK_HIDDEN && kind != BACK_AGAIN;
}

static __device__ __forceinline__ void await_back(const Rank &r, const Gradient &g, const BackGroup &group,
                                                  u32 block) {
  switch (group.kind) {
    case BACK_HIDDEN:
    case BACK_AGAIN:
      wait_device(r, back_ready_of(r, g, block), BLOCK, WAIT_ROWS, block);
      if (group.kind == BACK_HIDDEN && block >= g.saved_blocks)
        wait_device(r, again_of(r, g, block), up_columns(r.width), WAIT_HIDDEN, block);
      break;
    case BACK_INPUT:
    case BACK_WEIGHTS:
      if (group.blocks == 0) break;  // an expert without rows
      wait_device(r, hidden_of(r, g, group.segment), group.wanted, WAIT_HIDDEN, block);
      if (PART_NUMBER(group.part) > 1)
        wait_device(r, g.counters + COUNT_CUT,
                    (PART_NUMBER(group.part) - 1) * tiles_of_weights(g.wants & 7, r.width, r.hidden_size),
                    WAIT_HIDDEN, block);
      break;
    case BACK_SHARED_HIDDEN:
      wait_device(r, g.counters + COUNT_SHARED_AGAIN, group.wanted, WAIT_HIDDEN, block);
      break;
    case BACK_SHARED_INPUT:
    case BACK_SHARED_WEIGHTS:
      wait_device(r, g.counters + COUNT_SHARED_HIDDEN, group.wanted, WAIT_HIDDEN, block);
      break;
    case BACK_SUM:
      wait_device(r, r.counters + COUNT_DOWN, r.counters[PLAN_DOWN], WAIT_RESULTS, 0);
      if (r.ranks > 1)
        for (u32 p = 0; p < r.ranks; ++p)
          wait_system(r, r.peers[r.rank].flags + FLAG_PUSHED * MAX_RANKS + p, epoch_of(r), WAIT_PUSHED,
                      p);
      break;
  }
  proxy_fence();
}

// `steps` stages of `bytes` each; issue(k, a, b, full): the loads of one. The next ticket is drawn near
// the tile's end, as in load_tile.
template <class F>
static __device__ __forceinline__ void load_steps(const Rank &r, Rings &s, BackProducer &p, u32 stages,
                                                  u32 steps, u32 bytes, F issue) {
  for (u32 k = 0; k < steps; ++k) {
    const u32 full = shared_address(&s.full[p.stage.place]);
    const u32 a = stages + p.stage.place * STAGE_BYTES;
    barrier_wait(shared_address(&s.empty[p.stage.place]), p.stage.parity ^ 1);
    barrier_expect(full, bytes);
    issue(k, a, a + A_BYTES, full);
    p.stage.advance();
    if (p.before_draw-- == 0) p.next = draw(r.counters + COUNT_COMPUTE);
  }
}

static __device__ __forceinline__ void load_rows(u32 to, const void *map, u32 full, u32 column, u32 row,
                                                 bool half) {
  tma_load_2d(to, map, full, column, row);
  if (!half) tma_load_2d(to + A_HALF, map, full, column, row + 64);
}
static __device__ __forceinline__ void load_weights(u32 to, const void *map, u32 full, u32 column, u32 row,
                                                    u32 expert) {
#pragma unroll
  for (u32 j = 0; j < 4; ++j) tma_load_3d(to + j * BOX, map, full, column + j * 64, row, expert);
}

// Behind the products g and u of the tile, 64 columns a stage.
static __device__ __forceinline__ void load_hidden(const Rank &r, const Gradient &g, Rings &s,
                                                   BackProducer &p, u32 stages, const BackTask &task,
                                                   u32 pieces, u32 bytes_a) {
  const bool shared = is_shared(task.kind), half = task.rows <= 64;
  const u32 row = place_of(g, task) * BLOCK, column = task.column * 256;
  const Map map_a = shared ? &Gradient::d_out : &Gradient::d_rows;
  const Map map_b = shared ? &Gradient::shared_down : &Gradient::down;
  const void *a = &(g.*map_a), *b = &(g.*map_b);
  load_steps(r, s, p, stages, task.steps, bytes_a + B_BYTES, [&](u32 k, u32 to_a, u32 to_b, u32 full) {
    load_rows(to_a, a, full, k * 64, row, half);
    load_weights(to_b, b, full, column, k * 64, task.expert);
  });
  // Computed again, they lie where this tile stores d_gate and d_up, and nobody else reads them.
  const bool again = shared ? g.shared_again : task.block >= g.saved_blocks;
  const Map map_gate = shared ? (again ? &Gradient::shared_d_gate : &Gradient::shared_saved_gate)
                              : (again ? &Gradient::d_gate : &Gradient::saved_gate);
  const Map map_up = shared ? (again ? &Gradient::shared_d_up : &Gradient::shared_saved_up)
                            : (again ? &Gradient::d_up : &Gradient::saved_up);
  const void *gate = &(g.*map_gate), *up = &(g.*map_up);
  const u32 kept = shared || again ? row : task.block * BLOCK;
  load_steps(r, s, p, stages, pieces, 2 * bytes_a, [&](u32 q, u32 to_a, u32 to_b, u32 full) {
    load_rows(to_a, gate, full, column + q * 64, kept, half);
    load_rows(to_b, up, full, column + q * 64, kept, half);
  });
}

// K is the columns of d_gate, then those of d_up.
static __device__ __forceinline__ void load_input(const Rank &r, const Gradient &g, Rings &s,
                                                  BackProducer &p, u32 stages, const BackTask &task,
                                                  u32 bytes_a) {
  const bool shared = is_shared(task.kind), half = task.rows <= 64;
  const u32 row = place_of(g, task) * BLOCK, column = task.column * 256;
#pragma unroll 1
  for (u32 part = 0; part < 2; ++part) {
    const Map map_a = shared ? (part ? &Gradient::shared_d_up : &Gradient::shared_d_gate)
                             : (part ? &Gradient::d_up : &Gradient::d_gate);
    const Map map_b = shared ? (part ? &Gradient::shared_up : &Gradient::shared_gate)
                             : (part ? &Gradient::up : &Gradient::gate);
    const void *a = &(g.*map_a), *b = &(g.*map_b);
    load_steps(r, s, p, stages, task.steps / 2, bytes_a + B_BYTES,
               [&](u32 k, u32 to_a, u32 to_b, u32 full) {
                 load_rows(to_a, a, full, k * 64, row, half);
                 load_weights(to_b, b, full, column, k * 64, task.expert);
               });
  }
}

// K is rows, 64 a step; what a box holds of them is contiguous in both operands.
static __device__ __forceinline__ void load_products_of_rows(const Rank &r, const Gradient &g, Rings &s,
                                                             BackProducer &p, u32 stages,
                                                             const BackTask &task, u32 bytes_a) {
  const bool shared = is_shared(task.kind), half = task.rows <= 64;
  const WeightTile t =
      weight_tile(wants_of(g, task.kind), width_of(r, task.kind), r.hidden_size, task.column);
  Map map_a, map_b;
  if (t.of == WANT_DOWN) {
    map_a = shared ? &Gradient::d_out : &Gradient::d_rows;
    map_b = shared ? &Gradient::shared_weighted : &Gradient::weighted;
  } else {
    if (t.of == WANT_GATE) map_a = shared ? &Gradient::shared_d_gate : &Gradient::d_gate;
    else map_a = shared ? &Gradient::shared_d_up : &Gradient::d_up;
    map_b = shared ? &Gradient::x : &Gradient::x_rows;
  }
  const void *a = &(g.*map_a), *b = &(g.*map_b);
  u32 place = place_of(g, task);
  load_steps(r, s, p, stages, task.steps, bytes_a + B_BYTES, [&](u32 k, u32 to_a, u32 to_b, u32 full) {
    const u32 row = place * BLOCK + k % 2 * 64;
    tma_load_2d(to_a, a, full, t.row, row);
    if (!half) tma_load_2d(to_a + A_HALF, a, full, t.row + 64, row);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) tma_load_2d(to_b + j * BOX, b, full, t.column + j * 64, row);
    if (k % 2 && ++place == g.ring && !shared) place = 0;
  });
}

// As GROUP_UP of forward: 128 columns of gate, and of up.
static __device__ __forceinline__ void load_again(const Rank &r, const Gradient &g, Rings &s,
                                                  BackProducer &p, u32 stages, const BackTask &task,
                                                  u32 bytes_a) {
  const bool shared = is_shared(task.kind), half = task.rows <= 64;
  const u32 row = place_of(g, task) * BLOCK, column = task.column * 128;
  const Map map_a = shared ? &Gradient::x : &Gradient::x_rows;
  const void *a = &(g.*map_a);
  const void *gate = shared ? &r.shared_gate : &r.gate, *up = shared ? &r.shared_up : &r.up;
  load_steps(r, s, p, stages, task.steps, bytes_a + B_BYTES, [&](u32 k, u32 to_a, u32 to_b, u32 full) {
    load_rows(to_a, a, full, k * 64, row, half);
    tma_load_3d(to_b, gate, full, k * 64, column, task.expert);
    tma_load_3d(to_b + B_HALF, up, full, k * 64, column, task.expert);
  });
}

static __device__ __forceinline__ void load_back_task(const Rank &r, const Gradient &g, Rings &s,
                                                      BackProducer &p, u32 stages, const BackTask &task) {
  const u32 bytes_a = task.rows <= 64 ? A_HALF : A_BYTES;
  const u32 pieces = is_hidden(task.kind) ? pieces_of(width_of(r, task.kind), task.column) : 0;
  const u32 total = task.steps + pieces;
  if (total == 0) p.next = draw(r.counters + COUNT_COMPUTE);
  p.before_draw = total > BACK_AHEAD ? total - BACK_AHEAD : 0;
  if (is_hidden(task.kind)) load_hidden(r, g, s, p, stages, task, pieces, bytes_a);
  else if (is_input(task.kind)) load_input(r, g, s, p, stages, task, bytes_a);
  else if (is_weights(task.kind)) load_products_of_rows(r, g, s, p, stages, task, bytes_a);
  else load_again(r, g, s, p, stages, task, bytes_a);
}

// Ticket `local` of a group.
static __device__ __forceinline__ BackTask task_of(const Rank &r, const Gradient &g,
                                                   const BackGroup &group, u32 ticket) {
  const u32 local = ticket - group.ticket, kind = group.kind;
  BackTask task;
  task.kind = kind;
  task.ticket = ticket;
  task.segment = group.segment;
  task.expert = group.expert;
  task.part = group.part;
  if (is_weights(kind)) {
    task.block = group.block;
    task.column = local;
    task.rows = weight_tile(wants_of(g, kind), width_of(r, kind), r.hidden_size, local).rows;
    if (kind == BACK_SHARED_WEIGHTS) {
      task.expert = 0;
      task.part = PART_FIRST | PART_LAST;
      task.steps = (r.tokens + 63) / 64;
    } else {
      const u32 last = group.block + group.blocks - 1;
      task.steps = 2 * group.blocks;
      if (group.blocks && BLOCK_ROWS(r.blocks[last]) <= 64) --task.steps;
    }
    return task;
  }
  task.column = local / group.blocks;
  task.block = group.block + (local - task.column * group.blocks);
  task.steps = is_input(kind) ? width_of(r, kind) / 64 * 2 : r.hidden_size / 64;
  task.rows = BLOCK;
  if (kind == BACK_SUM) return task;
  if (is_shared(kind)) {
    task.expert = 0;
    task.rows = min(BLOCK, r.tokens - task.block * BLOCK);
  } else {
    const u32 word = r.blocks[task.block];
    task.expert = BLOCK_EXPERT(word);
    task.rows = BLOCK_ROWS(word);
  }
  return task;
}

static __device__ __forceinline__ void produce_back(const Rank &rank, const Gradient &gradient,
                                                    BackShared &s, u32 stages) {
  BackProducer p;
  const BackGroup *next = gradient.groups + 1;
  BackGroup group = gradient.groups[0];
  u32 awaited = ~0u;  // the first ticket of the group whose waits are over
  p.next = draw(rank.counters + COUNT_COMPUTE);
  for (;;) {
    const Rank &r = reread(rank, s);
    const Gradient &g = reread(gradient, s);
    const u32 ticket = p.next;
    while (group.kind != BACK_END && next->ticket <= ticket) group = *next++;
    if (group.kind == BACK_END) break;
    const BackTask task = task_of(r, g, group, ticket);
    log_event(r, task.kind, ticket, LOG_DRAWN, task.column);
    if (!waits_once(group.kind) || group.ticket != awaited) {
      await_back(r, g, group, task.block);
      awaited = group.ticket;
    }
    log_event(r, task.kind, ticket, LOG_STARTED, task.column);
    announce(s, p, task);
    if (group.kind == BACK_SUM) p.next = draw(r.counters + COUNT_COMPUTE);
    else load_back_task(r, g, s, p, stages, task);
  }
  BackTask end = {};
  end.kind = BACK_END;
  announce(s, p, end);
}
