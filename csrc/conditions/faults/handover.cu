// Planted fault: one warp hands a tile to another through shared memory, and on a branch that is
// taken once in `odds` draws the other reads ahead of the barrier (FAULT 1); the twin always reads
// behind it (FAULT 0).
//
// The tile is a sum over parts of all other blocks, each of which takes `pause` cycles. The reader
// has `work` cycles of its own before it looks, more than `pause` and less than twice as much. On a
// quiet device all blocks run at once (the grid is one full wave), and the tile is there in time. As
// soon as multiprocessors are taken, some blocks begin only when others have ended, the tile comes
// after 2 `pause` or later, and a reader ahead of the barrier finds an empty one. Both bounds are
// ratios of waits on one clock, so they hold whatever the device, its clock rate or its caches.

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

#include "conditions/faults/waiting.cuh"

#define BATCH 16  // loads in flight while parts are added up
#ifndef PATIENCE
#define PATIENCE 2000000000ull  // nanoseconds until the reader gives up: the tile is then STARVED
#endif
#define STARVED 0x7FFFDEADu     // a NaN that no sum makes: parts were missing, whatever the fault

#if FAULT
static __device__ unsigned mixed(unsigned value) {
  value ^= value >> 16;
  value *= 0x7FEB352Du;
  value ^= value >> 15;
  value *= 0x846CA68Bu;
  return value ^ (value >> 16);
}
#endif

static __device__ __forceinline__ float read_device(const float* address) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

// Parts ascending; every lane its own column.
static __device__ float sum_of(const float* parts, unsigned count, unsigned lane) {
  float whole = 0.0f;
  for (unsigned part = 0; part < count; part += BATCH) {
    float held[BATCH];
#pragma unroll
    for (unsigned i = 0; i < BATCH; ++i)
      held[i] = part + i < count ? read_device(parts + (part + i) * 32 + lane) : 0.0f;
#pragma unroll
    for (unsigned i = 0; i < BATCH; ++i) whole += held[i];
  }
  return whole;
}

// grid at least 2, block 64. values [rows, 32]: block b > 0 takes row (b - 1) % rows. parts [grid - 1,
// 32]; out [32] = 2 t[i + 1] - t[i] of the tile t; arrived [1], zero before and after. odds 0: always
// ahead of the barrier. times [2] or null: cycles until the tile was filled, and until the reader
// had finished its own work.
extern "C" __global__ void __launch_bounds__(64)
    planted_handover(const float* __restrict__ values, float* parts, float* out, unsigned* arrived,
                     unsigned rows, unsigned pause, unsigned work, unsigned odds,
                     unsigned long long* times) {
  __shared__ volatile float tile[32];
  const unsigned lane = threadIdx.x % 32, count = gridDim.x - 1;
  const long long start = clock64();
  if (blockIdx.x > 0) {
    if (threadIdx.x >= 32) return;
    const unsigned own = blockIdx.x - 1;
    const float value = values[own % rows * 32 + lane];
    wait_until(start, pause);
    parts[own * 32 + lane] = value;
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(arrived, 1u);
    return;
  }
  if (threadIdx.x < 32) tile[lane] = 0.0f;
  __syncthreads();
  float here = 0.0f, next = 0.0f;
  bool ahead = false;
  if (threadIdx.x < 32) {
    unsigned came = 0;
    if (lane == 0) {
      const unsigned long long begin = nanoseconds();
      while ((came = *(volatile unsigned*)arrived) < count && nanoseconds() - begin < PATIENCE) {
      }
    }
    came = __shfl_sync(0xFFFFFFFFu, came, 0);
    __threadfence();  // what the others wrote before they counted
    const float whole = sum_of(parts, count, lane);
    tile[lane] = came < count ? __uint_as_float(STARVED) : whole;
    if (lane == 0) {
      *arrived = 0;
      if (times) times[0] = clock64() - start;
    }
  } else {
    wait_until(start, work);
#if FAULT
    unsigned draw = mixed((unsigned)nanoseconds() ^ mixed((unsigned)clock64()));
    draw = __shfl_sync(0xFFFFFFFFu, draw, 0);
    ahead = odds == 0 || draw % odds == 0;
    if (ahead) {
      here = tile[lane];
      next = tile[(lane + 1) % 32];
    }
#endif
    if (times && lane == 0) times[1] = clock64() - start;
  }
  __syncthreads();
  if (threadIdx.x < 32) return;
  if (!ahead) {
    here = tile[lane];
    next = tile[(lane + 1) % 32];
  }
  // arithmetic would quieten the NaN to another one
  out[lane] = __float_as_uint(here) == STARVED ? here : 2.0f * next - here;
}
