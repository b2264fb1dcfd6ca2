// For a planted fault of the host: a kernel that is slow to write, and one that reads what it wrote.
// The fault launches the second one on the legacy default stream, whatever stream the caller is on.

// out [count] = 2 x, after `steps` dependent steps of about 4 cycles each.
extern "C" __global__ void planted_slow_double(const float* __restrict__ x, float* out,
                                               unsigned count, unsigned steps) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned state = at;
#pragma unroll 8
  for (unsigned step = 0; step < steps; ++step)
    asm volatile("mad.lo.u32 %0, %0, 1664525, 1013904223;" : "+r"(state));
  if (at < count) out[at] = 2.0f * x[at];
}

// out [count] = doubled + 1.
extern "C" __global__ void planted_increment(const float* doubled, float* out, unsigned count) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) out[at] = doubled[at] + 1.0f;
}
