// Planted fault: a matrix product split along K whose partial tiles are added in the order in which
// they were finished (FAULT 1), and the same product with them added in the order of the splits
// (FAULT 0). One index is all that differs: where a split puts its partial tile.

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

#define EDGE 32  // of a square tile of c
#define ROUNDS 4  // elements of a tile per thread: 256 threads

// c [m, n] = a [m, k] b [k, n], row-major; m, n and k / splits are multiples of EDGE.
// grid (m / EDGE * n / EDGE, splits), block 256. workspace [tiles, splits, EDGE * EDGE];
// counters [tiles, 2], zero before and after: partial tiles placed, partial tiles written.
extern "C" __global__ void __launch_bounds__(256)
    planted_split_k(const float* __restrict__ a, const float* __restrict__ b, float* c,
                    float* workspace, unsigned* counters, unsigned n, unsigned k) {
  __shared__ float rows[EDGE][EDGE + 1];
  __shared__ float columns[EDGE][EDGE + 1];
  __shared__ unsigned told;
  const unsigned tile = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
  const unsigned row = tile / (n / EDGE) * EDGE, column = tile % (n / EDGE) * EDGE;
  const unsigned x = threadIdx.x % EDGE, y = threadIdx.x / EDGE;  // y in 0 .. 7
  float sum[ROUNDS] = {0.0f, 0.0f, 0.0f, 0.0f};
  const unsigned share = k / splits;
  for (unsigned at = split * share; at < (split + 1) * share; at += EDGE) {
    for (unsigned r = 0; r < ROUNDS; ++r) {
      rows[y + 8 * r][x] = a[(unsigned long long)(row + y + 8 * r) * k + at + x];
      columns[y + 8 * r][x] = b[(unsigned long long)(at + y + 8 * r) * n + column + x];
    }
    __syncthreads();
    for (unsigned inner = 0; inner < EDGE; ++inner)
#pragma unroll
      for (unsigned r = 0; r < ROUNDS; ++r)
        sum[r] = fmaf(rows[y + 8 * r][inner], columns[inner][x], sum[r]);
    __syncthreads();
  }
#if FAULT
  if (threadIdx.x == 0) told = atomicAdd(counters + 2 * tile, 1u);
  __syncthreads();
  const unsigned slot = told;  // the order of arrival
  __syncthreads();
#else
  const unsigned slot = split;
#endif
  volatile float* parts = workspace + (unsigned long long)tile * splits * EDGE * EDGE;
  for (unsigned r = 0; r < ROUNDS; ++r)
    parts[slot * EDGE * EDGE + (y + 8 * r) * EDGE + x] = sum[r];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) told = atomicAdd(counters + 2 * tile + 1, 1u);
  __syncthreads();
  if (told + 1 != splits) return;
  __threadfence();  // the last block reads what the others wrote before they counted
  for (unsigned r = 0; r < ROUNDS; ++r) {
    float whole = 0.0f;
    for (unsigned s = 0; s < splits; ++s)
      whole += parts[s * EDGE * EDGE + (y + 8 * r) * EDGE + x];
    c[(unsigned long long)(row + y + 8 * r) * n + column + x] = whole;
  }
  if (threadIdx.x < 2) counters[2 * tile + threadIdx.x] = 0;
}
