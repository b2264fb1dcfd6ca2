// Copies from global to shared memory that run beside the threads, in a ring of stages.
#pragma once

#include "digest/parts.cuh"

// Threads that share a stage: a warp's. Their runs are PIECES chunks, each with 16 bytes more: for
// those behind it, if needed; and so that 8 threads, which take runs of different chunks or
// neighbouring ones of the same, meet no bank twice.
constexpr u32 SHARING = 32;
constexpr u32 CHUNK = 16 * SHARING, CHUNK_STEP = CHUNK + 16;
constexpr u32 STAGE_BYTES = PIECES * CHUNK_STEP;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;

// Tiles on their way. BEHIND: with the 16 bytes behind each chunk.
struct Copies {
  u32 ring, member;     // its stages in shared memory, and the thread's number among the sharing
  const u8 *at;         // what the thread asks for next
  u64 far;              // from tile to tile
  u32 tiles, asked;
};

// Which run of the tile is the thread's, and where it begins in a stage.
__device__ __forceinline__ u32 run_of(u32 member) {
  return threadIdx.x / SHARING * SHARING + member % PIECES * (SHARING / PIECES) + member / PIECES;
}

__device__ __forceinline__ u32 run_begin(u32 member) {
  return member % PIECES * CHUNK_STEP + member / PIECES * (4 * WORDS);
}

// Shared memory is addressed by number here: the compiler makes pointers anew for every tile, on
// the pipe that multiplies.
template <u32 OFFSET>
__device__ __forceinline__ uint4 read_shared(u32 from) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from), "n"(OFFSET));
  return four;
}

#if PREFETCH == 256
#define COPY "cp.async.cg.shared.global.L2::256B"
#elif PREFETCH == 128
#define COPY "cp.async.cg.shared.global.L2::128B"
#else
#define COPY "cp.async.cg.shared.global"
#endif

__device__ __forceinline__ void copy_async(u32 to, const u8 *from) {
  asm volatile(COPY " [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

#undef COPY

// Asks for the next tile, if there is one.
template <bool BEHIND>
__device__ __forceinline__ void ask(Copies &copies, u32 stage) {
  if (copies.asked < copies.tiles) {
    const u32 to = copies.ring + stage * STAGE_BYTES + copies.member * 16;
#pragma unroll
    for (u32 s = 0; s < PIECES; ++s) copy_async(to + CHUNK_STEP * s, copies.at + CHUNK * s);
    if (BEHIND && copies.member < PIECES)
      copy_async(to + copies.member * (CHUNK_STEP - 16) + CHUNK,
                 copies.at + copies.member * (CHUNK - 16) + CHUNK);
    copies.at += copies.far;
    ++copies.asked;
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <bool BEHIND>
__device__ __forceinline__ Copies begin_copies(u32 shared, const u8 *tile, u64 far, u32 tiles) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Copies copies = {shared + warp * RING_BYTES, lane,
                   tile + warp * (PIECES * CHUNK) + lane * 16, far, tiles, 0};
#pragma unroll
  for (u32 stage = 0; stage < STAGES - 1; ++stage) ask<BEHIND>(copies, stage);
  return copies;
}

__device__ __forceinline__ void wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
  __syncwarp();
}

// Asks for another tile where the one before was, which all lanes have read by now.
template <bool BEHIND>
__device__ __forceinline__ void go_on(Copies &copies, u32 tile) {
  ask<BEHIND>(copies, (tile + STAGES - 1) % STAGES);
}

__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}
