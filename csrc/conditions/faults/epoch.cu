// Planted fault: the last block is found by a counter that never goes back and the number of the call,
// which the host passes by value (FAULT 1). A CUDA graph keeps the number of the call that was
// captured: its second replay has no last block, and nobody writes the output. The twin needs no
// number from the host (FAULT 0).

#ifndef FAULT
#error "define FAULT as 0 (clean twin) or 1 (fault)"
#endif

// grid blocks, block columns (at most 1024), one thread a column. x [rows, columns], parts [blocks,
// columns], out [columns]; counter [1]: blocks that have finished, over all calls. epoch: from 1.
extern "C" __global__ void planted_last_block(const float* __restrict__ x, float* parts, float* out,
                                              unsigned* counter, unsigned epoch, unsigned rows) {
  __shared__ unsigned ticket;
  const unsigned columns = blockDim.x, column = threadIdx.x;
  const unsigned size = (rows + gridDim.x - 1) / gridDim.x;
  float sum = 0.0f;
  for (unsigned row = blockIdx.x * size; row < (blockIdx.x + 1) * size && row < rows; ++row)
    sum += x[(unsigned long long)row * columns + column];
  volatile float* held = parts;
  held[(unsigned long long)blockIdx.x * columns + column] = sum;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(counter, 1u);
  __syncthreads();
#if FAULT
  const bool last = ticket + 1 == epoch * gridDim.x;
#else
  const bool last = (ticket + 1) % gridDim.x == 0;
#endif
  if (!last) return;
  __threadfence();
  float whole = 0.0f;
  for (unsigned part = 0; part < gridDim.x; ++part)
    whole += held[(unsigned long long)part * columns + column];
  out[column] = whole;
}
