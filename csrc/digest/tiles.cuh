// Contiguous memory: whole tiles streamed through shared memory, and runs of words beside them.
#pragma once

#include "digest/words.cuh"

// WORDS words from `from`, at any alignment; all bytes of them are there.
__device__ __forceinline__ void load_run(u32 (&words)[WORDS], const u8 *from) {
  const u32 shift = 8 * ((u32)(u64)from & 3);
  const u32 *at = (const u32 *)((u64)from & ~3ull);
  u32 low = at[0];
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const u32 high = shift || j + 1 < WORDS ? at[j + 1] : 0;  // never beyond the last byte
    words[j] = __funnelshift_r(low, high, shift);
    low = high;
  }
}

// Runs [from, to) of the whole, all in one tile and all of them there: a thread each.
__device__ __forceinline__ void add_runs(Sums &sums, const u8 *origin, u64 from, u64 to,
                                         const Seeds &seeds) {
  const u64 run = from / THREADS * THREADS + threadIdx.x;
  if (run < from || run >= to) return;
  u64 table[WORDS + 3];
  u32 words[WORDS];
  load_table(table, seeds.table, run * WORDS % BLOCK);
  load_run(words, origin + run * RUN_BYTES);
  add_words(sums, table, splitmix64(seeds.block, run * WORDS / BLOCK) | 1, words, seeds.zero);
}

__device__ __forceinline__ void copy_async(u32 to, const u8 *from) {
#if PREFETCH == 256
#define COPY "cp.async.cg.shared.global.L2::256B"
#elif PREFETCH == 128
#define COPY "cp.async.cg.shared.global.L2::128B"
#else
#define COPY "cp.async.cg.shared.global"
#endif
  asm volatile(COPY " [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#undef COPY
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Slot of piece v of the run of thread `owner`: swizzled so that neither writing whole lines nor
// reading whole runs meets a bank twice.
__device__ __forceinline__ int slot_of(int owner, int v) {
  return owner * PIECES + (v ^ (owner * PIECES / 8 % PIECES));
}

// A run that begins 4 SKIP + shift / 8 bytes after its first piece.
template <int SKIP>
__device__ __forceinline__ void shift_run(u32 (&words)[WORDS], const u32 (&wide)[WORDS + 4],
                                          u32 shift) {
#pragma unroll
  for (int j = 0; j < WORDS; ++j)
    words[j] = __funnelshift_r(wide[j + SKIP], wide[j + SKIP + 1], shift);
}

template <bool SHIFTED>
__device__ __forceinline__ void take_run(u32 (&words)[WORDS], const uint4 *stage, int lane,
                                         u32 off) {
  if (!SHIFTED) {
#pragma unroll
    for (int v = 0; v < PIECES; ++v) {
      const uint4 four = stage[slot_of(lane, v)];
      words[4 * v] = four.x, words[4 * v + 1] = four.y;
      words[4 * v + 2] = four.z, words[4 * v + 3] = four.w;
    }
  } else {
    u32 wide[WORDS + 4];
#pragma unroll
    for (int v = 0; v <= PIECES; ++v) {
      const uint4 four = stage[v < PIECES ? slot_of(lane, v) : slot_of(lane + 1, 0)];
      wide[4 * v] = four.x, wide[4 * v + 1] = four.y;
      wide[4 * v + 2] = four.z, wide[4 * v + 3] = four.w;
    }
    const u32 shift = 8 * (off & 3);
    switch (off >> 2) {  // the same for all threads
      case 0: shift_run<0>(words, wide, shift); break;
      case 1: shift_run<1>(words, wide, shift); break;
      case 2: shift_run<2>(words, wide, shift); break;
      default: shift_run<3>(words, wide, shift);
    }
  }
}

// Whole tiles [from, to). Every warp keeps STAGES of its 32 runs on their way to shared memory:
// global reads are whole lines. SHIFTED: byte 0 of the whole would not lie at a multiple of 16, so
// up to 15 bytes before and behind a warp's runs are read too; the caller sees to it that they lie
// in the same allocation.
template <bool SHIFTED>
__device__ __forceinline__ void add_tiles(u64 (&lanes)[4], const u8 *origin, u64 from, u64 to,
                                          const Seeds &seeds, uint4 *ring) {
  constexpr u64 STEP = TILES_PER_BLOCK;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 off = SHIFTED ? (u32)(u64)origin & 15 : 0;
  const uint4 *mine = ring + warp * (STAGES * STAGE_PIECES);
  // piece 32 s + lane goes to slot to_slot + 32 s: the swizzle repeats
  const u32 to_slot = (u32)__cvta_generic_to_shared(mine + slot_of(lane / PIECES, lane % PIECES));
  Sums sums;
#pragma unroll 1
  for (u64 within = 0; within < STEP; ++within) {
    const u64 tile = from + (within + STEP - from % STEP) % STEP;
    if (tile >= to) continue;
    u64 table[WORDS + 3];
    load_table(table, seeds.table, within * TILE + threadIdx.x * WORDS);
    const u8 *at = origin - off + tile * TILE_BYTES + warp * (32 * RUN_BYTES) + lane * 16;
    u32 block = (u32)(tile / STEP), to_ask = (u32)((to - tile + STEP - 1) / STEP);
    const u32 end = block + to_ask;
    const auto ask = [&](u32 stage) {
      if (to_ask) {
        const u32 slot = to_slot + stage * (16 * STAGE_PIECES);
#pragma unroll
        for (int s = 0; s < PIECES; ++s) copy_async(slot + 512 * s, at + 512 * s);
        if (SHIFTED && lane == 0) copy_async(slot + 512 * PIECES, at + 512 * PIECES);
        at += STEP * TILE_BYTES;
        --to_ask;
      }
      commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) ask(stage);
    // the warp makes the multipliers of 32 blocks at once
    u64 multipliers = splitmix64(seeds.block, block / 32 * 32 + lane) | 1;
    u32 stage = 0;
#pragma unroll 1
    for (; block < end; ++block) {
      if (block % 32 == 0) multipliers = splitmix64(seeds.block, block + lane) | 1;
      wait_copies<STAGES - 2>();
      __syncwarp();
      u32 words[WORDS];
      take_run<SHIFTED>(words, mine + stage * STAGE_PIECES, lane, off);
      ask(stage == 0 ? STAGES - 1 : stage - 1);  // read in the step before
      add_words(sums, table, __shfl_sync(~0u, multipliers, (int)(block % 32)), words, seeds.zero);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_copies<0>();
    __syncwarp();
  }
  fold(lanes, sums);
}

// A task in contiguous memory: whole tiles, then whole runs, then what is left at both borders.
__device__ __forceinline__ void add_contiguous(u64 (&lanes)[4], Task &task, const Seeds &seeds,
                                               uint4 *ring) {
  u64 *shared = (u64 *)ring;
  const u8 *origin = task.part->data - task.part->offset;  // where byte 0 of the whole would lie
  {
    // A piece of 16 bytes that holds a byte of the task is never outside of the allocation at its
    // beginning, which is aligned; at its end 16 more bytes have to be the task's own.
    const bool shifted = ((u64)origin & 15) != 0;
    const u64 safe = shifted && task.high >= 16 ? task.high - 16 : task.high;
    const u64 from = max(task.from, (task.low + TILE_BYTES - 1) / TILE_BYTES);
    const u64 to = min(task.to, safe / TILE_BYTES);
    if (from < to) {
      __syncthreads();  // others may still read the table, or what was streamed before
      if (threadIdx.x == 0) task.table_built = false;
      if (shifted)
        add_tiles<true>(lanes, origin, from, to, seeds, ring);
      else
        add_tiles<false>(lanes, origin, from, to, seeds, ring);
      __syncthreads();
    }
  }
  const u64 low = max(task.low, task.from * TILE_BYTES);
  const u64 high = min(task.high, task.to * TILE_BYTES);
  if (low >= high) return;
  const u64 first_run = (low + RUN_BYTES - 1) / RUN_BYTES, last_run = high / RUN_BYTES;
  if (high - low <= 8 * THREADS || first_run >= last_run) {
    add_single_words(lanes, task, low / 4, (high + 3) / 4, seeds, shared);
    return;
  }
  add_single_words(lanes, task, low / 4, first_run * WORDS, seeds, shared);
  add_single_words(lanes, task, last_run * WORDS, (high + 3) / 4, seeds, shared);
  const u64 safe = ((u64)origin & 15) && task.high >= 16 ? task.high - 16 : task.high;
  const u64 full_from = (task.low + TILE_BYTES - 1) / TILE_BYTES, full_to = safe / TILE_BYTES;
#pragma unroll 1
  for (u64 tile = task.from; tile < task.to; ++tile) {
    if (tile >= full_from && tile < full_to) tile = full_to;  // done above
    if (tile >= task.to) break;
    Sums sums;
    add_runs(sums, origin, max(first_run, tile * THREADS), min(last_run, (tile + 1) * THREADS),
             seeds);
    fold(lanes, sums);
  }
}
