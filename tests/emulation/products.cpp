// The tensor cores: products that are carried out some time between their issue and the wait for
// them.
//
// d [64, 256] += A [64, 16] B^T [256, 16], bf16 in swizzled shared memory, fp32. A warp has 16
// rows: register 4 j + r of a lane is column 8 j + 2 (lane % 4) + r % 2 of row lane / 4 + 8 (r /
// 2). All four warps of a warpgroup must have issued a product before it can start.
//
// An operand has rows of A or B as "lines". With K innermost a line's 64 values of K are 128 bytes;
// 8 lines are an atom of 1024 bytes, the next atom is `stride` further. Across, 64 lines of one k
// are 128 bytes; 8 of k are an atom, the next 8 are `stride` further, the next 64 lines `leading`.

#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace emu {

namespace {
constexpr uint32_t ROWS = 16, COLUMNS = 256, DEPTH = 16, ATOM = 1024;
constexpr uint32_t NO_LEADING = 16;  // what ptx.cuh's operand() says where there is none

struct Operand {
  uint32_t start, leading, stride, lines;
  bool across;
};
Operand decode(uint64_t descriptor, bool across, uint32_t lines) {
  const Operand o = {(uint32_t)(descriptor & 0x3fff) << 4,
                     (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                     (uint32_t)(descriptor >> 32 & 0x3fff) << 4, lines, across};
  if (descriptor >> 62 != 1 || descriptor >> 49 & 7)
    fail("a descriptor without 128-byte swizzle, or with an offset of its base: %llx",
         (unsigned long long)descriptor);
  if (across ? o.leading == NO_LEADING || o.leading % ATOM : o.leading != NO_LEADING)
    fail("an operand %s with a leading offset of %u bytes",
         across ? "with K outside" : "with K innermost", o.leading);
  if (o.stride % ATOM || (across && o.start % ATOM))
    fail("an operand at %u with a stride of %u bytes: atoms have %u", o.start, o.stride, ATOM);
  return o;
}
Operand a_of(const Operands &o) { return decode(o.a, o.across_a, 64); }
Operand b_of(const Operands &o) { return decode(o.b, o.across_b, COLUMNS); }

// Calls with every piece of at most ATOM bytes that a product reads, whole rows of 128 bytes.
template <class F> void for_pieces(const Operand &o, F act) {
  if (!o.across) {
    for (uint32_t i = 0; i < o.lines / 8; ++i) act((o.start & ~(ATOM - 1)) + i * o.stride, ATOM);
    return;
  }
  for (uint32_t i = 0; i < o.lines / 64; ++i)
    for (uint32_t k = 0; k < DEPTH / 8; ++k) act(o.start + i * o.leading + k * o.stride, ATOM);
}
template <class F> void for_pieces(const Operands &operands, F act) {
  for_pieces(a_of(operands), act);
  for_pieces(b_of(operands), act);
}

// 8 values that lie together, as floats. Tests poison memory with NaN and give none.
void read_8(Cta *cta, uint32_t address, float *to, uint32_t step, uint32_t line, uint32_t k) {
  uint16_t bits[8];
  memcpy(bits, shared_bytes(cta, swizzled(address), 16, "wgmma"), 16);
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t wide = (uint32_t)bits[i] << 16;
    if ((wide & 0x7fffffff) > 0x7f800000 && !draining())
      fail("a product of CTA %u reads NaN in row %u, k %u of an operand: memory nobody filled",
           cta->number, line, k);
    memcpy(to + i * step, &wide, 4);
  }
}
// Lines [first, first + count) into to[line * by_line + k * by_k].
void read_lines(Cta *cta, const Operand &o, uint32_t first, uint32_t count, float *to,
                uint32_t by_line, uint32_t by_k) {
  if (!o.across) {
    for (uint32_t i = 0; i < count; ++i)
      for (uint32_t k = 0; k < DEPTH; k += 8) {
        const uint32_t line = first + i;
        const uint32_t address = o.start + line / 8 * o.stride + line % 8 * 128 + k * 2;
        read_8(cta, address, to + i * by_line + k * by_k, by_k, line, k);
      }
    return;
  }
  for (uint32_t k = 0; k < DEPTH; ++k)
    for (uint32_t i = 0; i < count; i += 8) {
      const uint32_t line = first + i;
      const uint32_t address =
          o.start + line / 64 * o.leading + line % 64 * 2 + k / 8 * o.stride + k % 8 * 128;
      read_8(cta, address, to + i * by_line + k * by_k, by_line, line, k);
    }
}
Warp *sibling(Warp &w, uint32_t i) { return &w.cta->warps[w.index / 4 * 4 + i]; }

// The machine's time is spent here; the rest is compiled for the compiler's time.
__attribute__((optimize("O3"))) void multiply(Warp &w, const Product &p) {
  static float a[ROWS][DEPTH], b[DEPTH][COLUMNS], sum[ROWS][COLUMNS];
  read_lines(w.cta, a_of(p.operands), w.index % 4 * 16, ROWS, a[0], DEPTH, 1);
  read_lines(w.cta, b_of(p.operands), 0, COLUMNS, b[0], 1, COLUMNS);
  memset(sum, 0, sizeof sum);
  for (uint32_t i = 0; i < ROWS; ++i)
    for (uint32_t k = 0; k < DEPTH; ++k)
      for (uint32_t n = 0; n < COLUMNS; ++n) sum[i][n] += a[i][k] * b[k][n];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    float *d = p.accumulators[lane];
    for (uint32_t r = 0; r < 128; ++r) {
      const float s = sum[lane / 4 + 8 * (r / 2 % 2)][r / 4 * 8 + lane % 4 * 2 + r % 2];
      d[r] = p.operands.accumulate ? d[r] + s : s;
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
      if (p.number == mine.number && !(p.operands == mine.operands))
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

void check_filled(Cta *cta, const Operands &operands) {
  for_pieces(operands, [cta](uint32_t from, uint32_t bytes) {
    if (overlaps_pending_load(cta, from, bytes))
      fail("wgmma reads shared memory at %u, which a load has not filled yet", from);
  });
}

void check_products(Cta *cta, uint32_t from, uint32_t bytes) {
  for (const Warp &w : cta->warps)
    for (const Product &p : w.core.queue)
      for_pieces(p.operands, [&](uint32_t piece, uint32_t size) {
        if (piece < from + bytes && from < piece + size)
          fail("a load into shared memory at %u, which a product of warp %u has not read", from,
               w.index);
      });
}

}  // namespace emu
