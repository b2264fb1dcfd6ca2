// What the kernels that enter a launch share: how blocks become segments, and copies to where peers
// read them.
//
// A *segment* is a run of blocks whose tiles come together. Experts in ascending order are joined
// to a segment until it has segment_least blocks, and never beyond segment_most; an expert above
// segment_most is alone. One above `uncut` blocks, which is segment_most in the forward, is cut
// into as few parts as possible of at most segment_most, as equal as possible, the larger ones
// first. So weights are read once or a few times, and rows are used while they lie in L2. It
// decides when a tile comes, not what is in it.

#pragma once

#include "moe/schedule.cuh"

#define FEW 2048  // segments that are kept in shared memory

// The expert behind the segment that begins with this one; `firsts` as of find_first_blocks.
// Bisects, since firsts ascends.
static __device__ __forceinline__ u32 end_of_segment(const Rank &r, const u32 *firsts, u32 expert) {
  const u32 from = firsts[expert];
  if (firsts[expert + 1] - from > r.segment_most) return expert + 1;  // alone, and cut or not
  // The first end with enough blocks, else the last expert's.
  u32 low = expert + 1, high = r.experts;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (firsts[middle] - from >= r.segment_least) high = middle;
    else low = middle + 1;
  }
  if (firsts[low] - from <= r.segment_most) return low;
  u32 fits = expert + 1, beyond = low;  // the last end that is not too large
  while (beyond - fits > 1) {
    const u32 middle = (fits + beyond) / 2;
    if (firsts[middle] - from <= r.segment_most) fits = middle;
    else beyond = middle;
  }
  return fits;
}

// reached[e] 1 for all that chains of `next` pass from expert 0 on, else 0. next[experts] is
// itself. Twice as far with each turn, so that 1024 experts cost 10 turns. Overwrites `next`.
static __device__ __forceinline__ void follow(u32 *next, u32 *reached, u32 experts, u32 run) {
  for (u32 covered = 1; covered < experts; covered *= 2) {
    u32 further[RUN];
#pragma unroll
    for (u32 i = 0; i < RUN; ++i) {
      const u32 expert = threadIdx.x * run + i;
      if (i >= run || expert >= experts) continue;
      further[i] = next[next[expert]];
      if (reached[expert]) reached[next[expert]] = 1;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < RUN; ++i) {
      const u32 expert = threadIdx.x * run + i;
      if (i < run && expert < experts) next[expert] = further[i];
    }
    __syncthreads();
  }
}

// How many segments there are of so many blocks.
static __device__ __forceinline__ u32 parts_of(u32 blocks, u32 most, u32 uncut) {
  return blocks > uncut ? (blocks + most - 1) / most : blocks != 0;
}

// The first blocks of all segments into `starts`, which is `few` or, if they are too many, the
// scratch of the schedule, which has a word for every block. Returns how many. All threads. An
// expert is cut if it has more than `uncut` blocks, which are segment_most or more.
static __device__ __forceinline__ u32 find_segments(const Rank &r, u32 uncut, const u32 *firsts,
                                                    u32 *few, u32 *&starts) {
  __shared__ u32 next[MAX_EXPERTS + 1], reached[MAX_EXPERTS + 1];
  const u32 experts = r.experts, run = run_length(experts), most = r.segment_most;
  u32 ends[RUN], parts[RUN], sum = 0, segments;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    if (i >= run || expert >= experts) continue;
    next[expert] = ends[i] = end_of_segment(r, firsts, expert);
    reached[expert] = expert == 0;
  }
  if (threadIdx.x == 0) next[experts] = experts;
  __syncthreads();
  follow(next, reached, experts, run);
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    parts[i] = 0;
    if (i < run && expert < experts && reached[expert])
      parts[i] = parts_of(firsts[ends[i]] - firsts[expert], most, uncut);
    sum += parts[i];
  }
  u32 at = sum_before(sum, segments);
  starts = segments <= FEW ? few : r.counts;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    if (parts[i] == 0) continue;
    const u32 first = firsts[threadIdx.x * run + i], blocks = firsts[ends[i]] - first;
    const u32 least = blocks / parts[i], larger = blocks % parts[i];
    for (u32 p = 0; p < parts[i]; ++p) starts[at++] = first + p * least + min(p, larger);
  }
  __syncthreads();
  return segments;
}

// To where peers read it: 16 bytes a thread and 8 of them on their way. All CTAs of a rank.
static __device__ __forceinline__ void copy_pieces(uint4 *to, const uint4 *from, u64 pieces) {
  const u64 step = (u64)gridDim.x * SCHEDULE_THREADS;
  for (u64 at = (u64)blockIdx.x * SCHEDULE_THREADS + threadIdx.x; at < pieces; at += 8 * step) {
    uint4 piece[8];
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (at + j * step < pieces) piece[j] = load_streaming(from + at + j * step);
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (at + j * step < pieces) to[at + j * step] = piece[j];
  }
}
