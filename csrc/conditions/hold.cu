// Holds multiprocessors: each block takes all shared memory of one, so that nothing else fits there,
// and waits until the host lets go or its time is over. HAMMER 1: uses memory while it waits.
//
// grid: multiprocessors to hold, block 256, dynamic shared memory: the most that a block may have.
// record: see load.cuh, in host-mapped memory, cleared. stopped: one word in device memory, cleared.
// timeout: nanoseconds. buffer: `vectors` vectors of 16 bytes, at least grid * 256; unused without
// HAMMER.

#include "conditions/load.cuh"

#ifndef HAMMER
#error "define HAMMER as 0 (waits) or 1 (uses memory while it waits)"
#endif

extern "C" __global__ void __launch_bounds__(256, 1)
    hold(u64* record, unsigned* stopped, u64 timeout, uint4* buffer, u64 vectors) {
  Progress progress = start_load(record);
#if HAMMER
  u64 cursor = (u64)blockIdx.x * blockDim.x + threadIdx.x;
#endif
  do {
#if HAMMER
    hammer(buffer, vectors, cursor, 16);
#else
    __nanosleep(2000);  // the host's clock of interest is microseconds; less would load the bus
#endif
  } while (!step_load(progress, record, stopped, timeout));
}
