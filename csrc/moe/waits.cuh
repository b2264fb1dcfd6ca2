// Waiting for others: bounded by time, and over for everybody once one wait has failed.
//
// A wait that fails writes what it waited for into host-mapped memory and sets COUNT_FAILED; from then
// on no wait of this rank waits, so the launch runs to its end with results that nobody may use, and
// the host refuses the workspace. A trap would kill the context together with the evidence.

#pragma once

#include "moe/rank.cuh"
#include "ptx.cuh"

static __device__ __forceinline__ void record_failure(const Rank &r, u32 what, u32 index, u32 seen,
                                                   u32 wanted) {
  if (atomicExch(r.counters + COUNT_FAILED, 1u) == 0 && r.failure) {
    volatile Failure *f = r.failure;
    f->what = what;
    f->index = index;
    f->rank = r.rank;
    f->seen = seen;
    f->wanted = wanted;
    f->cta = blockIdx.x;
    f->ticket = 0;
    __threadfence_system();
    f->state = 1;
  }
}

// Whether every peer has begun this launch: from then on nobody may keep others waiting for long.
static __device__ __forceinline__ bool all_entered(const Rank &r) {
  const u32 epoch = r.counters[COUNT_EPOCH];
  for (u32 p = 0; p < r.ranks; ++p)
    if ((int)(load_acquire_system(r.peers[r.rank].flags + FLAG_ENTERED * MAX_RANKS + p) - epoch) < 0)
      return false;
  return true;
}

// One thread waits until a counter of this rank, or a flag that a peer writes, is at least `wanted`
// (counters and epochs wrap around after 2^31). Acquires. False if it, or another wait, failed.
//
// A peer has timeout_enter to begin: until all have, others rightly wait, and this rank's own tiles
// wait for their rows. Inside a started exchange it is timeout, counted from when that was seen.
template <bool SYSTEM>
static __device__ __forceinline__ bool wait_at_least(const Rank &r, const u32 *word, u32 wanted,
                                                     u32 what, u32 index) {
  u32 seen = SYSTEM ? load_acquire_system(word) : load_acquire_device(word);
  if ((int)(seen - wanted) >= 0) return true;
  bool started = r.ranks == 1;
  u64 until = nanoseconds() + (started ? r.timeout : r.timeout_enter);
  for (u32 turn = 1;; ++turn) {
    pause(SYSTEM ? 100 : 20);
    seen = SYSTEM ? load_acquire_system(word) : load_acquire_device(word);
    if ((int)(seen - wanted) >= 0) return true;
    if (turn % 64) continue;
    if (load_relaxed(r.counters + COUNT_FAILED)) return false;
    if (!started && what != WAIT_SCHEDULED && all_entered(r)) {
      started = true;
      until = nanoseconds() + r.timeout;
    }
    if (nanoseconds() > until) {
      record_failure(r, what, index, seen, wanted);
      return false;
    }
  }
}
static __device__ __forceinline__ bool wait_device(const Rank &r, const u32 *counter, u32 at_least,
                                                   u32 what, u32 index) {
  return wait_at_least<false>(r, counter, at_least, what, index);
}
static __device__ __forceinline__ bool wait_system(const Rank &r, const u32 *flag, u32 epoch, u32 what,
                                                   u32 index) {
  return wait_at_least<true>(r, flag, epoch, what, index);
}
