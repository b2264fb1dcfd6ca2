// The digest kernel: lanes of scheme lanes4x64-v1 for many tensors in one launch.
//
//   K_l(b, j) = (T[j + l] * B[b] mod 2^64) >> 32,  lane_l = sum over words i = 4096 b + j of
//   K_l(b, j) * m_i mod 2^64,  l = 0 .. 3
//
// The same sum as verify/lanes.py, by test. Sums of integers do not depend on their order, so the
// 64-bit atomics at the end are deterministic. No scratch; the output has to be zero before the
// launch, and `zero` has to be 0. A part is cut into tiles, and a CTA takes a range of them: whole
// tiles of contiguous memory are streamed through shared memory, what is left at their borders is
// read directly, and strided memory is gathered word by word.

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
  const u64 tile_bytes = part.dims == 0 ? TILE_BYTES : GATHER_BYTES;
  task.low = part.offset + group * part.group;
  task.high = min(task.low + part.group, part.offset + part.bytes);
  const u64 shift = task.low / tile_bytes - first;  // to tiles of the whole
  task.from = tile + shift;
  task.to = min(stop + shift, (task.high + tile_bytes - 1) / tile_bytes);
  task.slot = part.slot + group;
  task.next = stop;
  task.part = &part;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
digest(const Part *parts, u32 num_parts, u64 num_tiles, u64 table_seed, u64 block_seed, u64 *out,
       u32 zero) {
  __shared__ u64 shared[WARPS * 4];
  __shared__ Task task;
  extern __shared__ __align__(16) uint4 ring[];  // [WARPS][STAGES][STAGE_PIECES]
  const Seeds seeds = {table_seed, block_seed, zero};
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
    if (task.part->dims == 0)
      add_contiguous(lanes, task, seeds, ring);
    else
      add_single_words(lanes, task, max(task.from * THREADS, task.low / 4),
                       min(task.to * THREADS, (task.high + 3) / 4), seeds, (u64 *)ring);
    flush(lanes, out + 4 * task.slot, shared);
  }
}
