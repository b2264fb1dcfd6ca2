// The teller: passes on what the consumers have finished, so that they need not wait for memory.
//
// One thread. It follows the ring of tasks; when all warps are done with one, it makes what they wrote
// visible to the device, or to peers, and adds one to the counter that others wait for.

#pragma once

#include "moe/log.cuh"
#include "moe/pipeline.cuh"

static __device__ __forceinline__ void pass_on(const Rank &r, const Task &task) {
  if (task.kind == GROUP_SUM) return;  // nobody in this launch waits for it
  const bool pushed = task.kind == GROUP_DOWN && r.ranks > 1;
  if (pushed) fence_system();
  else fence_device();
  if (task.kind == GROUP_UP || task.kind == GROUP_SHARED_UP) {
    proxy_fence();
    add_release_device(task.kind == GROUP_UP ? up_of(r, task.block) : shared_of(r, task.block), 1);
    return;
  }
  if (task.kind == GROUP_DOWN) add_release_device(down_of(r, task.block), 1);
  const u32 done = fetch_add_device(r.counters + COUNT_DOWN, 1) + 1;
  if (r.ranks > 1 && done == r.counters[PLAN_DOWN]) tell_peers(r, FLAG_PUSHED);
}

static __device__ __forceinline__ void tell(const Rank &r, Shared &s) {
  Position<TASKS> at;
  for (;; at.advance()) {
    barrier_wait(shared_address(&s.announced[at.place]), at.parity);
    const Task task = s.tasks[at.place];
    if (task.kind == GROUP_END) return;
    barrier_wait(shared_address(&s.finished[at.place]), at.parity);
    log_event(r, task.kind, task.ticket, LOG_DONE, task.kind == GROUP_SUM ? 0 : task.column);
    pass_on(r, task);
    barrier_arrive(shared_address(&s.taken[at.place]));
  }
}
