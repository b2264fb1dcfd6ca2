// A kernel that only the emulator has: one product of 64 x 256 by any layout of its operands, one
// tile through ldmatrix and back, and a store in three dimensions. Tests hold each to plain
// arithmetic.

#include "device.hpp"

thread_local unsigned char raw[16];  // stands for dynamic shared memory

#include "moe/rank.cuh"
#include "ptx.cuh"

struct Job {
  TensorMap a, b, out;  // [rows, columns] twice, [any, rows, columns]
  float *product;       // [64, 256]
  u32 across_a, across_b, steps;  // of 64 of K
  u32 wrong;            // 1: descriptors of the other layout; 2: ldmatrix before its data are there
  int x, y, z;          // where the tile goes
};

template <int A, int B> static void multiply(float (&d)[128], u32 a, u32 b, u32 step, bool wrong) {
  const bool columns_a = wrong ? !A : A, columns_b = B;
  for (u32 k = 0; k < 4; ++k) {
    const u64 of_a = columns_a ? operand_columns(a) + 128 * k : operand(a) + 2 * k;
    const u64 of_b = columns_b ? operand_columns(b) + 128 * k : operand(b) + 2 * k;
    wgmma_64x256x16<A, B>(d, of_a, of_b, step > 0 || k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

static void transposed(const Job &job) {
  __shared__ u64 full;
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 a = (shared_address(raw) + 1023) & ~1023u, b = a + 8192;
  const u32 staging = b + 32768 + warp * 2048;
  const u32 barrier = shared_address(&full);
  if (thread == 0) barrier_init(barrier, 1);
  __syncthreads();
  float d[128];
  for (u32 step = 0; step < job.steps; ++step) {
    const int k = step * 64;
    if (thread == 0) {
      barrier_expect(barrier, 8192 + 32768);
      tma_load_2d(a, &job.a, barrier, job.across_a ? 0 : k, job.across_a ? k : 0);
      if (job.across_b) {
        for (int i = 0; i < 4; ++i) tma_load_2d(b + i * 8192, &job.b, barrier, i * 64, k);
      } else {
        tma_load_2d(b, &job.b, barrier, k, 0);
      }
    }
    if (job.wrong != 2) barrier_wait(barrier, step & 1);
    if (job.wrong == 2) named_barrier(1, 128);
    u32 v[4][4];
    for (u32 j = 0; j < 4; ++j) {
      const u32 row = lane & 15, column = j * 16 + (lane >> 4) * 8;
      const u32 at = a + warp * 2048 + ((row * 128 + column * 2) ^ ((row & 7) << 4));
      load_matrices(at, v[j][0], v[j][1], v[j][2], v[j][3]);
    }
    if (step == 0) {
      for (u32 j = 0; j < 4; ++j) {
        const u32 row = lane & 15, column = j * 16 + (lane >> 4) * 8;
        store_matrices(staging + ((row * 128 + column * 2) ^ ((row & 7) << 4)), v[j][0], v[j][1],
                       v[j][2], v[j][3]);
      }
      proxy_fence_shared();
      __syncwarp();
      if (lane == 0) {
        tma_store_3d(&job.out, staging, job.x, job.y + (int)warp * 16, job.z);
        tma_commit();
      }
    }
    const bool wrong = job.wrong == 1;
    if (job.across_a && job.across_b) multiply<1, 1>(d, a, b, step, wrong);
    else if (job.across_b) multiply<0, 1>(d, a, b, step, wrong);
    else if (job.across_a) multiply<1, 0>(d, a, b, step, wrong);
    else multiply<0, 0>(d, a, b, step, wrong);
    __syncthreads();
  }
  if (lane == 0) tma_wait<0>();
  for (u32 r = 0; r < 128; ++r) {
    const u32 row = warp * 16 + lane / 4 + 8 * (r / 2 % 2);
    const u32 column = r / 4 * 8 + lane % 4 * 2 + r % 2;
    job.product[row * 256 + column] = d[r];
  }
}

static void run_job(const emu::Launch &l) { transposed(*(const Job *)l.one); }
static void *shared_variable() { return raw; }
__attribute__((constructor)) static void announce_kernels() {
  emu::add_kernel("transposed", run_job, shared_variable, raw);
}
