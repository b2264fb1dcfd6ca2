// Small kernels that measure whether a condition is in effect.

#include "conditions/load.cuh"

// Writes the nanosecond at which the stream got here. slot: one word in host-mapped memory.
extern "C" __global__ void __launch_bounds__(32) stamp(u64* slot) {
  if (threadIdx.x == 0) write_system(slot, nanoseconds());
}

// Where blocks run: found[blockIdx.x] = SM + 1, each block staying `spin` nanoseconds so that others
// must go elsewhere. found: [grid] in device memory.
extern "C" __global__ void __launch_bounds__(32) locate(unsigned* found, u64 spin) {
  const u64 begin = nanoseconds();
  if (threadIdx.x == 0) found[blockIdx.x] = multiprocessor() + 1;
  while (nanoseconds() - begin < spin) __nanosleep(500);
}

// Keeps a stream waiting for `spin` nanoseconds. One block.
extern "C" __global__ void __launch_bounds__(32) delay(u64 spin) {
  const u64 begin = nanoseconds();
  while (nanoseconds() - begin < spin) __nanosleep(1000);
}

// Cycles for `hops` dependent reads past L1: chain[i] is the next index. One block, one thread.
// result: [0] cycles, [1] the last index, which keeps the reads from being left out.
extern "C" __global__ void __launch_bounds__(32)
    chase(const unsigned* chain, unsigned hops, u64* result) {
  if (threadIdx.x != 0) return;
  unsigned at = 0;
  long long begin;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(begin)::"memory");
  for (unsigned hop = 0; hop < hops; hop++) {
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(chain + at) : "memory");
  }
  long long end;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(end)::"memory");
  result[0] = (u64)(end - begin);
  result[1] = at;
}
