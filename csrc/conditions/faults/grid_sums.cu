// Planted fault: a sum with one partial per block of a persistent grid, so that its bits depend on how
// many multiprocessors there are (FAULT 1); the twin has the same grid, and partials per chunk of a
// fixed size (FAULT 0).

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

// grid: multiprocessors; block columns (at most 1024), one thread a column. x [rows, columns].
// FAULT 1: parts [gridDim.x, columns]; FAULT 0: parts [chunks, columns].
extern "C" __global__ void planted_grid_parts(const float* __restrict__ x, float* parts,
                                              unsigned rows, unsigned chunks) {
  const unsigned columns = blockDim.x, column = threadIdx.x;
#if FAULT
  float sum = 0.0f;
  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x)
    sum += x[(unsigned long long)row * columns + column];
  parts[(unsigned long long)blockIdx.x * columns + column] = sum;
#else
  const unsigned size = (rows + chunks - 1) / chunks;
  for (unsigned chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    float sum = 0.0f;
    for (unsigned row = chunk * size; row < (chunk + 1) * size && row < rows; ++row)
      sum += x[(unsigned long long)row * columns + column];
    parts[(unsigned long long)chunk * columns + column] = sum;
  }
#endif
}

// One thread a column of parts [count, columns], ascending.
extern "C" __global__ void planted_grid_fold(const float* __restrict__ parts, float* out,
                                             unsigned count) {
  float sum = 0.0f;
  for (unsigned part = 0; part < count; ++part)
    sum += parts[(unsigned long long)part * blockDim.x + threadIdx.x];
  out[threadIdx.x] = sum;
}
