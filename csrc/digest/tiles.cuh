// Contiguous memory: whole tiles streamed through shared memory, and quads beside them.
#pragma once

#include "digest/quads.cuh"

#if PREFETCH == 256
#define COPY "cp.async.cg.shared.global.L2::256B"
#elif PREFETCH == 128
#define COPY "cp.async.cg.shared.global.L2::128B"
#else
#define COPY "cp.async.cg.shared.global"
#endif

// Shared memory is addressed by number here: the compiler makes pointers anew for every tile, on
// the pipe that multiplies.
template <int OFFSET>
__device__ __forceinline__ void copy_async(u32 to, const u8 *from) {
  asm volatile(COPY " [%0 + %2], [%1], 16;" ::"r"(to), "l"(from), "n"(OFFSET) : "memory");
}

#undef COPY

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int OFFSET>
__device__ __forceinline__ uint4 read_shared(u32 from) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from), "n"(OFFSET));
  return four;
}

template <typename Value>
__device__ __forceinline__ void keep_in_register(Value &value) {
  if constexpr (sizeof(Value) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
}

// The 16 bytes that begin `off` bytes behind the beginning of two neighbouring pieces.
__device__ __forceinline__ uint4 shifted_piece(const uint4 &a, const uint4 &b, u32 off) {
  const bool two = off & 8, one = off & 4;
  const u32 s[6] = {two ? a.z : a.x, two ? a.w : a.y, two ? b.x : a.z,
                    two ? b.y : a.w, two ? b.z : b.x, two ? b.w : b.y};
  u32 w[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = one ? s[i + 1] : s[i];
  const u32 bits = 8 * (off & 3);
  return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
          __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits)};
}

// Adds piece AT of a thread's run, and those behind it. Its words give to the keys at their places
// and to those of the next piece, so `before` has the words in front of the piece. SHIFTED: `raw`
// is what is there, of which a piece is some and the rest of the next one's.
template <bool SHIFTED, int AT>
__device__ __forceinline__ void add_pieces(u64 (&lanes)[4], const u64 (&table)[WORDS],
                                           u64 multiplier, u32 run, u32 off, uint4 raw,
                                           uint4 &before) {
  if constexpr (AT < PIECES) {
    // behind a run's slots comes the next run, and behind the last run the piece behind it
    constexpr int NEXT = SHIFTED ? AT + 1 : AT;
    const uint4 next = read_shared<16 * (NEXT < PIECES ? NEXT : RUN_SLOTS)>(run);
    const uint4 four = SHIFTED ? shifted_piece(raw, next, off) : next;
    const u32 words[7] = {before.y, before.z, before.w, four.x, four.y, four.z, four.w};
    const u64 entries[4] = {table[4 * AT], table[4 * AT + 1], table[4 * AT + 2], table[4 * AT + 3]};
    add_words(lanes, entries, multiplier, words);
    before = four;
    add_pieces<SHIFTED, AT + 1>(lanes, table, multiplier, run, off, next, before);
  }
}

// A block's last three words give to keys of the three entries behind its own, too.
__device__ __forceinline__ void add_seam(u64 (&lanes)[4], const uint4 &seam, u64 multiplier,
                                         const Seeds &seeds) {
  u64 table[3];
#pragma unroll
  for (int p = 0; p < 3; ++p) table[p] = splitmix64(seeds.table, BLOCK + p);
  const u32 words[6] = {seam.y, seam.z, seam.w, 0, 0, 0};
  add_words(lanes, table, multiplier, words);
}

template <int PIECE>
__device__ __forceinline__ void copy_pieces(u32 to, const u8 *from) {
  if constexpr (PIECE < PIECES) {
    copy_async<16 * (32 / PIECES * RUN_SLOTS) * PIECE>(to, from + 512 * PIECE);
    copy_pieces<PIECE + 1>(to, from);
  }
}

// Whole tiles [from, to), which are blocks. Every warp keeps STAGES of its 32 runs on their way to
// shared memory: global reads are whole lines. SHIFTED: byte 0 of the whole would not lie at a
// multiple of 16, so up to 15 bytes before and behind a warp's runs are read too; the caller sees
// to it that they lie in the same allocation.
template <bool SHIFTED>
__device__ __forceinline__ void add_tiles(u64 (&lanes)[4], const u8 *origin, u64 from, u64 to,
                                          const Seeds &seeds, uint4 *ring, uint4 *seams) {
  constexpr u32 STAGE_BYTES = 16 * STAGE_SLOTS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 off = SHIFTED ? (u32)(u64)origin & 15 : 0;
  const u32 first = (u32)__cvta_generic_to_shared(ring) + warp * (STAGES * STAGE_BYTES) + 32;
  u32 run = first + 16 * RUN_SLOTS * lane;
  u32 piece = first + 16 * (lane / PIECES * RUN_SLOTS + lane % PIECES);
  u64 table[WORDS];
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    table[j] = splitmix64(seeds.table, threadIdx.x * WORDS + j);
    keep_in_register(table[j]);
  }
  keep_in_register(run), keep_in_register(piece);
  if (SHIFTED) keep_in_register(off);
  const u8 *at = origin - off + from * TILE_BYTES + warp * (32 * RUN_BYTES) + lane * 16;
  u32 block = (u32)from;
  const u32 end = (u32)to;
  const auto ask = [&](u32 skip, u32 number) {
    if (number < end) {
      copy_pieces<0>(piece + skip, at);
      if (lane == 0) {
        if (warp > 0) copy_async<-32>(piece + skip, at - 16);
        if (SHIFTED) copy_async<32 * 16 * RUN_SLOTS>(piece + skip, at + 512 * PIECES);
      }
      at += TILE_BYTES;
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) ask(stage * STAGE_BYTES, block + stage);
  if (warp == WARPS - 1) seams[lane] = {0, 0, 0, 0};
  u32 here = 0, last = (STAGES - 1) * STAGE_BYTES;  // the stage to read, and the one read before
#pragma unroll 1
  while (block < end) {
    // the warp makes the multipliers of 32 blocks at once
    const u64 multipliers = multiplier_of(seeds, block / 32 * 32 + lane);
#pragma unroll 1
    do {
      wait_copies<STAGES - 2>();
      __syncwarp();
      ask(last, block + STAGES - 1);
      uint4 raw = {0, 0, 0, 0}, before = read_shared<-32>(run + here);
      if (SHIFTED) raw = read_shared<0>(run + here), before = shifted_piece(before, raw, off);
      if (threadIdx.x == 0) before = {0, 0, 0, 0};  // before the first word of a block is none
      add_pieces<SHIFTED, 0>(lanes, table, __shfl_sync(~0u, multipliers, (int)(block % 32)),
                             run + here, off, raw, before);
      if (threadIdx.x == THREADS - 1) seams[block % 32] = before;
      last = here;
      here = here == (STAGES - 1) * STAGE_BYTES ? 0 : here + STAGE_BYTES;
      ++block;
    } while (block % 32 && block < end);
    if (warp == WARPS - 1) {
      __syncwarp();
      const u32 own = (block - 1) / 32 * 32 + lane;
      if (own < block) add_seam(lanes, seams[lane], multipliers, seeds);
    }
  }
  wait_copies<0>();
  __syncwarp();
}

// Streams what a task in contiguous memory has of whole tiles.
__device__ __forceinline__ void stream_tiles(u64 (&lanes)[4], Task &task, const Seeds &seeds,
                                             uint4 *ring, uint4 *seams) {
  const u8 *origin = task.part->data - task.part->offset;  // where byte 0 of the whole would lie
  const u64 from = task.done_from / BLOCK_QUADS, to = task.done_to / BLOCK_QUADS;
  __syncthreads();  // others may still read the table, or what was streamed before
  if (threadIdx.x == 0) task.table_built = false;
  if ((u64)origin & 15)
    add_tiles<true>(lanes, origin, from, to, seeds, ring, seams);
  else
    add_tiles<false>(lanes, origin, from, to, seeds, ring, seams);
  __syncthreads();
}
