// SwiGLU backward of one element, as the numerics contract has it (mok/activations.py), in fp32.
//
// The sigmoid is forward's; 1 + g (1 - s) is one fused multiply-add, all else is rounded by itself. A
// gradient passes where g <= limit and |u| <= limit. NaN stays NaN where the contract's formula has it.

#pragma once

#include "moe/swiglu.cuh"

struct SwigluGradient {
  float gate, up;   // d_gate, d_up
  float weighted;   // w h'
  float product;    // p h', a term of the router gradient
};

// p: d_out w_down; w: the row's weight.
static __device__ __forceinline__ SwigluGradient swiglu_backward(float p, float g, float u, float w,
                                                                 float limit) {
  const float gc = lower_of(g, limit), uc = higher_of(lower_of(u, limit), -limit);
  const float s = sigmoid(gc), silu = __fmul_rn(gc, s);
  const float slope = __fmul_rn(s, __fmaf_rn(gc, __fadd_rn(1.0f, -s), 1.0f));
  const float hidden = __fmul_rn(silu, uc), d_hidden = __fmul_rn(w, p);
  SwigluGradient d;
  d.gate = __fmul_rn(__fmul_rn(d_hidden, uc), slope);
  d.up = __fmul_rn(d_hidden, silu);
  if (g > limit) d.gate = 0.0f;
  if (fabsf(u) > limit) d.up = 0.0f;
  d.weighted = __fmul_rn(w, hidden);
  d.product = __fmul_rn(p, hidden);
  return d;
}
