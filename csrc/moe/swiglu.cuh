// silu(g) u in fp32, as the numerics contract has it: silu(g) = g / (1 + exp(-g)).
//
// exp by ex2.approx with the rounding error of its argument put back, the reciprocal by rcp.approx and
// one Newton step: 13 instructions an element, two of them at a quarter of the rate, and an error of at
// most 4 units of the last place of fp32. As in torch: NaN stays NaN, g = +inf gives inf, g = -inf gives
// NaN. Below g = -87.3, where silu is above -1e-36, it is -0.

#pragma once

#include "ptx.cuh"

// 1 / (1 + exp(-g)); 0 below -87.3. Of NaN some number.
static __device__ __forceinline__ float sigmoid(float g) {
  const float log2e = 1.44269502e+0f, ln2 = 6.93147182e-1f;
  const float c = fminf(fmaxf(g, -88.0f), 200.0f);  // keeps 1 + exp(-g) finite
  const float high = __fmul_rn(c, -log2e);
  const float low = __fmaf_rn(c, -log2e, -high);
  const float d = __fmaf_rn(exp2_approx(high), __fmaf_rn(low, ln2, 1.0f), 1.0f);
  const float r = reciprocal_approx(d);
  return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}
static __device__ __forceinline__ float silu(float g) { return __fmul_rn(g, sigmoid(g)); }

// limit: g at most limit, u within +-limit; +inf without clamping. NaN is kept, as torch.clamp keeps it.
static __device__ __forceinline__ float swiglu(float g, float u, float limit) {
  return __fmul_rn(silu(lower_of(g, limit)), higher_of(lower_of(u, limit), -limit));
}
