// The digest kernel: lanes of scheme lanes4x64-v1 for many tensors in one launch.
//
//   K_l(b, j) = (T[j + l] * B[b] mod 2^64) >> 32,  lane_l = sum over words i = 4096 b + j of
//   K_l(b, j) * m_i mod 2^64,  l = 0 .. 3
//
// The same sum as verify/lanes.py, by test. Sums of integers do not depend on their order, so the
// 64-bit atomics at the end are deterministic. No scratch; the output has to be zero before the
// launch. A part is cut into tiles, and a CTA takes a range of them: whole tiles of contiguous
// memory are streamed through shared memory; what is left at their borders, and strided memory, is
// read in quads of 16 bytes of the whole.

#include "digest/tiles.cuh"

// Adds the lanes of all threads to an output.
__device__ __forceinline__ void flush(u64 (&lanes)[4], u64 *out, u64 *shared) {
#pragma unroll
  for (int l = 0; l < 4; ++l) {
#pragma unroll
    for (int far = 16; far; far >>= 1) lanes[l] += __shfl_xor_sync(~0u, lanes[l], far);
  }
  const int lane = threadIdx.x % 32;
  __syncthreads();
  if (lane < 4)
    shared[threadIdx.x / 32 * 4 + lane] = lane == 0 ? lanes[0] : lane == 1 ? lanes[1]
                                        : lane == 2 ? lanes[2] : lanes[3];
  __syncthreads();
  if (threadIdx.x < 4) {
    u64 total = 0;
    for (int w = 0; w < WARPS; ++w) total += shared[w * 4 + threadIdx.x];
    atomicAdd(out + threadIdx.x, total);
  }
}

// The part that holds a tile: the last one that begins at or before it.
__device__ __forceinline__ u32 part_of(const Part *parts, u32 num_parts, u64 tile) {
  u32 low = 0, high = num_parts;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (parts[middle].first_tile <= tile) low = middle;
    else high = middle;
  }
  return low;
}

// The next task of a CTA whose tiles end before `end`; one thread finds it.
__device__ __forceinline__ void find_task(Task &task, const Part *parts, u32 num_parts,
                                          u64 num_tiles, u64 end) {
  const u64 tile = task.next;
  u32 index = task.index;
  if (index + 1 < num_parts && parts[index + 1].first_tile <= tile) task.index = ++index;
  const Part &part = parts[index];
  const u64 last = index + 1 < num_parts ? parts[index + 1].first_tile : num_tiles;
  const u64 group = (tile - part.first_tile) / part.group_tiles;
  const u64 first = part.first_tile + group * part.group_tiles;
  const u64 stop = min(min(first + part.group_tiles, last), end);
  const u64 tile_quads = part.dims == 0 ? BLOCK_QUADS : THREADS;
  task.low = part.offset + group * part.group;
  task.high = min(task.low + part.group, part.offset + part.bytes);
  const u64 low_quad = task.low / 16, high_quad = (task.high + 15) / 16;
  const u64 shift = (part.lines ? 0 : low_quad / tile_quads) - first;  // to what its tiles count
  task.from = (tile + shift) * tile_quads;
  task.to = (stop + shift) * tile_quads;
  if (!part.lines) task.from = max(task.from, low_quad), task.to = min(task.to, high_quad);
  task.done_from = task.done_to = task.to;
  if (part.dims == 0) {
    // A piece of 16 bytes that holds a byte of the task is never outside of the allocation at its
    // beginning, which is aligned; at its end 16 more bytes have to be the task's own.
    const bool shifted = ((u64)part.data - part.offset) & 15;
    const u64 safe = shifted && task.high >= 16 ? task.high - 16 : task.high;
    const u64 whole_from = max(tile + shift, (task.low + TILE_BYTES - 1) / TILE_BYTES);
    const u64 whole_to = min(stop + shift, safe / TILE_BYTES);
    if (whole_from < whole_to)
      task.done_from = whole_from * BLOCK_QUADS, task.done_to = whole_to * BLOCK_QUADS;
  }
  task.slot = part.slot + group;
  task.next = stop;
  task.part = &part;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
digest(const Part *parts, u32 num_parts, u64 num_tiles, u64 table_seed, u64 block_seed, u64 *out) {
  __shared__ u64 shared[WARPS * 4];
  __shared__ uint4 seams[32];  // the last three words of blocks
  __shared__ Task task;
  extern __shared__ __align__(16) uint4 ring[];  // [WARPS][STAGES][STAGE_SLOTS]
  const Seeds seeds = {table_seed, block_seed};
  if (threadIdx.x == 0) {
    task.next = num_tiles * blockIdx.x / gridDim.x;
    task.index = part_of(parts, num_parts, task.next);
    task.table_built = false;
  }
  __syncthreads();
  while (task.next < num_tiles * (blockIdx.x + 1) / gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0)
      find_task(task, parts, num_parts, num_tiles, num_tiles * (blockIdx.x + 1) / gridDim.x);
    __syncthreads();
    u64 lanes[4] = {0, 0, 0, 0};
    if (task.done_from < task.done_to) stream_tiles(lanes, task, seeds, ring, seams);
#pragma unroll 1
    for (int side = 0; side < 2; ++side)
      add_quads(lanes, task, side ? task.done_to : task.from, side ? task.to : task.done_from,
                seeds, ring);
    flush(lanes, out + 4 * task.slot, shared);
  }
}
