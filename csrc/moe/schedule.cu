// The schedule, built on the device: which route lies in which row of which expert.
//
// The order is canonical: an expert's rows by global token (the ranks' tokens in rank order); a
// token has at most one route to an expert. Every rank builds its own part from everybody's ids:
//   publish  cleans this rank's ids, puts them where peers read them, and says so
//   count    per chunk of 128 tokens of one rank: how many go to each expert of this rank
//   scan     per expert: counts of chunks become what lies before a chunk, and the expert's rows
//   place    per chunk: routes[row]; blocks, padding and the sizes of the work
// A chunk keeps 128 bits for each expert, so a route's place in its chunk is a count of bits below
// its token's: no order of atomics can be seen. Chunks are numbered by (rank, token / 128) whatever
// the ranks' numbers of tokens are; those beyond a rank's tokens are empty. Launch:
// SCHEDULE_THREADS threads; grid.x as large as there are chunks (scan: experts) is best; grid.y the
// ranks here.

#include "moe/schedule.cuh"

#define ROUTES (BLOCK * MAX_SLOTS / SCHEDULE_THREADS)  // of a chunk, that belong to a thread
#define MASK (BLOCK / 32)                              // words of an expert's bits

static __device__ __forceinline__ u32 *ids_of(const Rank &r, u32 source, u32 epoch) {
  return r.peers[source].ids + (epoch & 1) * (1 + r.max_tokens * r.slots);
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS, 1)
publish(const __grid_constant__ Rank one, const Rank *many, const long long *topk_ids,
        const long long *const *ids_many) {
  __shared__ int ids[BLOCK * MAX_SLOTS];
  const Rank &r = record(one, many);
  if (has_failed(r)) return;
  const long long *given = many ? ids_many[blockIdx.y] : topk_ids;
  const u32 epoch = r.counters[COUNT_SCHEDULE] + 1;
  const u32 slots = r.slots, routes = r.tokens * slots, step = BLOCK * slots;
  const long long experts = (long long)r.experts * r.ranks;
  u32 *out = ids_of(r, r.rank, epoch), bad = 0;
  for (u32 from = blockIdx.x * step; from < routes; from += gridDim.x * step) {
    const u32 here = min(step, routes - from);
    long long read[ROUTES];  // all on their way before the first is looked at
#pragma unroll
    for (u32 j = 0; j < ROUTES; ++j) {
      const u32 i = threadIdx.x + j * SCHEDULE_THREADS;
      read[j] = i < here ? given[from + i] : -1;
    }
#pragma unroll
    for (u32 j = 0; j < ROUTES; ++j) {
      const u32 i = threadIdx.x + j * SCHEDULE_THREADS;
      if (i >= here) continue;
      const bool right = read[j] >= -1 && read[j] < experts;
      ids[i] = right ? (int)read[j] : -1;
      bad += !right;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < here; i += SCHEDULE_THREADS) {
      const int id = ids[i];
      bool again = false;
      for (u32 back = i % slots; back > 0; --back) again |= ids[i - back] == id;
      again &= id >= 0;
      bad += again;
      out[1 + from + i] = again ? UNUSED : (u32)id;
    }
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = r.tokens;
  if (bad) atomicAdd(r.counters + COUNT_BAD, bad);
  if (!is_last_cta(r)) return;
  if (threadIdx.x == 0) {
    r.counters[PLAN_BAD] = atomicExch(r.counters + COUNT_BAD, 0u);
    r.counters[COUNT_SCHEDULE] = epoch;
  }
  tell_everyone(r, FLAG_SCHEDULED, epoch);
}

struct Chunk {
  u32 source, first;  // whose tokens, and its first one's index there
};
static __device__ __forceinline__ u32 chunks_of_a_rank(const Rank &r) {
  return r.max_chunks / r.ranks;
}
static __device__ __forceinline__ Chunk find_chunk(const Rank &r, u32 index) {
  return {index / chunks_of_a_rank(r), index % chunks_of_a_rank(r) * BLOCK};
}

// Route i of the chunk (token i / slots, slot i % slots), i = threadIdx.x + j * SCHEDULE_THREADS:
// its expert among this rank's, or a number from `experts` on. Ids are read before the number of
// tokens is known, which costs no memory that is not there and saves a turn over the link.
static __device__ __forceinline__ void load_routes(const Rank &r, Chunk chunk, u32 epoch,
                                                   u32 (&experts)[ROUTES]) {
  const u32 *ids = ids_of(r, chunk.source, epoch);
  const u32 from = chunk.first * r.slots, room = r.max_tokens * r.slots, most = BLOCK * r.slots;
  const u32 before = r.rank * r.experts;
  const u32 routes = min(ids[0], r.max_tokens) * r.slots;
#pragma unroll
  for (u32 j = 0; j < ROUTES; ++j) {
    const u32 i = threadIdx.x + j * SCHEDULE_THREADS;
    experts[j] = i < most && from + i < room ? ids[1 + from + i] : UNUSED;
  }
#pragma unroll
  for (u32 j = 0; j < ROUTES; ++j) {
    const u32 i = threadIdx.x + j * SCHEDULE_THREADS;
    experts[j] = from + i < routes ? experts[j] - before : UNUSED;
  }
}

// The bits of the chunk's tokens for each expert. Zeroes them first; all threads.
static __device__ __forceinline__ void set_bits(const Rank &r, const u32 (&experts)[ROUTES],
                                                u32 *masks) {
  const u32 here = r.experts, slots = r.slots;
  for (u32 i = threadIdx.x; i < here * MASK; i += SCHEDULE_THREADS) masks[i] = 0;
  __syncthreads();
#pragma unroll
  for (u32 j = 0; j < ROUTES; ++j) {
    const u32 token = (threadIdx.x + j * SCHEDULE_THREADS) / slots;
    if (experts[j] < here) atomicOr(masks + experts[j] * MASK + token / 32, 1u << token % 32);
  }
  __syncthreads();
}

static __device__ __forceinline__ u32 bits_below(const u32 *mask, u32 token) {
  u32 count = 0;
#pragma unroll
  for (u32 w = 0; w < MASK; ++w) {
    const u32 low = w * 32;
    const u32 kept = token >= low + 32 ? ~0u : token <= low ? 0 : (1u << (token - low)) - 1;
    count += __popc(mask[w] & kept);
  }
  return count;
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS, 1)
count(const __grid_constant__ Rank one, const Rank *many) {
  __shared__ u32 masks[MAX_EXPERTS * MASK];
  const Rank &r = record(one, many);
  const u32 epoch = r.counters[COUNT_SCHEDULE];
  const u32 chunks = chunks_of_a_rank(r) * r.ranks;
  for (u32 index = blockIdx.x; index < chunks; index += gridDim.x) {
    const Chunk chunk = find_chunk(r, index);
    if (chunk.source != r.rank) {
      // Every peer has chunks, so this rank's next schedule, which may overwrite ids of the last
      // but one, begins after every peer has published this one and has done with those.
      if (threadIdx.x == 0)
        wait_system(r, r.peers[r.rank].flags + FLAG_SCHEDULED * MAX_RANKS + chunk.source, epoch,
                    WAIT_SCHEDULED, chunk.source);
      __syncthreads();
    }
    u32 experts[ROUTES];
    load_routes(r, chunk, epoch, experts);
    set_bits(r, experts, masks);
    for (u32 e = threadIdx.x; e < r.experts; e += SCHEDULE_THREADS)
      r.counts[(u64)e * r.max_chunks + index] = bits_below(masks + e * MASK, BLOCK);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS, 1)
scan(const __grid_constant__ Rank one, const Rank *many) {
  const Rank &r = record(one, many);
  const u32 chunks = chunks_of_a_rank(r) * r.ranks, run = run_length(chunks);
  for (u32 expert = blockIdx.x; expert < r.experts; expert += gridDim.x) {
    u32 *counts = r.counts + (u64)expert * r.max_chunks, rows = 0;
    for (u32 from = 0; from < chunks; from += SCHEDULE_THREADS * run) {
      u32 counted[RUN], sum = 0, total;
#pragma unroll
      for (u32 i = 0; i < RUN; ++i) {
        const u32 index = from + threadIdx.x * run + i;
        counted[i] = i < run && index < chunks ? counts[index] : 0;
        sum += counted[i];
      }
      u32 before = rows + sum_before(sum, total);
#pragma unroll
      for (u32 i = 0; i < RUN; ++i) {
        const u32 index = from + threadIdx.x * run + i;
        if (i < run && index < chunks) counts[index] = before;
        before += counted[i];
      }
      rows += total;
    }
    if (threadIdx.x == 0) r.expert_rows[expert] = rows;
  }
}

// The words of an expert's blocks, and PADDING in the rows at its end.
static __device__ __forceinline__ void finish_expert(const Rank &r, const u32 *firsts, u32 expert) {
  const u32 first = firsts[expert], blocks = firsts[expert + 1] - first;
  const u32 rows = r.expert_rows[expert];
  for (u32 b = threadIdx.x; b < blocks; b += SCHEDULE_THREADS)
    r.blocks[first + b] = expert << 16 | min(rows - b * BLOCK, (u32)BLOCK);
  for (u32 row = rows + threadIdx.x; row < blocks * BLOCK; row += SCHEDULE_THREADS)
    r.routes[first * BLOCK + row] = PADDING;
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS, 1)
place(const __grid_constant__ Rank one, const Rank *many) {
  __shared__ u32 masks[MAX_EXPERTS * MASK], firsts[MAX_EXPERTS + 1], bases[MAX_EXPERTS];
  const Rank &r = record(one, many);
  const u32 epoch = r.counters[COUNT_SCHEDULE];
  const u32 chunks = chunks_of_a_rank(r) * r.ranks, here = r.experts, slots = r.slots;
  const u32 room = r.max_blocks * BLOCK;
  u32 *routes = r.routes;
  find_first_blocks(r, firsts);
  for (u32 index = blockIdx.x; index < chunks; index += gridDim.x) {
    const Chunk chunk = find_chunk(r, index);
    u32 experts[ROUTES];
    load_routes(r, chunk, epoch, experts);
    for (u32 e = threadIdx.x; e < here; e += SCHEDULE_THREADS)
      bases[e] = firsts[e] * BLOCK + r.counts[(u64)e * r.max_chunks + index];
    set_bits(r, experts, masks);
#pragma unroll
    for (u32 j = 0; j < ROUTES; ++j) {
      const u32 i = threadIdx.x + j * SCHEDULE_THREADS;
      const u32 expert = min(experts[j], here - 1);  // any that is there, for one that is not
      const u32 row = bases[expert] + bits_below(masks + expert * MASK, i / slots);
      if (experts[j] < here && row < room)
        routes[row] = chunk.source << ROUTE_BITS | (chunk.first * slots + i);
    }
    __syncthreads();
  }
  for (u32 e = blockIdx.x; e < r.experts; e += gridDim.x) finish_expert(r, firsts, e);
  if (blockIdx.x != 0) return;
  u32 rows = 0, all;
  for (u32 e = threadIdx.x; e < r.experts; e += SCHEDULE_THREADS) rows += r.expert_rows[e];
  sum_before(rows, all);
  if (threadIdx.x == 0) {
    r.counters[PLAN_BLOCKS] = firsts[r.experts];
    r.counters[PLAN_DISPATCH] = firsts[r.experts] * (BLOCK / TICKET_ROWS);
    r.counters[PLAN_ROWS] = all;
  }
}
