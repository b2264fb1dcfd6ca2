// Contiguous memory: whole tiles streamed through shared memory.
#pragma once

#include "digest/copies.cuh"
#include "digest/quads.cuh"

template <typename Value>
__device__ __forceinline__ void keep_in_register(Value &value) {
  if constexpr (sizeof(Value) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
}

template <int AT, int PIECE_COUNT, int N>
__device__ __forceinline__ void read_pieces(u32 (&words)[N], u32 run) {
  if constexpr (AT < PIECE_COUNT) {
    const uint4 four = read_shared<16 * AT>(run);
    words[4 * AT] = four.x, words[4 * AT + 1] = four.y;
    words[4 * AT + 2] = four.z, words[4 * AT + 3] = four.w;
    read_pieces<AT + 1, PIECE_COUNT>(words, run);
  }
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
__device__ __forceinline__ void read_run(u32 (&words)[WORDS], u32 run, u32 off) {
  if constexpr (!SHIFTED) {
    read_pieces<0, PIECES>(words, run);
  } else {
    u32 wide[WORDS + 4];
    read_pieces<0, PIECES + 1>(wide, run);
    const u32 shift = 8 * (off & 3);
    switch (off >> 2) {  // the same for all threads
      case 0: shift_run<0>(words, wide, shift); break;
      case 1: shift_run<1>(words, wide, shift); break;
      case 2: shift_run<2>(words, wide, shift); break;
      default: shift_run<3>(words, wide, shift);
    }
  }
}

// The task's whole tiles, which are blocks, with STAGES of them on their way to shared memory:
// global reads are whole lines. SHIFTED: byte 0 of the whole would not lie at a multiple of 16, so
// up to 15 bytes before and behind are read too; the caller sees to it that they lie in the same
// allocation.
template <bool SHIFTED>
__device__ __forceinline__ void add_tiles(u64 (&lanes)[4], const u8 *origin, const Task &task,
                                          const Seeds &seeds, const uint4 *shared) {
  constexpr int KEYS = WORDS + 3;
  u32 off = SHIFTED ? (u32)(u64)origin & 15 : 0;
  const u32 tiles = task.blocks, step = task.step;
  Copies copies = begin_copies<SHIFTED>((u32)__cvta_generic_to_shared(shared),
                                        origin - off + task.block * TILE_BYTES, step * TILE_BYTES,
                                        tiles);
  const u32 number = run_of(copies.member);
  u32 run = copies.ring + run_begin(copies.member);
  u64 table[KEYS];
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    table[j] = splitmix64(seeds.table, number * WORDS + j);
    keep_in_register(table[j]);
  }
  keep_in_register(run), keep_in_register(copies.ring), keep_in_register(copies.far);
  if (SHIFTED) keep_in_register(off);
  u32 tile = 0;
#pragma unroll 1
  while (tile < tiles) {
    // the warp makes the multipliers of 32 tiles at once
    const u64 block = task.block + (u64)(tile + threadIdx.x % 32) * step;
    const u64 multipliers = multiplier_of(seeds, block);
#pragma unroll 1
    do {
      wait_for();
      const u32 here = run + tile % STAGES * STAGE_BYTES;
      u32 words[WORDS];
      read_run<SHIFTED>(words, here, off);
      go_on<SHIFTED>(copies, tile);
      add_run<WORDS>(lanes, table, __shfl_sync(~0u, multipliers, (int)(tile % 32)), words);
      ++tile;
    } while (tile % 32 && tile < tiles);
  }
  end_copies();
}

// Streams what a task in contiguous memory has of whole tiles.
__device__ __forceinline__ void stream_tiles(u64 (&lanes)[4], Task &task, const Seeds &seeds,
                                             uint4 *shared) {
  const u8 *origin = task.part->data - task.part->offset;  // where byte 0 of the whole would lie
  __syncthreads();  // others may still read the table, or what was streamed before
  if (threadIdx.x == 0) task.table_built = false;
  if ((u64)origin & 15)
    add_tiles<true>(lanes, origin, task, seeds, shared);
  else
    add_tiles<false>(lanes, origin, task, seeds, shared);
  __syncthreads();
}
