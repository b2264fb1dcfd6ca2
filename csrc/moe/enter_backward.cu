// What comes before a backward launch: counters at zero, the order of the work, and x, d_out and
// the router weights where peers read them.
//
// The order is that of moe/backward/record.cuh, by segments (segments.cuh). Nothing is summed over
// groups: a group's place and its first ticket follow from how many blocks, experts and parts come
// before it, which are sums over experts. Launch: as `enter`.

#include "moe/backward/weight_tiles.cuh"
#include "moe/segments.cuh"

// Whether zeros have to be written for an expert without rows: nothing is added to main memory.
static __device__ __forceinline__ bool writes_zeros(u32 wants, u32 fresh, const float *gate,
                                                    const float *up, const float *down) {
  const u32 written = fresh | (gate ? 0 : WANT_GATE) | (up ? 0 : WANT_UP) | (down ? 0 : WANT_DOWN);
  return wants & written & (WANT_GATE | WANT_UP | WANT_DOWN);
}

// What is known of each expert. A *group* here is one of WEIGHTS with rows.
struct Experts {
  u32 firsts[MAX_EXPERTS + 1];   // first blocks, as of find_first_blocks
  u32 places[MAX_EXPERTS + 1];   // experts with rows before
  u32 groups[MAX_EXPERTS + 1];   // groups before
  u32 cuts[MAX_EXPERTS];         // parts of cut experts before
  u32 rows[MAX_EXPERTS];         // of the experts with rows, by place
};

// All but `firsts`, from them. All threads.
static __device__ __forceinline__ void count_experts(const Rank &r, u32 uncut, u32 tiles,
                                                     Experts &e) {
  const u32 experts = r.experts, run = run_length(experts), most = r.segment_most;
  u32 parts[RUN], there = 0, cut = 0, all, all_there, all_cut;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    parts[i] = 0;
    if (i < run && expert < experts)
      parts[i] = parts_of(e.firsts[expert + 1] - e.firsts[expert], most, uncut);
    there += parts[i] != 0;
    cut += parts[i] > 1 ? parts[i] : 0;
  }
  u32 place = sum_before(there, all_there), cuts = sum_before(cut, all_cut);
  u32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) sum += parts[i];
  u32 groups = sum_before(sum, all);
#pragma unroll
  for (u32 i = 0; i < RUN; ++i) {
    const u32 expert = threadIdx.x * run + i;
    if (i >= run || expert >= experts) continue;
    e.places[expert] = place;
    e.groups[expert] = tiles ? groups : 0;
    e.cuts[expert] = cuts;
    if (parts[i]) e.rows[place] = r.expert_rows[expert];
    place += parts[i] != 0;
    groups += parts[i];
    cuts += parts[i] > 1 ? parts[i] : 0;
  }
  if (threadIdx.x == 0) {
    e.places[experts] = all_there;
    e.groups[experts] = tiles ? all : 0;
  }
  __syncthreads();
}

// Where a group stands in the table, and its first ticket.
struct Place {
  u32 index, ticket;
};

struct Order {
  const Rank &r;
  const Gradient &g;
  const Experts &experts;
  const u32 *starts;     // first blocks of segments
  u32 segments, blocks;
  u32 again, hidden, input, tiles;  // of a block, and of an expert's weights
  u32 kept;              // segments at the start without AGAIN
  Place before, beside;  // shared groups and tickets before HIDDEN 0, and those behind it

  __device__ __forceinline__ u32 start(u32 segment) const {
    return segment < segments ? starts[segment] : blocks;
  }
  __device__ __forceinline__ u32 expert_of(u32 block) const {
    return BLOCK_EXPERT(r.blocks[block]);
  }
  // Groups of WEIGHTS with rows before those of a segment.
  __device__ __forceinline__ u32 weights_before(u32 segment) const {
    if (segment >= segments) return experts.groups[r.experts];
    if (tiles == 0) return 0;
    const u32 expert = expert_of(starts[segment]);
    return experts.groups[expert] + segment - g.segment_of[experts.firsts[expert]];
  }
  __device__ __forceinline__ u32 again_blocks(u32 end) const {
    return end > g.saved_blocks ? end - g.saved_blocks : 0;
  }
  __device__ __forceinline__ u32 again_groups(u32 segment) const {
    return segment > kept ? segment - kept : 0;
  }
  // Tickets of routed rows: AGAIN and HIDDEN of all blocks below `up_to`, INPUT of those below
  // `inputs`, and so many groups of WEIGHTS.
  __device__ __forceinline__ u32 tickets(u32 up_to, u32 inputs, u32 weights) const {
    return again_blocks(up_to) * again + up_to * hidden + inputs * input + weights * tiles;
  }
  // Of the first group of a segment, AGAIN or HIDDEN.
  __device__ __forceinline__ Place first_of(u32 segment) const {
    if (segment == 0) return before;
    const u32 weights = weights_before(segment - 1);
    return {before.index + beside.index + again_groups(segment) + 2 * segment - 1 + weights,
            before.ticket + beside.ticket + tickets(start(segment), start(segment - 1), weights)};
  }
  // Of INPUT of a segment; WEIGHTS follow. `segments`: behind all WEIGHTS with rows.
  __device__ __forceinline__ Place input_of(u32 segment) const {
    const u32 next = min(segment + 2, segments), weights = weights_before(segment);
    return {before.index + beside.index + again_groups(next) + next + segment + weights,
            before.ticket + beside.ticket + tickets(start(next), start(segment), weights)};
  }
};

// Segments whose blocks are all below `saved_blocks`: bisects.
static __device__ __forceinline__ u32 find_kept(const Order &o) {
  u32 low = 0, high = o.segments;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (o.start(middle + 1) > o.g.saved_blocks) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The groups of all segments but those of WEIGHTS of whole experts. All threads.
static __device__ __forceinline__ void order_segments(const Order &o) {
  const Gradient &g = o.g;
  for (u32 i = threadIdx.x; i < o.segments; i += SCHEDULE_THREADS) {
    const u32 first = o.start(i), end = o.start(i + 1), blocks = end - first;
    Place at = o.first_of(i);
    if (i >= o.kept) {
      const u32 from = max(first, g.saved_blocks);
      g.groups[at.index++] = {at.ticket, BACK_AGAIN, from, end - from, i, 0, 0, 0};
      at.ticket += (end - from) * o.again;
    }
    g.groups[at.index] = {at.ticket, BACK_HIDDEN, first, blocks, i, 0, 0, 0};
    at = o.input_of(i);
    const u32 wanted = blocks * o.hidden;
    g.groups[at.index] = {at.ticket, BACK_INPUT, first, blocks, i, wanted, 0, 0};
    g.used_target[i] =
        blocks * o.input + (o.weights_before(i + 1) - o.weights_before(i)) * o.tiles;
    if (o.tiles == 0) continue;
    const u32 expert = o.expert_of(first), begin = o.experts.firsts[expert];
    const u32 all = o.experts.firsts[expert + 1] - begin;
    if (all <= g.uncut) continue;
    const u32 part = i - g.segment_of[begin];
    g.groups[at.index + 1] = {at.ticket + blocks * o.input,
                              BACK_WEIGHTS,
                              first,
                              blocks,
                              i,
                              wanted,
                              expert,
                              (o.experts.cuts[expert] + part + 1) | (part == 0 ? PART_FIRST : 0) |
                                  (end == begin + all ? PART_LAST : 0)};
  }
}

// WEIGHTS of whole experts: those with more rows first in their segment, so that the last tiles of
// a segment are short. And of experts without rows, if `zeros`. All threads.
static __device__ __forceinline__ void order_experts(const Order &o, bool zeros) {
  const Experts &e = o.experts;
  const Place last = o.input_of(o.segments);
  if (o.tiles == 0) return;
  for (u32 expert = threadIdx.x; expert < o.r.experts; expert += SCHEDULE_THREADS) {
    const u32 first = e.firsts[expert], blocks = e.firsts[expert + 1] - first;
    const u32 place = e.places[expert];
    if (blocks == 0 && zeros) {
      const u32 turn = expert - place;
      o.g.groups[last.index + turn] = {last.ticket + turn * o.tiles, BACK_WEIGHTS, 0, 0, 0, 0,
                                       expert, PART_FIRST | PART_LAST};
    }
    if (blocks == 0 || blocks > o.g.uncut) continue;
    const u32 segment = o.g.segment_of[first], start = o.start(segment);
    const u32 here = o.start(segment + 1) - start;
    const u32 from = e.places[o.expert_of(start)];
    const u32 end = e.places[o.expert_of(start + here - 1)] + 1, mine = e.rows[place];
    u32 turn = 0;
    for (u32 i = from; i < place; ++i) turn += e.rows[i] >= mine;
    for (u32 i = place + 1; i < end; ++i) turn += e.rows[i] > mine;
    const Place at = o.input_of(segment);
    o.g.groups[at.index + 1 + turn] = {at.ticket + here * o.input + turn * o.tiles,
                                       BACK_WEIGHTS,
                                       first,
                                       blocks,
                                       segment,
                                       here * o.hidden,
                                       expert,
                                       PART_FIRST | PART_LAST};
  }
}

// Fills the tables of one rank. All threads of one CTA.
static __device__ __forceinline__ void make_order(const Rank &r, const Gradient &g) {
  __shared__ Experts experts;
  __shared__ u32 few[FEW];
  find_first_blocks(r, experts.firsts);
  u32 *starts;
  const u32 segments = find_segments(r, g.uncut, experts.firsts, few, starts);
  const u32 blocks = experts.firsts[r.experts], lane = threadIdx.x % 32;
  for (u32 i = threadIdx.x / 32; i < segments; i += SCHEDULE_THREADS / 32) {
    const u32 end = i + 1 < segments ? starts[i + 1] : blocks;
    for (u32 b = starts[i] + lane; b < end; b += 32) g.segment_of[b] = i;
  }
  const u32 width = r.width, size = r.hidden_size, shared = r.shared_width;
  const u32 tiles = tiles_of_weights(g.wants, width, size);
  count_experts(r, g.uncut, tiles, experts);

  const u32 own = shared ? (r.tokens + BLOCK - 1) / BLOCK : 0;  // blocks of the shared expert
  const u32 input = (size + 255) / 256;
  const u32 shared_again = g.shared_again ? own * ((shared + 127) / 128) : 0;
  const u32 shared_hidden = own * ((shared + 255) / 256), shared_wants = g.wants >> 3;
  // Without tokens a gradient is zero, which has to be written all the same.
  const bool shared_zeros = writes_zeros(shared_wants, g.fresh >> 3, g.shared_main_gate,
                                         g.shared_main_up, g.shared_main_down);
  const u32 shared_tiles =
      shared && (own || shared_zeros) ? tiles_of_weights(shared_wants, shared, size) : 0;
  Order o = {r, g, experts, starts, segments, blocks};
  o.again = (width + 127) / 128;
  o.hidden = (width + 255) / 256;
  o.input = input;
  o.tiles = tiles;
  o.kept = find_kept(o);
  o.before = {(shared_again ? 1u : 0u) + (own ? 1u : 0u), shared_again + shared_hidden};
  o.beside = {(own ? 1u : 0u) + (shared_tiles ? 1u : 0u), own * input + shared_tiles};
  const bool zeros = writes_zeros(g.wants, g.fresh, g.main_gate, g.main_up, g.main_down);
  order_segments(o);
  order_experts(o, zeros);
  if (threadIdx.x) return;

  BackGroup *next = g.groups;
  if (shared_again) *next++ = {0, BACK_SHARED_AGAIN, 0, own, 0, 0, 0, 0};
  if (own) *next++ = {shared_again, BACK_SHARED_HIDDEN, 0, own, 0, shared_again, 0, 0};
  // Behind HIDDEN 0, if there is one.
  Place at = o.before;
  if (segments) {
    const u32 first = o.start(1);
    at.index += 1 + (o.kept == 0);
    at.ticket += o.tickets(first, 0, 0);
  }
  next = g.groups + at.index;
  if (own) *next++ = {at.ticket, BACK_SHARED_INPUT, 0, own, 0, shared_hidden, 0, 0};
  if (shared_tiles)
    *next++ = {at.ticket + own * input, BACK_SHARED_WEIGHTS, 0, own, 0, shared_hidden, 0,
               PART_FIRST | PART_LAST};
  // Behind everything.
  at = o.input_of(segments);
  const u32 empty = tiles && zeros ? r.experts - experts.places[r.experts] : 0;
  at.index += empty;
  at.ticket += empty * tiles;
  const u32 sums = (r.tokens + SUM_TOKENS - 1) / SUM_TOKENS;
  if (sums) g.groups[at.index++] = {at.ticket, BACK_SUM, 0, sums, 0, 0, 0, 0};
  g.groups[at.index++] = {at.ticket + sums, BACK_END, 0, 1, 0, 0, 0, 0};
  r.counters[PLAN_GROUPS] = at.index;
  r.counters[PLAN_DOWN] = input * (blocks + own);
}

// x, d_out and the router weights of this rank to where peers read them. All CTAs.
static __device__ __forceinline__ void stage(const Rank &r, const Gradient &g) {
  const BackPeer &mine = g.peers[r.rank];
  const u64 pieces = (u64)r.tokens * r.hidden_size / 8;
  copy_pieces((uint4 *)mine.x, (const uint4 *)r.own_x, pieces);
  copy_pieces((uint4 *)mine.d_out, (const uint4 *)g.own_d_out, pieces);
  float *router = (float *)mine.router;
  for (u32 i = blockIdx.x * SCHEDULE_THREADS + threadIdx.x; i < r.tokens * r.slots;
       i += gridDim.x * SCHEDULE_THREADS)
    router[i] = r.router[i];
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS, 1)
enter_backward(const __grid_constant__ Rank one, const Rank *many,
               const __grid_constant__ Gradient grad, const Gradient *grads) {
  const Rank &r = record(one, many);
  const Gradient &g = grads ? grads[blockIdx.y] : grad;
  if (has_failed(r)) return;
  const u32 epoch = r.counters[COUNT_EPOCH] + 1;
  const u32 words = BACK_HEAD + BACK_TABLES * r.max_blocks;
  if (blockIdx.x == 0) make_order(r, g);
  for (u32 i = blockIdx.x * SCHEDULE_THREADS + threadIdx.x; i < words;
       i += gridDim.x * SCHEDULE_THREADS)
    g.counters[i] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0)
    r.counters[COUNT_DISPATCH] = r.counters[COUNT_COMPUTE] = r.counters[COUNT_DOWN] = 0;
  // Peers have read what was staged for the backward before, which ended after they had said so.
  if (r.ranks > 1) stage(r, g);
  if (!is_last_cta(r)) return;
  if (threadIdx.x == 0) r.counters[COUNT_EPOCH] = epoch;
  tell_everyone(r, FLAG_ENTERED, epoch);
}
