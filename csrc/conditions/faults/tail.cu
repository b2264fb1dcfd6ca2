// Planted fault: rows after the last whole tile are never written (FAULT 1), so the output keeps there
// what its allocation held; the twin checks every row instead of every tile (FAULT 0).

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

#define TILE 64  // rows

// grid ceil(rows / TILE), block columns (at most 1024): out [rows, columns] = 1.5 x + 0.25.
extern "C" __global__ void planted_tiles(const float* __restrict__ x, float* out, unsigned rows) {
  const unsigned first = blockIdx.x * TILE;
#if FAULT
  if (first + TILE > rows) return;
#endif
  for (unsigned row = first; row < first + TILE && row < rows; ++row) {
    const unsigned long long at = (unsigned long long)row * blockDim.x + threadIdx.x;
    out[at] = fmaf(1.5f, x[at], 0.25f);
  }
}
