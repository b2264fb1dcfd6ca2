// Planted fault: one warp hands a tile to another through shared memory without a barrier (FAULT 1);
// the twin has the barrier (FAULT 0).
//
// The reader has work of its own before it looks, which on a quiet device takes longer than filling
// the tile: the fault never shows. Filling follows a chain of dependent loads, so contention for
// memory makes it late. Most of the time the reader's work is long enough even then; once in `odds`
// draws it is short (`work` steps), and then the reader finds a tile that is not filled. The rate
// under contention is therefore about blocks / odds, whatever the load does exactly, as long as the
// chain's time under load exceeds the short work.

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

#define LONG 12  // how much longer the reader's usual work is than its short one

static __device__ unsigned mixed(unsigned value) {
  value ^= value >> 16;
  value *= 0x7FEB352Du;
  value ^= value >> 15;
  value *= 0x846CA68Bu;
  return value ^ (value >> 16);
}

static __device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// grid blocks, block 64. links [count] int64, a permutation of 0 .. count - 1 that is followed `hops`
// times; values [count], out [blocks * 32]. times [blocks, 2] or null: cycles until the tile was
// filled, and until the reader's work ended. odds 0: always short.
extern "C" __global__ void __launch_bounds__(64)
    planted_handover(const volatile unsigned long long* links, const float* __restrict__ values, float* out,
                     unsigned count, unsigned hops, unsigned work, unsigned odds,
                     unsigned long long* times) {
  __shared__ volatile float tile[32];
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x < 32) tile[lane] = 0.0f;
  __syncthreads();
  const long long start = clock64();
  if (threadIdx.x < 32) {
    unsigned at = (blockIdx.x * 32 + lane) * 1021u % count;  // every lane its own chain
    for (unsigned hop = 0; hop < hops; ++hop) at = (unsigned)links[at];
    tile[lane] = values[at];
    if (times && lane == 0) times[2 * blockIdx.x] = clock64() - start;
  } else {
    unsigned draw = mixed((unsigned)nanoseconds() ^ mixed((unsigned)clock64() + blockIdx.x));
    draw = __shfl_sync(0xFFFFFFFFu, draw, 0);
    const unsigned steps = odds == 0 || draw % odds == 0 ? work : LONG * work;
    unsigned state = draw;
#pragma unroll 8
    for (unsigned step = 0; step < steps; ++step)
      asm volatile("mad.lo.u32 %0, %0, 1664525, 1013904223;" : "+r"(state) : : "memory");
    if (times && lane == 0) times[2 * blockIdx.x + 1] = clock64() - start;
  }
#if !FAULT
  __syncthreads();
#endif
  if (threadIdx.x >= 32)
    out[blockIdx.x * 32 + lane] = 2.0f * tile[(lane + 1) % 32] - tile[lane];
}
