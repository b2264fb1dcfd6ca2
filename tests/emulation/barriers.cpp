// Where threads meet: a warp's common instructions, bar.sync, and barriers in shared memory.

#include <cstring>

#include "machine.hpp"

namespace emu {

namespace {
// All 32 lanes give `value`; the last one calls `act`; each goes on afterwards.
template <class F> void together(Together kind, uint64_t value, F act) {
  Fiber *f = current;
  Warp &w = *f->warp;
  if (w.arrived == 0) w.kind = kind;
  if (w.kind != kind)
    fail("lanes of a warp differ: some are at %s, some at %s", name_of(w.kind), name_of(kind));
  w.in[f->lane] = value;
  w.arrived |= 1u << f->lane;
  if (w.arrived != ~0u) {
    const uint64_t round = w.rounds;
    while (w.rounds == round) block(name_of(kind), w.arrived, 0);
    return;
  }
  act(w);
  w.arrived = 0;
  ++w.rounds;
  progress();
  for (Fiber *other : w.lanes)
    if (other != f) wake(other);
}
}  // namespace

uint32_t lane() { return current->lane; }
void sync_warp() {
  together(Together::sync, 0, [](Warp &) {});
}
uint64_t shuffle64(uint64_t value, uint32_t source) {
  Fiber *f = current;
  together(Together::shuffle, value, [](Warp &w) { memcpy(w.out, w.in, sizeof w.in); });
  return f->warp->out[source];
}
uint32_t shuffle(uint32_t value, uint32_t source) { return (uint32_t)shuffle64(value, source); }
uint32_t shuffle_up(uint32_t value, uint32_t distance) {
  const uint32_t lane = current->lane;
  return shuffle(value, lane < distance ? lane : lane - distance);
}
uint32_t ballot(bool value) {
  Fiber *f = current;
  together(Together::ballot, value, [](Warp &w) {
    uint64_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= w.in[i] << i;
    w.out[0] = bits;
  });
  return (uint32_t)f->warp->out[0];
}

// Matrix i of 8 rows x 16 bytes: rows' addresses from lanes 8 i .. 8 i + 7; lane l holds 4 bytes
// of row l / 4 from byte 4 (l % 4) on.
void store_matrices(uint32_t to, const uint32_t (&words)[4]) {
  Fiber *f = current;
  memcpy(f->warp->words[f->lane], words, sizeof words);
  together(Together::matrices, to, [](Warp &w) {
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t address = (uint32_t)w.in[i], matrix = i / 8, row = i % 8;
      if (address % 16) fail("stmatrix to address %u, which is no multiple of 16", address);
      check_shared_write(w.cta, address, 16, "stmatrix");
      uint8_t *bytes = shared_bytes(w.cta, address, 16, "stmatrix");
      for (uint32_t part = 0; part < 4; ++part)
        memcpy(bytes + 4 * part, &w.words[row * 4 + part][matrix], 4);
    }
    w.dirty = ~0u;
  });
}
// The other way round: every lane gets what store_matrices takes of it.
void load_matrices(uint32_t from, uint32_t (&words)[4]) {
  Fiber *f = current;
  together(Together::fetch, from, [](Warp &w) {
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t address = (uint32_t)w.in[i], matrix = i / 8, row = i % 8;
      if (address % 16) fail("ldmatrix from address %u, which is no multiple of 16", address);
      if (overlaps_pending_load(w.cta, address, 16))
        fail("ldmatrix reads shared memory at %u, which a load has not filled yet", address);
      const uint8_t *bytes = shared_bytes(w.cta, address, 16, "ldmatrix");
      for (uint32_t part = 0; part < 4; ++part)
        memcpy(&w.words[row * 4 + part][matrix], bytes + 4 * part, 4);
    }
  });
  memcpy(words, f->warp->words[f->lane], sizeof words);
}
void wgmma(float *accumulator, uint64_t a, uint64_t b, bool accumulate, bool across_a,
           bool across_b) {
  Fiber *f = current;
  f->warp->accumulators[f->lane] = accumulator;
  const Operands given = {a, b, across_a, across_b, accumulate};
  const uint64_t all = a * 0x9E3779B97F4A7C15ull ^ b * 31 ^
                       (uint64_t)(accumulate + 2 * across_a + 4 * across_b);
  together(Together::product, all, [&given](Warp &w) {
    for (uint32_t i = 1; i < 32; ++i)
      if (w.in[i] != w.in[0]) fail("lanes of a warp give different operands to wgmma");
    TensorCore &core = w.core;
    Product p{{}, given, core.committed, core.issued++};
    memcpy(p.accumulators, w.accumulators, sizeof p.accumulators);
    check_filled(w.cta, given);
    if (!given.accumulate)
      for (float *d : p.accumulators)
        for (int i = 0; i < 128; ++i) d[i] = __builtin_nanf("");
    core.queue.push_back(p);
    start_products(w);
  });
}
void wgmma_commit() {
  together(Together::commit, 0, [](Warp &w) { ++w.core.committed; });
}
void wgmma_wait(uint32_t pending) {
  Fiber *f = current;
  together(Together::drain, pending, [](Warp &) {});
  TensorCore &core = f->warp->core;
  // groups complete in order; one that was not committed is not waited for
  while (!core.queue.empty() && core.queue.front().group + pending < core.committed)
    block("wgmma products", 0, pending);
}

void bar_sync(uint32_t id, uint32_t threads) {
  Fiber *f = current;
  Cta &cta = *f->warp->cta;
  auto &here = cta.meeting[id];
  here.push_back(f);
  const uint32_t wanted = threads ? threads : cta.threads;
  if (here.size() < wanted) {
    block("bar.sync", id, wanted);
    return;
  }
  const auto fibers = std::move(here);
  here.clear();
  progress();
  for (Fiber *other : fibers)
    if (other != f) wake(other);
}

// ---- mbarrier -----------------------------------------------------------------------------------

namespace {
Barrier &barrier_at(Cta &cta, uint32_t address) {
  const auto found = cta.barriers.find(address);
  if (found == cta.barriers.end()) fail("no barrier was initialised at shared address %u", address);
  return found->second;
}
void complete_if_whole(Cta &cta, uint32_t address, Barrier &b) {
  if (b.pending || b.bytes) return;
  ++b.phase;
  b.pending = b.expected;
  progress();
  for (Fiber *f : cta.fibers)
    if (!f->done && f->waits_for && f->waits_at == address && f->waits_for[0] == 'm') wake(f);
}
}  // namespace

void barrier_init(uint32_t address, uint32_t arrivals) {
  Cta &cta = *current->warp->cta;
  if (address % 8) fail("a barrier at shared address %u, which is no multiple of 8", address);
  cta.barriers[address] = {arrivals, arrivals, 0, 0};
}
// The phase ends when nobody is missing and all bytes are there.
void barrier_arrive(uint32_t address, uint32_t bytes) {
  maybe_yield(8);
  Cta &cta = *current->warp->cta;
  Barrier &b = barrier_at(cta, address);
  if (b.pending == 0) fail("an arrival too many at barrier %u of %u arrivals", address, b.expected);
  --b.pending;
  b.bytes += bytes;
  progress();
  complete_if_whole(cta, address, b);
}
void complete_bytes(Cta &cta, uint32_t address, uint32_t bytes) {
  Barrier &b = barrier_at(cta, address);
  b.bytes -= bytes;
  if (b.bytes < -(1 << 20)) fail("barrier %u: bytes were copied that nobody expects", address);
  progress();
  complete_if_whole(cta, address, b);
}
bool barrier_done(uint32_t address, uint32_t parity) {
  return (barrier_at(*current->warp->cta, address).phase & 1) != (parity & 1);
}
void barrier_wait(uint32_t address, uint32_t parity) {
  maybe_yield(8);
  while (!barrier_done(address, parity)) block("mbarrier", address, parity);
}

}  // namespace emu
