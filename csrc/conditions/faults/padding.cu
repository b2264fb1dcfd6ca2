// Planted fault: rows of a workspace that are padding are read although nothing wrote them (FAULT 1);
// the twin writes zeros there (FAULT 0).
//
// A buffer of a fixed capacity holds `count` rows; the sum over columns reads it to its end, as a
// kernel with whole tiles does. Fresh memory of the driver is zero, so all is well until memory is
// used again.

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

// grid capacity, block columns (at most 1024): a block writes one row of workspace [capacity,
// columns] from x [capacity, columns], of which the first `count` rows are meant.
extern "C" __global__ void planted_pack(const float* __restrict__ x, float* workspace,
                                        unsigned count) {
  const unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (blockIdx.x < count) {
    workspace[at] = x[at];
    return;
  }
#if !FAULT
  workspace[at] = 0.0f;
#endif
}

// One thread a column of workspace [capacity, columns]: rows ascending, padding included.
extern "C" __global__ void planted_column_fold(const float* __restrict__ workspace, float* out,
                                               unsigned capacity, unsigned columns) {
  const unsigned column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0.0f;
  for (unsigned row = 0; row < capacity; ++row)
    sum += workspace[(unsigned long long)row * columns + column];
  out[column] = sum;
}
