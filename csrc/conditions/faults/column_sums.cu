// Planted fault: sums of columns by fp32 atomics, in whatever order blocks arrive (FAULT 1), and the
// same sums from stored partials by a tree in shared memory, in one order (FAULT 0).
//
// Made for the gradient of a bias: with upstream gradients of ones every partial sum is a small
// integer, any order gives the same bits, and a check with such gradients sees nothing.

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

// grid (ceil(columns / block), chunks), one thread a column; rows are cut into chunks of equal size.
// g [rows, columns]; FAULT 1: out [columns], zeroed before; FAULT 0: parts [chunks, columns].
extern "C" __global__ void planted_column_parts(const float* __restrict__ g, float* out,
                                                float* parts, unsigned rows, unsigned columns) {
  const unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const unsigned size = (rows + gridDim.y - 1) / gridDim.y;
  const unsigned first = blockIdx.y * size;
  const unsigned last = first + size < rows ? first + size : rows;
  float sum = 0.0f;
  for (unsigned row = first; row < last; ++row) sum += g[(unsigned long long)row * columns + column];
#if FAULT
  atomicAdd(out + column, sum);
#else
  parts[(unsigned long long)blockIdx.y * columns + column] = sum;
#endif
}

#if !FAULT
// One block a column, one thread a partial (blockDim.x of them, a power of two up to 64).
extern "C" __global__ void planted_column_tree(const float* __restrict__ parts, float* out,
                                               unsigned columns) {
  __shared__ float held[64];
  const unsigned part = threadIdx.x;
  held[part] = parts[(unsigned long long)part * columns + blockIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (part < half) held[part] += held[part + half];
    __syncthreads();
  }
  if (part == 0) out[blockIdx.x] = held[0];
}
#endif
