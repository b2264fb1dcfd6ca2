// The teller of a backward launch: as that of forward.

#pragma once

#include "moe/backward/tiles.cuh"
#include "moe/log.cuh"

static __device__ __forceinline__ void pass_on_back(const Rank &r, const Gradient &g,
                                                    const BackTask &task) {
  const u32 kind = task.kind;
  // Nobody in this launch waits for a sum, or for gradients of weights that read no ring.
  if (kind == BACK_SUM || (is_weights(kind) && (kind == BACK_SHARED_WEIGHTS || task.steps == 0))) return;
  if (kind == BACK_INPUT && r.ranks > 1) fence_system();
  else fence_device();
  switch (kind) {
    case BACK_AGAIN:
    case BACK_SHARED_AGAIN:
      proxy_fence();
      add_release_device(kind == BACK_AGAIN ? again_of(r, g, task.block) : g.counters + COUNT_SHARED_AGAIN,
                         1);
      return;
    case BACK_HIDDEN:
    case BACK_SHARED_HIDDEN:
      proxy_fence();
      add_release_device(
          kind == BACK_HIDDEN ? hidden_of(r, g, task.segment) : g.counters + COUNT_SHARED_HIDDEN, 1);
      return;
    case BACK_WEIGHTS:
      if (PART_NUMBER(task.part)) add_release_device(g.counters + COUNT_CUT, 1);
      add_release_device(used_of(r, g, task.segment), 1);
      return;
  }
  if (kind == BACK_INPUT) add_release_device(used_of(r, g, task.segment), 1);
  const u32 done = fetch_add_device(r.counters + COUNT_DOWN, 1) + 1;
  if (r.ranks > 1 && done == r.counters[PLAN_DOWN]) tell_peers(r, FLAG_PUSHED);
}

static __device__ __forceinline__ void tell_back(const Rank &r, const Gradient &g, BackShared &s) {
  Position<TASKS> at;
  for (;; at.advance()) {
    barrier_wait(shared_address(&s.announced[at.place]), at.parity);
    const BackTask task = s.tasks[at.place];
    if (task.kind == BACK_END) return;
    barrier_wait(shared_address(&s.finished[at.place]), at.parity);
    log_event(r, task.kind, task.ticket, LOG_DONE, task.kind == BACK_SUM ? 0 : task.column);
    pass_on_back(reread(r, s), reread(g, s), task);
    barrier_arrive(shared_address(&s.taken[at.place]));
  }
}
