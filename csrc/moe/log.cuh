// The log of a launch, in kernels compiled with LOG 1: who drew which ticket, when it could start and
// when it was done. mok/hopper/ticket_logs.py reads it and holds it to the rules of the protocol.
//
// An entry: rank << 24 | CTA, kind << 28 | ticket, event << 24 | column tile, globaltimer / 32.

#pragma once

#include "moe/rank.cuh"
#include "ptx.cuh"

#ifndef LOG
#define LOG 0
#endif

#define LOG_DISPATCH 8u  // the kind of dispatch tickets; else GROUP_*
#define LOG_DRAWN 0u
#define LOG_STARTED 1u   // its waits are over
#define LOG_DONE 2u      // before the counters are told

static __device__ __forceinline__ void log_event(const Rank &r, u32 kind, u32 ticket, u32 event,
                                                 u32 column) {
#if LOG
  const u32 at = atomicAdd(r.counters + COUNT_LOG, 1u);
  if (at < r.log_room)
    ((uint4 *)r.log)[at] = make_uint4(r.rank << 24 | blockIdx.x, kind << 28 | ticket,
                                      event << 24 | column, (u32)(nanoseconds() / 32));
#endif
}
