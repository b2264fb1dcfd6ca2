// Words one by one: strided memory, and what is left at the borders of contiguous memory.
#pragma once

#include "digest/sums.cuh"

// Where unit `unit` of a strided part lies, in units from its first; false in a hole.
__device__ __forceinline__ bool place_of(const Part &part, u64 unit, u64 &place) {
  bool there = true;
  place = 0;
#pragma unroll 1
  for (u32 d = part.dims; d-- > 0;) {
    const u64 size = part.size[d];
    u64 digit = unit;
    if (d > 0) {
      if ((unit | size) >> 32) {
        unit /= size;
        digit -= unit * size;
      } else {  // many times cheaper
        unit = (u32)unit / (u32)size;
        digit -= unit * size;
      }
    }
    if (d == part.cut) there = there && digit < part.kept;
    place += digit * part.stride[d];
  }
  return there;
}

// Word `word` of the whole, zero where it is outside of the task's bytes or in a hole.
__device__ __forceinline__ u32 word_of(const Part &part, const Task &task, u64 word) {
  const u64 begin = 4 * word;
  u32 value = 0;
  if (part.dims == 0) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u64 at = begin + k;
      if (at >= task.low && at < task.high) value |= (u32)part.data[at - part.offset] << (8 * k);
    }
    return value;
  }
  u32 present = 0;
  const u32 unit = part.unit;
  if (unit >= 4) {  // borders never cut these
    const u64 within = begin - part.offset;
    u64 place;
    if (begin >= task.low && begin < task.high && place_of(part, within / unit, place)) {
      value = *(const u32 *)(part.data + place * unit + within % unit);
      present = ~0u;
    }
  } else {
#pragma unroll 1
    for (u32 k = 0; k < 4; k += unit) {
      const u64 at = begin + k;
      u64 place;
      if (at < task.low || at >= task.high) continue;
      if (!place_of(part, (at - part.offset) / unit, place)) continue;
      const u8 *from = part.data + place * unit;
      const u32 bits = unit == 1 ? *from : *(const unsigned short *)from;
      value |= bits << (8 * k);
      present |= (unit == 1 ? 0xFFu : 0xFFFFu) << (8 * k);
    }
  }
  return value ^ (part.flip[word & 3] & present);
}

// Words [from, to) of the whole, one by one. Gathering a long way, the CTA keeps the table in
// `shared` (4099 entries). All threads of the CTA call this together.
__device__ __forceinline__ void add_single_words(u64 (&lanes)[4], Task &task, u64 from, u64 to,
                                                 const Seeds &seeds, u64 *shared) {
  if (from >= to) return;
  const bool use_table = task.table_built || to - from >= TABLE_WORTHWHILE * THREADS;
  if (use_table && !task.table_built) {
    __syncthreads();  // others may still read what was streamed, and the flag
    for (int j = threadIdx.x; j < BLOCK + 3; j += THREADS) shared[j] = splitmix64(seeds.table, j);
    if (threadIdx.x == 0) task.table_built = true;
    __syncthreads();
  }
#pragma unroll 1
  for (u64 word = from + threadIdx.x; word < to; word += THREADS) {
    const u32 value = word_of(*task.part, task, word);
    if (value == 0) continue;
    const u64 multiplier = splitmix64(seeds.block, word / BLOCK) | 1;
    const u32 j = (u32)word % BLOCK;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const u64 entry = use_table ? shared[j + l] : splitmix64(seeds.table, j + l);
      lanes[l] += (u64)key(entry, multiplier) * value;
    }
  }
}
