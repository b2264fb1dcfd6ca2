// What the kernels before a launch share: the record, sums over a CTA, an expert's first block, and
// which CTA of a rank is the last one.
//
// blockIdx.y is the rank among those here; `many` null says that there is one, passed by value. Any
// grid.x gives the same tables. All of it is integers, and nothing depends on an order in time.

#pragma once

#include "moe/waits.cuh"

#define SCHEDULE_THREADS 256
#define MAX_EXPERTS 1024  // of a rank
#define MAX_SLOTS 16
#define RUN (MAX_EXPERTS / SCHEDULE_THREADS)  // neighbours that belong to a thread, at most
#define UNUSED 0xffffffffu

static __device__ __forceinline__ const Rank &record(const Rank &one, const Rank *many) {
  return many ? many[blockIdx.y] : one;
}

// The sum of `value` over the threads of lower index, and over all. All threads call it; what they
// wrote to shared memory before can be read after.
static __device__ __forceinline__ u32 sum_before(u32 value, u32 &total) {
  __shared__ u32 warps[SCHEDULE_THREADS / 32];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = value;
#pragma unroll
  for (u32 near = 1; near < 32; near *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, near);
    if (lane >= near) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u32 before = 0;
  total = 0;
#pragma unroll
  for (u32 w = 0; w < SCHEDULE_THREADS / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  __syncthreads();
  return before + sum - value;
}

// Of `count` neighbours each thread has so many, so that few of them keep many threads busy; <=
// RUN.
static __device__ __forceinline__ u32 run_length(u32 count) {
  return min((count + SCHEDULE_THREADS - 1) / SCHEDULE_THREADS, (u32)RUN);
}

// firsts[e]: the first block of expert e; firsts[experts]: how many blocks there are. All threads.
static __device__ __forceinline__ void find_first_blocks(const Rank &r, u32 *firsts) {
  const u32 experts = r.experts, run = run_length(experts), most = r.max_blocks;
  u32 blocks[RUN], sum = 0, total;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    blocks[i] = i < run && expert < experts ? (r.expert_rows[expert] + BLOCK - 1) / BLOCK : 0;
    sum += blocks[i];
  }
  u32 first = sum_before(sum, total);
  // After a failed wait ids may be of another schedule; whatever they are, memory is not exceeded.
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    if (i < run && expert < experts) firsts[expert] = min(first, most);
    first += blocks[i];
  }
  if (threadIdx.x == 0) firsts[experts] = min(total, most);
  __syncthreads();
}

// Whether all other CTAs of this rank in this launch were here before, with all that they wrote.
// COUNT_SCAN is zero before and after. All threads call it, once in a kernel.
static __device__ __forceinline__ bool is_last_cta(const Rank &r) {
  __shared__ u32 arrived;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (r.ranks > 1) fence_system();
    else fence_device();
    arrived = atomicInc(r.counters + COUNT_SCAN, gridDim.x - 1);
    if (r.ranks > 1) fence_system();
    else fence_device();
  }
  __syncthreads();
  return arrived == gridDim.x - 1;
}

// Whether a wait of this rank has failed before this kernel. Nothing may reach peers any more.
static __device__ __forceinline__ bool has_failed(const Rank &r) { return r.counters[COUNT_FAILED]; }

// For the last CTA: the epoch goes into every peer's own memory, this rank's included.
static __device__ __forceinline__ void tell_everyone(const Rank &r, u32 kind, u32 epoch) {
  for (u32 p = threadIdx.x; p < r.ranks; p += SCHEDULE_THREADS)
    store_release_system(r.peers[p].flags + kind * MAX_RANKS + r.rank, epoch);
}
