// Quads, 16 aligned bytes of the whole, one by one: strided memory, and the borders of contiguous.
#pragma once

#include "digest/sums.cuh"

// value becomes value / by; the remainder. Numbers of 32 bits are many times cheaper.
__device__ __forceinline__ u64 divided(u64 &value, u64 by) {
  const u64 whole = value;
  if ((whole | by) >> 32)
    value = whole / by;
  else
    value = (u32)whole / (u32)by;
  return whole - value * by;
}

// Where unit `unit` of a strided part lies, in units from its first; false in a hole. `column` is
// its place along the last dimension.
__device__ __forceinline__ bool place_of(const Part &part, u64 unit, u64 &place, u64 &column) {
  bool there = true;
  place = 0;
#pragma unroll 1
  for (u32 d = part.dims; d-- > 0;) {
    u64 digit = unit;
    if (d > 0) digit = divided(unit, part.size[d]);
    if (d + 1 == part.dims) column = digit;
    if (d == part.cut) there = there && digit < part.kept;
    place += digit * part.stride[d];
  }
  return there;
}

// Word `word` of the whole, zero where it is outside of the task's bytes or in a hole.
__device__ __forceinline__ u32 word_of(const Part &part, const Task &task, u64 word) {
  const u64 begin = 4 * word;
  const u32 unit = part.dims ? part.unit : 1;
  u32 value = 0;
#pragma unroll 1
  for (u32 k = 0; k < 4; k += unit) {
    const u64 at = begin + k;
    if (at < task.low || at >= task.high) continue;
    u64 place = at - part.offset, column;
    const u32 inner = (u32)place & (unit - 1);  // the second half of a unit of 8
    if (part.dims) {
      if (!place_of(part, place >> (__ffs((int)unit) - 1), place, column)) continue;
      place *= unit;
    }
    const u8 *from = part.data + place + inner;
    u32 bits, mask;
    if (unit >= 4) bits = *(const u32 *)from, mask = ~0u;
    else if (unit == 2) bits = *(const unsigned short *)from, mask = 0xFFFF;
    else bits = *from, mask = 0xFF;
    value |= (bits ^ (part.flip[word & 3] >> (8 * k) & mask)) << (8 * k);
  }
  return value;
}

// 16 bytes at any alignment, all of them there.
__device__ __forceinline__ uint4 load_together(const u8 *from) {
  if (((u64)from & 15) == 0) return *(const uint4 *)from;
  const u32 bits = 8 * ((u32)(u64)from & 3);
  const u32 *at = (const u32 *)((u64)from & ~3ull);
  const u32 a = at[0], b = at[1], c = at[2], d = at[3];
  const u32 e = bits ? at[4] : 0;  // never beyond the last byte
  return {__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits), __funnelshift_r(c, d, bits),
          __funnelshift_r(d, e, bits)};
}

// COUNT units that lie `stride` bytes apart, side by side.
template <typename Unit, int COUNT>
__device__ __forceinline__ uint4 load_apart(const u8 *from, u64 stride) {
  constexpr int IN_WORD = COUNT / 4;
  u32 units[COUNT], words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) units[i] = *(const Unit *)(from + i * stride);
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    words[i / IN_WORD] |= units[i] << (32 / IN_WORD * (i % IN_WORD));
  return {words[0], words[1], words[2], words[3]};
}

// The words of quad `quad` of the whole, zero outside of the task and in holes. True if they are as
// they lie in memory and all there; their bits are still to be flipped then. Nothing is computed
// from what was loaded, as far as possible, so that nothing waits for it here.
__device__ __forceinline__ bool load_quad(uint4 &words, const Part &part, const Task &task,
                                          u64 quad) {
  const u64 begin = 16 * quad, offset = part.offset;
  if (begin >= task.low && begin + 16 <= task.high) {
    if (part.dims == 0) {
      words = load_together(part.data + (begin - offset));
      return true;
    }
    const u32 last = part.dims - 1, shift = __ffs((int)part.unit) - 1;
    const u64 count = 16 >> shift;
    u64 place, column;
    const bool row = place_of(part, (begin - offset) >> shift, place, column);
    const u64 kept = last == part.cut ? part.kept : part.size[last];
    if (row && column + count <= kept) {
      const u8 *from = part.data + (place << shift);
      const u64 stride = part.stride[last] << shift;
      if (stride == part.unit) words = load_together(from);
      else if (shift == 0) words = load_apart<u8, 16>(from, stride);
      else if (shift == 1) words = load_apart<unsigned short, 8>(from, stride);
      else if (shift == 2) words = load_apart<u32, 4>(from, stride);
      else {
        const u32 *a = (const u32 *)from, *b = (const u32 *)(from + stride);
        words = {a[0], a[1], b[0], b[1]};
      }
      return true;
    }
    words = {0, 0, 0, 0};
    if (!row && column + count <= part.size[last]) return false;
  }
#pragma unroll 1
  for (int w = 0; w < 4; ++w) {
    const u32 value = word_of(part, task, 4 * quad + w);
    if (w == 0) words.x = value;
    if (w == 1) words.y = value;
    if (w == 2) words.z = value;
    if (w == 3) words.w = value;
  }
  return false;
}

// Quad number `number` of a visit that goes along the lines; one beyond all if there is none.
__device__ __forceinline__ u64 visited_quad(const Part &part, u64 number) {
  const u64 across = divided(number, part.lines), along = divided(number, part.line_quads);
  const u64 line = number * part.lines + across;
  const u64 begin = part.offset + line * part.line_bytes;
  // a quad belongs to the line in which it begins; what the first line cuts has no other
  const u64 quad = (line ? begin + 15 : begin) / 16 + along;
  return 16 * quad < begin + part.line_bytes ? quad : ~0ull / 16;
}

// Where four entries of the table are kept: quads that are 8 or 64 apart use different banks too.
__device__ __forceinline__ u32 table_slot(u32 i) { return i ^ ((i >> 3 ^ i >> 6) & 7); }

// Entries 4 i .. 4 i + 3 are two pairs, each pair in a half of its own: threads that are neighbours
// read neighbouring 16 bytes.
constexpr u32 TABLE_HALF = BLOCK_QUADS + 1;

__device__ __forceinline__ void add_quad(u64 (&lanes)[4], const uint4 &four, u64 quad,
                                         const Seeds &seeds, const ulonglong2 *kept_table) {
  if ((four.x | four.y | four.z | four.w) == 0) return;
  const u32 i = (u32)quad % BLOCK_QUADS;
  u64 table[7];
  if (kept_table) {
    const ulonglong2 *here = kept_table + table_slot(i), *next = kept_table + table_slot(i + 1);
    const ulonglong2 a = here[0], b = here[TABLE_HALF], c = next[0];
    table[0] = a.x, table[1] = a.y, table[2] = b.x, table[3] = b.y;
    table[4] = c.x, table[5] = c.y, table[6] = next[TABLE_HALF].x;
  } else {
#pragma unroll 1
    for (int j = 0; j < 7; ++j) {
#pragma unroll
      for (int k = 0; k < 6; ++k) table[k] = table[k + 1];
      table[6] = splitmix64(seeds.table, 4 * i + j);
    }
  }
  const u32 words[4] = {four.x, four.y, four.z, four.w};
  add_run<4>(lanes, table, multiplier_of(seeds, quad / BLOCK_QUADS), words);
}

// Quads [from, to) of the visit of a part. Going a long way, the CTA keeps the table in `shared`.
// All threads of the CTA call this together.
__device__ __forceinline__ void add_quads(u64 (&lanes)[4], Task &task, u64 from, u64 to,
                                          const Seeds &seeds, uint4 *shared) {
  if (from >= to) return;
  const bool use_table = task.table_built || to - from >= TABLE_WORTHWHILE * THREADS;
  if (use_table && !task.table_built) {
    __syncthreads();  // others may still read what was streamed, and the flag
    for (u32 n = threadIdx.x; n < 4 * TABLE_HALF; n += THREADS)
      ((u64 *)shared)[2 * (table_slot(n / 4) + n / 2 % 2 * TABLE_HALF) + n % 2] =
          splitmix64(seeds.table, n);
    if (threadIdx.x == 0) task.table_built = true;
    __syncthreads();
  }
  const ulonglong2 *table = use_table ? (const ulonglong2 *)shared : nullptr;
  const Part &part = *task.part;
  const uint4 flips = {part.flip[0], part.flip[1], part.flip[2], part.flip[3]};
  uint4 next = {0, 0, 0, 0};
  u64 next_quad = 0;
  bool there = false, flip = false;
#pragma unroll 1
  for (u64 number = from + threadIdx.x;; number += THREADS) {
    uint4 four = next;
    const u64 quad = next_quad;
    const bool had = there, had_flip = flip;
    there = number < to;
    if (there) {  // before the last one is used, so that its bytes are on their way
      next_quad = part.lines ? visited_quad(part, number) : number;
      flip = false;
      if (16 * next_quad < task.high)
        flip = load_quad(next, part, task, next_quad);
      else
        next = {0, 0, 0, 0};
    }
    if (had_flip)
      four = {four.x ^ flips.x, four.y ^ flips.y, four.z ^ flips.z, four.w ^ flips.w};
    if (had) add_quad(lanes, four, quad, seeds, table);
    if (!there) break;
  }
}
