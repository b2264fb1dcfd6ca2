// The tensor cores: products that are carried out some time between their issue and the wait for
// them.
//
// d [64, 256] += A [64, 16] B^T [256, 16], bf16 in swizzled shared memory, fp32. A warp has 16
// rows: register 4 j + r of a lane is column 8 j + 2 (lane % 4) + r % 2 of row lane / 4 + 8 (r /
// 2). All four warps of a warpgroup must have issued a product before it can start.

#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace emu {

namespace {
constexpr uint32_t ROWS = 16, COLUMNS = 256, DEPTH = 16;

struct Operand {
  uint32_t start, stride;
};
Operand decode(uint64_t descriptor) {
  const Operand o = {(uint32_t)(descriptor & 0x3fff) << 4,
                     (uint32_t)(descriptor >> 32 & 0x3fff) << 4};
  if (descriptor >> 62 != 1)
    fail("a descriptor without 128-byte swizzle: %llx", (unsigned long long)descriptor);
  return o;
}
// 16 values of one row, as floats. Tests poison memory with NaN and give none.
void read_row(Cta *cta, const Operand &o, uint32_t row, float *to, uint32_t step) {
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t address = o.start + row / 8 * o.stride + row % 8 * 128 + half * 16;
    uint16_t bits[8];
    memcpy(bits, shared_bytes(cta, swizzled(address), 16, "wgmma"), 16);
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t wide = (uint32_t)bits[i] << 16;
      if ((wide & 0x7fffffff) > 0x7f800000 && !draining())
        fail("a product of CTA %u reads NaN in row %u of an operand: memory nobody filled",
             cta->number, row);
      memcpy(to + (half * 8 + i) * step, &wide, 4);
    }
  }
}
Warp *sibling(Warp &w, uint32_t i) { return &w.cta->warps[w.index / 4 * 4 + i]; }

void multiply(Warp &w, const Product &p) {
  static float a[ROWS][DEPTH], b[DEPTH][COLUMNS], sum[ROWS][COLUMNS];
  const Operand from_a = decode(p.a), from_b = decode(p.b);
  for (uint32_t i = 0; i < ROWS; ++i) read_row(w.cta, from_a, w.index % 4 * 16 + i, a[i], 1);
  for (uint32_t n = 0; n < COLUMNS; ++n) read_row(w.cta, from_b, n, &b[0][n], COLUMNS);
  memset(sum, 0, sizeof sum);
  for (uint32_t i = 0; i < ROWS; ++i)
    for (uint32_t k = 0; k < DEPTH; ++k)
      for (uint32_t n = 0; n < COLUMNS; ++n) sum[i][n] += a[i][k] * b[k][n];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    float *d = p.accumulators[lane];
    for (uint32_t r = 0; r < 128; ++r) {
      const float s = sum[lane / 4 + 8 * (r / 2 % 2)][r / 4 * 8 + lane % 4 * 2 + r % 2];
      d[r] = p.accumulate ? d[r] + s : s;
    }
  }
}
}  // namespace

void start_products(Warp &w) {
  for (uint32_t i = 0; i < 4; ++i) {
    Warp *other = sibling(w, i);
    if (other->core.queue.empty()) continue;
    const Product &mine = w.core.queue.back();
    for (const Product &p : other->core.queue)
      if (p.number == mine.number &&
          (p.a != mine.a || p.b != mine.b || p.accumulate != mine.accumulate))
        fail("warps of a warpgroup give different operands to wgmma");
    add_actor(&other->core);
  }
}

void TensorCore::step() {
  for (uint32_t i = 0; i < 4; ++i)
    if (sibling(*warp, i)->core.issued <= queue.front().number) {
      remove_actor(this);  // start_products comes back
      return;
    }
  multiply(*warp, queue.front());
  queue.pop_front();
  progress();
  if (queue.empty()) remove_actor(this);
  for (Fiber *f : warp->lanes)
    if (!f->done && f->waits_for && f->waits_for[0] == 'w' && f->waits_for[5] == ' ') wake(f);
}

void check_products(Cta *cta, uint32_t from, uint32_t bytes) {
  for (const Warp &w : cta->warps)
    for (const Product &p : w.core.queue) {
      const uint32_t a = (p.a & 0x3fff) << 4 & ~1023u, b = (p.b & 0x3fff) << 4 & ~1023u;
      if ((a < from + bytes && from < a + 8192) || (b < from + bytes && from < b + 32768))
        fail("a load into shared memory at %u, which a product of warp %u has not read", from,
             w.index);
    }
}

}  // namespace emu
