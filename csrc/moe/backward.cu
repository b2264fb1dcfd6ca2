// The backward pass of the layer in one persistent launch.
//
// The router gradient, d_gate, d_up and w h' follow d_out w_down; then gradients of x and of the weights;
// see ARCHITECTURE.md for the numerics contract, backward/record.cuh for the order of the work. Launch as
// `forward`; `enter_backward` runs before, in stream order.

#ifndef GROUP
#define GROUP 0
#endif

#define IN_FLIGHT 4  // 16-byte loads of a mover before the first store: the registers do not allow more

#include "moe/backward/hidden.cuh"
#include "moe/backward/input.cuh"
#include "moe/backward/movers.cuh"
#include "moe/backward/producer.cuh"
#include "moe/backward/sums.cuh"
#include "moe/backward/teller.cuh"
#include "moe/backward/weights.cuh"

// The tile before ends here for the compiler: else it sees accumulators pass through branches, and lets
// products wait for each other. Costs nothing where products start at zero.
static __device__ __forceinline__ void begin(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0f;
}

// One stage of products: B, or A and B, with rows that are K.
template <int TRANS_A>
static __device__ __forceinline__ void multiply_columns(float (&d)[128], u32 stage, u32 half, int first) {
  const u32 at = stage + half * A_HALF;
  const u64 a = TRANS_A ? operand_columns(at) : operand(at), b = operand_columns(stage + A_BYTES);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma_64x256x16<TRANS_A, 1>(d, a + (TRANS_A ? 128 : 2) * k, b + 128 * k, k != 0 || !first);
  wgmma_commit();
}

static __device__ __forceinline__ void make_hidden(const Rank &r, const Gradient &g, BackShared &s,
                                                   Consumer &c, u32 stages, const BackTask &task,
                                                   bool idle) {
  const RowWeights w = row_weights_of(g, c, task, idle);
  float d[128];
  begin(d);
  multiply<multiply_columns<0>>(d, s, c, stages, task.steps, idle);
  if (idle) skip_hidden(reread(r, s), s, c, task);
  else finish_hidden(d, r, g, s, c, stages, task, w);
}

static __device__ __forceinline__ void make_input(const Rank &r, const Gradient &g, BackShared &s,
                                                  Consumer &c, u32 stages, const BackTask &task,
                                                  bool idle) {
  const u32 row = row_in_block(c) + c.lane % 16;
  const u32 route = route_of(r, task, task.kind == BACK_INPUT, row);
  u64 target = 0;
  float d[128];
  begin(d);
  multiply<multiply_columns<0>>(d, s, c, stages, task.steps, idle, 1, [&] {
    if (c.lane < 16) target = (u64)input_result_of(reread(r, s), reread(g, s), task, row, route);
    __syncwarp();
  });
  if (!idle) finish_down(d, reread(r, s), c, task, target);
}

// Tells that the tile is done before its gradients leave, unless a later part needs its sums.
static __device__ __forceinline__ void make_weights(const Rank &r, const Gradient &g, BackShared &s,
                                                    Consumer &c, u32 stages, const BackTask &task,
                                                    bool idle, u32 finished) {
  const WeightTile t =
      weight_tile(wants_of(g, task.kind), width_of(r, task.kind), r.hidden_size, task.column);
  const bool first = task.part & PART_FIRST, last = task.part & PART_LAST;
  if (task.steps == 0) {
    see_stores(c);
    if (c.lane == 0) barrier_arrive(finished);
    if (!idle) finish_no_rows(g, c, task, t);
    return;
  }
  float d[128];
  begin(d);
  if (idle) {
    multiply<multiply_columns<1>>(d, s, c, stages, task.steps, true);
    if (c.lane == 0) barrier_arrive(finished);
    return;
  }
  if (first) {
    multiply<multiply_columns<1>>(d, s, c, stages, task.steps, false);
  } else {
    load_sums(d, scratch_of(g, c, task.column));
    settle(d);
    multiply<multiply_columns<1>>(d, s, c, stages, task.steps, false, 0);
  }
  if (!last) store_sums(d, scratch_of(reread(g, s), c, task.column));
  __syncwarp();
  if (c.lane == 0) barrier_arrive(finished);
  if (last) finish_weights(d, reread(g, s), c, task, t);
}

// As finish_up of forward, of g and u alone, which go where HIDDEN will store d_gate and d_up.
static __device__ __forceinline__ void make_again(const Gradient &gradient, BackShared &s,
                                                  Consumer &c, u32 stages, const BackTask &task,
                                                  bool idle) {
  float d[128];
  begin(d);
  multiply<multiply_stage>(d, s, c, stages, task.steps, idle);
  if (idle) return;
  const Gradient &g = reread(gradient, s);
  const bool shared = is_shared(task.kind);
  const u32 at = place_of(g, task) * BLOCK + row_in_block(c);
  const void *gate = shared ? &g.shared_d_gate_out : &g.d_gate_out;
  const void *up = shared ? &g.shared_d_up_out : &g.d_up_out;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const u32 x = task.column * 128 + q * 64;
    store_piece(c, 0, gate, x, at, [&](int i) { return d[q * 32 + i]; });
    store_piece(c, 1, up, x, at, [&](int i) { return d[64 + q * 32 + i]; });
  }
}

static __device__ __forceinline__ void consume_back(const Rank &rank, const Gradient &gradient,
                                                    BackShared &s, u32 stages, u32 thread) {
  Consumer c;
  c.half = thread / 128;
  c.warp = thread / 32 % 4;
  c.lane = thread % 32;
  c.staging = stages + STAGES * STAGE_BYTES + thread / 32 * STAGING;
  c.unseen = 0;
  BackTask task;
  for (;; c.task.advance()) {
    task = next_task(s, c);
    if (task.kind >= BACK_SUM) break;  // sums come last: accumulators need no place beside them
    const u32 finished = shared_address(&s.finished[c.task.place]);
    const bool idle = task.rows <= c.half * 64;  // a half without rows
    const Rank &r = reread(rank, s);
    const Gradient &g = reread(gradient, s);
    if (is_weights(task.kind)) {
      make_weights(r, g, s, c, stages, task, idle, finished);
    } else if (is_input(task.kind)) {
      make_input(r, g, s, c, stages, task, idle);
      __syncwarp();
      if (c.lane == 0) barrier_arrive(finished);
    } else {
      if (is_hidden(task.kind)) make_hidden(r, g, s, c, stages, task, idle);
      else make_again(g, s, c, stages, task, idle);
      c.unseen = finished;
    }
  }
  while (task.kind == BACK_SUM) {
    sum_gradients(reread(rank, s), reread(gradient, s), task.block * SUM_TOKENS + thread / 32, c.lane);
    if (c.lane == 0) barrier_arrive(shared_address(&s.finished[c.task.place]));
    c.task.advance();
    task = next_task(s, c);
  }
  see_stores(c);
  if (c.lane == 0) tma_wait<0>();  // gradients of weights
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ Rank one, const __grid_constant__ Gradient grad, const Rank *many,
         const Gradient *grads, u32 ranks_here) {
  extern __shared__ unsigned char raw[];
  __shared__ BackShared s;
  __shared__ u32 failed;
#if GROUP
  const u32 mine = blockIdx.x % ranks_here;
#else
  const u32 mine = 0;
#endif
  const u32 stages = (shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    const Rank &r = GROUP ? many[mine] : one;
    const Gradient &g = GROUP ? grads[mine] : grad;
#if GROUP
    for (const TensorMap *map = &r.x_rows; map <= &r.shared_saved_up; ++map) tma_acquire_map(map);
    for (const TensorMap *map = &g.d_rows; map <= &g.shared_w_down_out; ++map) tma_acquire_map(map);
#endif
    init_barriers(s);
    s.rank = &r;
    s.gradient = &g;
    failed = load_relaxed(r.counters + COUNT_FAILED);
    if (blockIdx.x == mine && r.ranks > 1 && r.counters[PLAN_DOWN] == 0)
      tell_peers(r, FLAG_PUSHED);  // who has nothing to do has done it
  }
  __syncthreads();
  if (failed) return;  // one thread's answer for all: the roles need each other
  const Rank &r = reread(one, s);
  const Gradient &g = reread(grad, s);
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    registers_lower<PRODUCER_REGISTERS>();
    if (warp == 0) {
      if (lane == 0) produce_back(r, g, s, stages);
      __syncwarp();
    } else if (warp == 1) {
      if (lane == 0) tell_back(r, g, s);
      __syncwarp();
    } else {
      move_all_back(r, g, s, lane);
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    consume_back(r, g, s, stages, threadIdx.x - 128);
  }
}
