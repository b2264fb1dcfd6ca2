// What comes before a launch: counters at zero, the order of the work, x where peers read it.
//
// Groups: SHARED_UP, SHARED_DOWN, UP 0, UP 1, DOWN 0, UP 2, DOWN 1, ... , DOWN last, SUM, END, by
// segments (segments.cuh); those without tickets are left out (END has none, and is always there).
// At most 2 * (experts + max_blocks / segment_most) + 4. Launch: SCHEDULE_THREADS threads; any
// grid.x, a few for one rank and about 2 an SM for several, since then x is copied; grid.y the
// ranks here.

#include "moe/segments.cuh"

// Fills the table of groups. A group's first ticket needs no sum over groups: before UP i there are
// all UP tiles up to its first block and all DOWN tiles up to segment i - 1, before DOWN i all UP
// tiles up to segment i + 2.
static __device__ __forceinline__ void make_groups(const Rank &r) {
  __shared__ u32 firsts[MAX_EXPERTS + 1], few[FEW];
  find_first_blocks(r, firsts);
  u32 *starts;
  const u32 segments = find_segments(r, r.segment_most, firsts, few, starts);
  const u32 blocks = firsts[r.experts];
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
  if (r.ranks > 1)
    copy_pieces((uint4 *)r.peers[r.rank].x, (const uint4 *)r.own_x,
                (u64)r.tokens * r.hidden_size / 8);
  if (!is_last_cta(r)) return;
  if (threadIdx.x == 0) r.counters[COUNT_EPOCH] = epoch;
  tell_everyone(r, FLAG_ENTERED, epoch);
}
