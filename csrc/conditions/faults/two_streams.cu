// For a planted fault of the host: a kernel that is slow to write, and one that reads what it wrote.
// The fault launches the second one on the legacy default stream, whatever stream the caller is on.

#include "conditions/faults/waiting.cuh"

// out [count] = 2 x, `cycles` after the start of each block.
extern "C" __global__ void planted_slow_double(const float* __restrict__ x, float* out,
                                               unsigned count, unsigned cycles) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  wait_until(clock64(), cycles);
  if (at < count) out[at] = 2.0f * x[at];
}

// out [count] = doubled + 1.
extern "C" __global__ void planted_increment(const float* doubled, float* out, unsigned count) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) out[at] = doubled[at] + 1.0f;
}
