// What comes before a launch: counters at zero, the order of the work, x where peers read it.
//
// A *segment* is a run of blocks whose tiles come together. Experts in ascending order are joined
// to a segment until it has segment_least blocks, and never beyond segment_most; an expert above
// segment_most is cut into as few parts as possible, as equal as possible, the larger ones first.
// So weights are read once or a few times, and rows are used while they lie in L2. It decides when
// a tile comes, not what is in it.
//
// Groups: SHARED_UP, SHARED_DOWN, UP 0, UP 1, DOWN 0, UP 2, DOWN 1, ... , DOWN last, SUM, END;
// those without tickets are left out (END has none, and is always there). At most 2 * (experts +
// max_blocks / segment_most) + 4. Launch: SCHEDULE_THREADS threads; any grid.x, a few for one rank
// and about 2 an SM for several, since then x is copied; grid.y the ranks here.

#include "moe/schedule.cuh"

#define FEW 2048  // segments that are kept in shared memory

// The expert behind the segment that begins with this one; `firsts` as of find_first_blocks.
// Bisects, since firsts ascends.
static __device__ __forceinline__ u32 end_of_segment(const Rank &r, const u32 *firsts, u32 expert) {
  const u32 from = firsts[expert];
  if (firsts[expert + 1] - from > r.segment_most) return expert + 1;  // alone, and cut
  // The first end with enough blocks, else the last expert's.
  u32 low = expert + 1, high = r.experts;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (firsts[middle] - from >= r.segment_least) high = middle;
    else low = middle + 1;
  }
  if (firsts[low] - from <= r.segment_most) return low;
  u32 fits = expert + 1, beyond = low;  // the last end that is not too large
  while (beyond - fits > 1) {
    const u32 middle = (fits + beyond) / 2;
    if (firsts[middle] - from <= r.segment_most) fits = middle;
    else beyond = middle;
  }
  return fits;
}

// reached[e] 1 for all that chains of `next` pass from expert 0 on, else 0. next[experts] is
// itself. Twice as far with each turn, so that 1024 experts cost 10 turns. Overwrites `next`.
static __device__ __forceinline__ void follow(u32 *next, u32 *reached, u32 experts, u32 run) {
  for (u32 covered = 1; covered < experts; covered *= 2) {
    u32 further[RUN];
#pragma unroll
    for (u32 i = 0; i < RUN; ++i) {
      const u32 expert = threadIdx.x * run + i;
      if (i >= run || expert >= experts) continue;
      further[i] = next[next[expert]];
      if (reached[expert]) reached[next[expert]] = 1;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < RUN; ++i) {
      const u32 expert = threadIdx.x * run + i;
      if (i < run && expert < experts) next[expert] = further[i];
    }
    __syncthreads();
  }
}

// The first blocks of all segments into `starts`, which is `few` or, if they are too many, the
// scratch of the schedule, which has a word for every block. Returns how many. All threads.
static __device__ __forceinline__ u32 find_segments(const Rank &r, const u32 *firsts, u32 *few,
                                                    u32 *&starts) {
  __shared__ u32 next[MAX_EXPERTS + 1], reached[MAX_EXPERTS + 1];
  const u32 experts = r.experts, run = run_length(experts), most = r.segment_most;
  u32 ends[RUN], parts[RUN], sum = 0, segments;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    if (i >= run || expert >= experts) continue;
    next[expert] = ends[i] = end_of_segment(r, firsts, expert);
    reached[expert] = expert == 0;
  }
  if (threadIdx.x == 0) next[experts] = experts;
  __syncthreads();
  follow(next, reached, experts, run);
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    parts[i] = 0;
    if (i < run && expert < experts && reached[expert])
      parts[i] = (firsts[ends[i]] - firsts[expert] + most - 1) / most;
    sum += parts[i];
  }
  u32 at = sum_before(sum, segments);
  starts = segments <= FEW ? few : r.counts;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    if (parts[i] == 0) continue;
    const u32 first = firsts[threadIdx.x * run + i], blocks = firsts[ends[i]] - first;
    const u32 least = blocks / parts[i], larger = blocks % parts[i];
    for (u32 p = 0; p < parts[i]; ++p) starts[at++] = first + p * least + min(p, larger);
  }
  __syncthreads();
  return segments;
}

// Fills the table of groups. A group's first ticket needs no sum over groups: before UP i there are
// all UP tiles up to its first block and all DOWN tiles up to segment i - 1, before DOWN i all UP
// tiles up to segment i + 2.
static __device__ __forceinline__ void make_groups(const Rank &r) {
  __shared__ u32 firsts[MAX_EXPERTS + 1], few[FEW];
  find_first_blocks(r, firsts);
  u32 *starts;
  const u32 segments = find_segments(r, firsts, few, starts), blocks = firsts[r.experts];
  const u32 up = (r.width + 127) / 128, down = (r.hidden_size + 255) / 256;
  const u32 shared_blocks = r.shared_width ? (r.tokens + BLOCK - 1) / BLOCK : 0;
  const u32 shared_up = shared_blocks * ((r.shared_width + 127) / 128);
  const u32 base = shared_up + shared_blocks * down;
  Group *groups = r.groups + (shared_blocks ? 2 : 0);
  for (u32 i = threadIdx.x; i < segments; i += SCHEDULE_THREADS) {
    const u32 first = starts[i], last = i ? starts[i - 1] : 0;
    const u32 next = i + 1 < segments ? starts[i + 1] : blocks;
    const u32 beyond = i + 2 < segments ? starts[i + 2] : blocks;
    groups[i ? 2 * i - 1 : 0] = {base + first * up + last * down, GROUP_UP, first, next - first};
    groups[i + 1 < segments ? 2 * i + 2 : 2 * i + 1] = {base + beyond * up + first * down,
                                                        GROUP_DOWN, first, next - first};
  }
  if (threadIdx.x) return;
  if (shared_blocks) {
    r.groups[0] = {0, GROUP_SHARED_UP, 0, shared_blocks};
    r.groups[1] = {shared_up, GROUP_SHARED_DOWN, 0, shared_blocks};
  }
  Group *rest = groups + 2 * segments;
  const u32 tiles = base + blocks * (up + down), sums = (r.tokens + SUM_TOKENS - 1) / SUM_TOKENS;
  if (sums) *rest++ = {tiles, GROUP_SUM, 0, sums};
  *rest++ = {tiles + sums, GROUP_END, 0, 1};
  r.counters[PLAN_GROUPS] = (u32)(rest - r.groups);
  r.counters[PLAN_DOWN] = down * (blocks + shared_blocks);
}

// x of this rank, 16 bytes a thread and 8 of them on their way.
static __device__ __forceinline__ void stage(const Rank &r) {
  const u64 pieces = (u64)r.tokens * r.hidden_size / 8;
  const u64 step = (u64)gridDim.x * SCHEDULE_THREADS;
  const uint4 *from = (const uint4 *)r.own_x;
  uint4 *to = (uint4 *)r.peers[r.rank].x;
  for (u64 at = (u64)blockIdx.x * SCHEDULE_THREADS + threadIdx.x; at < pieces; at += 8 * step) {
    uint4 piece[8];
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (at + j * step < pieces) piece[j] = load_streaming(from + at + j * step);
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (at + j * step < pieces) to[at + j * step] = piece[j];
  }
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS, 1)
enter(const __grid_constant__ Rank one, const Rank *many) {
  const Rank &r = record(one, many);
  if (has_failed(r)) return;
  const u32 epoch = r.counters[COUNT_EPOCH] + 1;
  const u32 words = COUNTER_HEAD + 3 * r.max_blocks + r.max_shared_blocks;
  const u32 zeroed = 1u << COUNT_DISPATCH | 1u << COUNT_COMPUTE | 1u << COUNT_DOWN;
  if (blockIdx.x == 0) make_groups(r);
  for (u32 i = blockIdx.x * SCHEDULE_THREADS + threadIdx.x; i < words;
       i += gridDim.x * SCHEDULE_THREADS)
    if (i >= COUNTER_HEAD || zeroed >> i & 1) r.counters[i] = 0;
  // Peers have read the x of the launch before, which ended after they had said so.
  if (r.ranks > 1) stage(r);
  if (!is_last_cta(r)) return;
  if (threadIdx.x == 0) r.counters[COUNT_EPOCH] = epoch;
  tell_everyone(r, FLAG_ENTERED, epoch);
}
