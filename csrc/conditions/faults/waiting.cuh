// Time that a planted fault lets go by. A loop of arithmetic whose result nobody uses is removed by
// the assembler, even when it is `asm volatile`; a loop on the clock stays.

#pragma once

static __device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Returns when the multiprocessor's clock is `cycles` after `start`, a value of clock64().
static __device__ __forceinline__ void wait_until(long long start, unsigned cycles) {
  while (clock64() - start < (long long)cycles) {
  }
}
