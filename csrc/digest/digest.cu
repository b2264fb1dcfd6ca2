// The digest kernel: lanes of scheme lanes4x64-v1 for many tensors in one launch.
//
//   K_l(b, j) = (T[j + l] * B[b] mod 2^64) >> 32,  lane_l = sum over words i = 4096 b + j of
//   K_l(b, j) * m_i mod 2^64,  l = 0 .. 3
//
// The same sum as verify/lanes.py, by test. Sums of integers do not depend on their order, so the
// 64-bit atomics at the end are deterministic. No scratch; the output has to be zero before the
// launch. A part is cut into tiles, and a CTA takes a range of them or, where all memory is
// contiguous and there is much of it, every n-th one of n CTAs, so that all read at neighbouring
// places. Whole tiles of contiguous memory are streamed through shared memory; what is left at
// their borders, and strided memory, is read in quads of 16 bytes of the whole.

#include "digest/tiles.cuh"

// Adds the lanes of all threads to an output.
__device__ __forceinline__ void flush(u64 (&lanes)[4], u64 *out, u64 *sums) {
#pragma unroll
  for (int l = 0; l < 4; ++l) {
#pragma unroll
    for (int far = 16; far; far >>= 1) lanes[l] += __shfl_xor_sync(~0u, lanes[l], far);
  }
  const int lane = threadIdx.x % 32;
  __syncthreads();
  if (lane < 4)
    sums[threadIdx.x / 32 * 4 + lane] = lane == 0 ? lanes[0] : lane == 1 ? lanes[1]
                                        : lane == 2 ? lanes[2] : lanes[3];
  __syncthreads();
  if (threadIdx.x < 4) {
    u64 total = 0;
    for (int w = 0; w < WARPS; ++w) total += sums[w * 4 + threadIdx.x];
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

// The next task of a CTA that takes every `step`-th tile; one thread finds it.
__device__ __forceinline__ void find_task(Task &task, const Part *parts, u32 num_parts,
                                          u64 num_tiles, u32 step) {
  const u64 tile = task.next;
  u32 index = task.index;
  while (index + 1 < num_parts && parts[index + 1].first_tile <= tile) ++index;
  const Part &part = parts[index];
  const u64 last = index + 1 < num_parts ? parts[index + 1].first_tile : num_tiles;
  const u64 group = (tile - part.first_tile) / part.group_tiles;
  const u64 first = part.first_tile + group * part.group_tiles;
  const u64 stop = min(min(first + part.group_tiles, last), task.end);
  const u64 tile_quads = part.dims == 0 ? BLOCK_QUADS : THREADS;
  task.low = part.offset + group * part.group;
  task.high = min(task.low + part.group, part.offset + part.bytes);
  const u64 low_quad = task.low / 16, high_quad = (task.high + 15) / 16;
  const u64 shift = (part.lines ? 0 : low_quad / tile_quads) - first;  // to what its tiles count
  const u64 here = tile + shift;
  u64 next = step == 1 ? stop : tile + step;
  task.from = here * tile_quads;
  task.to = (step == 1 ? stop + shift : here + 1) * tile_quads;
  if (!part.lines) task.from = max(task.from, low_quad), task.to = min(task.to, high_quad);
  task.done_from = task.done_to = task.to;
  task.blocks = 0;
  if (part.dims == 0) {
    // A piece of 16 bytes that holds a byte of the task is never outside of the allocation at its
    // beginning, which is aligned; at its end 16 more bytes have to be the task's own.
    const bool shifted = ((u64)part.data - part.offset) & 15;
    const u64 safe = shifted && task.high >= 16 ? task.high - 16 : task.high;
    const u64 whole_from = (task.low + TILE_BYTES - 1) / TILE_BYTES;
    const u64 whole_to = min(stop + shift, safe / TILE_BYTES);
    task.block = step == 1 ? max(here, whole_from) : here;
    if (task.block >= whole_from && task.block < whole_to) {
      task.blocks = (u32)((whole_to - task.block + step - 1) / step);
      task.step = step;
      if (step == 1) {
        task.done_from = task.block * BLOCK_QUADS, task.done_to = whole_to * BLOCK_QUADS;
      } else {
        task.from = task.to = task.done_from = task.done_to = 0;
        next = tile + (u64)task.blocks * step;
      }
    }
  }
  task.slot = part.slot + group;
  task.last = next >= stop;
  if (task.low >= part.offset + part.bytes) {  // tiles without bytes, that stand for a part's costs
    task.blocks = 0;
    task.from = task.done_from = task.done_to = task.to = 0;
    task.last = false;
    next = step == 1 ? min(last, task.end) : tile + step;
  }
  task.next = next;
  task.index = index;
  task.part = &part;
}

// step: 1, each CTA takes as many tiles in a row as any other; or the number of CTAs, for parts
// that are all contiguous and one group each.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
digest(const Part *parts, u32 num_parts, u64 num_tiles, u64 table_seed, u64 block_seed, u64 *out,
       u32 step) {
  __shared__ u64 sums[WARPS * 4];
  __shared__ Task task;
  extern __shared__ __align__(16) uint4 shared[];  // the stages, or the table
  const Seeds seeds = {table_seed, block_seed};
  if (threadIdx.x == 0) {
    task.next = step == 1 ? num_tiles * blockIdx.x / gridDim.x : blockIdx.x;
    task.end = step == 1 ? num_tiles * (blockIdx.x + 1) / gridDim.x : num_tiles;
    task.index = part_of(parts, num_parts, task.next);
    task.table_built = false;
  }
  u64 lanes[4] = {0, 0, 0, 0};
  __syncthreads();
  while (task.next < task.end) {
    __syncthreads();
    if (threadIdx.x == 0) find_task(task, parts, num_parts, num_tiles, step);
    __syncthreads();
    if (task.blocks) stream_tiles(lanes, task, seeds, shared);
#pragma unroll 1
    for (int side = 0; side < 2; ++side)
      add_quads(lanes, task, side ? task.done_to : task.from, side ? task.to : task.done_from,
                seeds, shared);
    if (task.last) {
      flush(lanes, out + 4 * task.slot, sums);
#pragma unroll
      for (int l = 0; l < 4; ++l) lanes[l] = 0;
    }
  }
}
