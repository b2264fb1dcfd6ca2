// Copies from global to shared memory that run beside the threads, in a ring of stages.
#pragma once

#include "digest/parts.cuh"

// Threads that share a stage: a CTA's or a warp's. Their runs are PIECES chunks, each with 16 bytes
// more: those before or behind it, as needed; and so that 8 threads, which take runs of different
// chunks or neighbouring ones of the same, meet no bank twice.
constexpr u32 SHARING = BULK ? THREADS : 32;
constexpr u32 CHUNK = 16 * SHARING, CHUNK_STEP = CHUNK + 16;
constexpr u32 STAGE_BYTES = PIECES * CHUNK_STEP;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;
// Of the whole CTA: with a barrier and a count of readers for each stage
constexpr u32 SHARED_BYTES = BULK ? RING_BYTES + 16 * STAGES : WARPS * RING_BYTES;

// What of a chunk's neighbours is copied with it.
enum Extra { NONE, BEFORE_IT, BEHIND_IT };

// Tiles on their way. Every copy of it is a thread's own.
struct Copies {
  u32 ring, member;     // its stages in shared memory, and the thread's number among the sharing
  const u8 *at;         // what the thread asks for next; of BULK what tile 0 begins with
  u64 far;              // from tile to tile
  u32 tiles, asked;
};

// Which run of the tile is the thread's, and where it begins in a stage, but for 16 bytes before.
__device__ __forceinline__ u32 run_of(u32 member) {
  return threadIdx.x / SHARING * SHARING + member % PIECES * (SHARING / PIECES) + member / PIECES;
}

__device__ __forceinline__ u32 run_begin(u32 member) {
  return member % PIECES * CHUNK_STEP + member / PIECES * (4 * WORDS);
}

// Shared memory is addressed by number here: the compiler makes pointers anew for every tile, on
// the pipe that multiplies.
__device__ __forceinline__ void write_shared(u32 to, const uint4 &four) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.x), "r"(four.y),
               "r"(four.z), "r"(four.w) : "memory");
}

template <u32 OFFSET>
__device__ __forceinline__ uint4 read_shared(u32 from) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from), "n"(OFFSET));
  return four;
}

#if BULK
// Asks for a tile. One thread does.
template <Extra EXTRA>
__device__ __forceinline__ void ask(const Copies &copies, u32 tile) {
  const u32 stage = tile % STAGES;
  constexpr u32 bytes = EXTRA == NONE ? CHUNK : CHUNK + 16, skip = EXTRA == BEFORE_IT ? 16 : 0;
  const u32 barrier = copies.ring + RING_BYTES + 8 * stage;
  const u8 *from = copies.at + tile * copies.far;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "n"(bytes * PIECES - skip) : "memory");
#pragma unroll
  for (u32 s = 0; s < PIECES; ++s) {
    const u32 lead = s == 0 ? 0 : skip;  // nothing is read before a tile
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(copies.ring + stage * STAGE_BYTES + s * CHUNK_STEP + skip - lead),
        "l"(from + s * CHUNK - lead), "r"(bytes - skip + lead), "r"(barrier) : "memory");
  }
}

// All threads of the CTA call this together. `tile` is where the first one begins.
template <Extra EXTRA>
__device__ __forceinline__ Copies begin_copies(u32 shared, const u8 *tile, u64 far, u32 tiles) {
  const Copies copies = {shared, threadIdx.x, tile, far, tiles, 0};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (u32 stage = 0; stage < STAGES; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared + RING_BYTES + 8 * stage)
                   : "memory");
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + RING_BYTES + 8 * STAGES + 4 * stage),
                   "r"(0) : "memory");
      if (EXTRA == BEFORE_IT)  // before a tile is none
        write_shared(shared + stage * STAGE_BYTES, {0, 0, 0, 0});
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll 1
    for (u32 stage = 0; stage < STAGES && stage < tiles; ++stage) ask<EXTRA>(copies, stage);
  }
  __syncthreads();
  return copies;
}

__device__ __forceinline__ void wait_for(const Copies &copies, u32 tile) {
  const u32 stage = tile % STAGES, turn = tile / STAGES;
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(copies.ring + RING_BYTES + 8 * stage), "r"(turn & 1)
      : "memory");
}

// Asks for another tile in the place of `tile`, which the thread has read: the last warp does.
template <Extra EXTRA>
__device__ __forceinline__ void go_on(Copies &copies, u32 tile) {
  __syncwarp();
  if (threadIdx.x % 32 == 0 && tile + STAGES < copies.tiles) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(before) : "r"(copies.ring + RING_BYTES + 8 * STAGES + 4 * (tile % STAGES))
                 : "memory");
    if (before % WARPS == WARPS - 1) ask<EXTRA>(copies, tile + STAGES);
  }
}

__device__ __forceinline__ void end_copies(const Copies &copies) {
  __syncthreads();
  if (threadIdx.x < STAGES)
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(copies.ring + RING_BYTES +
                                                              8 * threadIdx.x) : "memory");
}
#else
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
template <Extra EXTRA>
__device__ __forceinline__ void ask(Copies &copies, u32 stage) {
  if (copies.asked < copies.tiles) {
    const u32 to = copies.ring + stage * STAGE_BYTES + copies.member * 16;
#pragma unroll
    for (u32 s = 0; s < PIECES; ++s) copy_async(to + CHUNK_STEP * s, copies.at + CHUNK * s);
    if (EXTRA == BEHIND_IT && copies.member < PIECES)
      copy_async(to + copies.member * (CHUNK_STEP - 16) + CHUNK,
                 copies.at + copies.member * (CHUNK - 16) + CHUNK);
    copies.at += copies.far;
    ++copies.asked;
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <Extra EXTRA>
__device__ __forceinline__ Copies begin_copies(u32 shared, const u8 *tile, u64 far, u32 tiles) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Copies copies = {shared + warp * RING_BYTES, lane,
                   tile + warp * (PIECES * CHUNK) + lane * 16, far, tiles, 0};
#pragma unroll
  for (u32 stage = 0; stage < STAGES - 1; ++stage) ask<EXTRA>(copies, stage);
  return copies;
}

__device__ __forceinline__ void wait_for(const Copies &copies, u32 tile) {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
  __syncwarp();
}

// Asks for another tile where the one before was, which all lanes have read by now.
template <Extra EXTRA>
__device__ __forceinline__ void go_on(Copies &copies, u32 tile) {
  ask<EXTRA>(copies, (tile + STAGES - 1) % STAGES);
}

__device__ __forceinline__ void end_copies(const Copies &copies) {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}
#endif
