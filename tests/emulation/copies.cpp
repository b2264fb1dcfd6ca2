// The copy engine: boxes of rows of 128 bytes between global memory and swizzled shared memory,
// made at some later time, in pieces.

#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace emu {

std::vector<Copy *> loads;

namespace {
constexpr uint32_t ROW = 128, CHUNK = 16;

bool meets(const Copy &c, uint32_t from, uint32_t bytes) {
  return c.shared < from + bytes && from < c.shared + c.rows * ROW;
}

// How many bytes of 16 of a row lie inside the tensor, and where; a row outside has none.
uint32_t piece(const Copy &c, uint32_t row, uint32_t chunk, uint64_t &address) {
  const Map &m = c.map;
  const int64_t x = (int64_t)c.x + chunk * (CHUNK / 2), y = (int64_t)c.y + row, z = c.z;
  if (x < 0) fail("a copy that begins before its tensor (x = %d)", c.x);
  if (y < 0 || y >= (int64_t)m.sizes[1] || x >= (int64_t)m.sizes[0]) return 0;
  if (m.rank == 3 && (z < 0 || z >= (int64_t)m.sizes[2])) return 0;
  address = m.base + x * 2 + y * m.strides[0] + (m.rank == 3 ? z * m.strides[1] : 0);
  return (uint32_t)std::min<int64_t>(CHUNK, ((int64_t)m.sizes[0] - x) * 2);
}

uint8_t *shared_piece(const Copy &c, uint32_t row, uint32_t chunk) {
  const uint32_t address = swizzled(c.shared + row * ROW + chunk * CHUNK);
  return shared_bytes(c.cta, address, CHUNK, "a copy");
}

void load_row(Copy &c, uint32_t row) {
  for (uint32_t chunk = 0; chunk < ROW / CHUNK; ++chunk) {
    uint64_t from = 0;
    const uint32_t bytes = piece(c, row, chunk, from);
    uint8_t *to = shared_piece(c, row, chunk);
    memset(to, 0, CHUNK);
    if (!bytes) continue;
    const Region *r = region_of(from, bytes);
    if (!r) fail("the copy engine reads %u bytes at %s", bytes, describe(from).c_str());
    if (r->writers) {
      const uint64_t writer = (*r->writers)[(from - r->address) / 16];
      if (writer && !draining() && fences_of[writer >> 32] == (uint32_t)writer)
        fail("the copy engine reads %s, whose writer has made no proxy fence",
             describe(from).c_str());
    }
    memcpy(to, (const void *)from, bytes);
  }
}
void read_row(Copy &c, uint32_t row) {
  for (uint32_t chunk = 0; chunk < ROW / CHUNK; ++chunk)
    memcpy(c.read.data() + row * ROW + chunk * CHUNK, shared_piece(c, row, chunk), CHUNK);
}
void store_row(Copy &c, uint32_t row) {
  for (uint32_t chunk = 0; chunk < ROW / CHUNK; ++chunk) {
    uint64_t to = 0;
    const uint32_t bytes = piece(c, row, chunk, to);
    if (!bytes) continue;
    if (!region_of(to, bytes))
      fail("the copy engine writes %u bytes at %s", bytes, describe(to).c_str());
    check_unread(to, bytes, "a copy");
    memcpy((void *)to, c.read.data() + row * ROW + chunk * CHUNK, bytes);
  }
}

Copy *make(const void *map, uint32_t rank, uint32_t shared, int x, int y, int z) {
  Copy *c = new Copy;
  memcpy(&c->map, map, sizeof c->map);
  const Map &m = c->map;
  if (m.magic != MAP_MAGIC) fail("a copy by a tensor map that was never filled");
  if (m.rank != rank) fail("a copy in %u dimensions by a map of %u", rank, m.rank);
  if (m.box[0] * 2 != ROW || (m.rank == 3 && m.box[2] != 1))
    fail("a box of %u x %u x %u; the emulator copies rows of 64", m.box[0], m.box[1], m.box[2]);
  if (shared % ROW) fail("a copy at shared address %u, which is no multiple of 128", shared);
  c->cta = current->warp->cta;
  c->owner = current;
  c->shared = shared, c->rows = m.box[1];
  c->x = x, c->y = y, c->z = z;
  shared_bytes(c->cta, shared, c->rows * ROW, "a copy");
  c->cta->copies.push_back(c);
  ++c->cta->launch->copies;
  return c;
}
void finish(Copy *c) {
  auto &copies = c->cta->copies;
  copies.erase(std::find(copies.begin(), copies.end(), c));
  --c->cta->launch->copies;
  remove_actor(c);
  progress();
  delete c;
}
void wake_owner(Fiber *owner) {
  if (!owner->done && owner->waits_for && owner->waits_for[0] == 'c') wake(owner);
}
}  // namespace

void Copy::step() {
  const uint32_t count = random_below(2) ? rows - next : 1 + random_below(rows - next);
  if (!store) {
    for (uint32_t i = 0; i < count; ++i) load_row(*this, next++);
    if (next < rows) return;
    loads.erase(std::find(loads.begin(), loads.end(), this));
    Cta *owner = cta;
    const uint32_t at = barrier, bytes = rows * ROW;  // also what lies outside counts
    finish(this);
    complete_bytes(*owner, at, bytes);
    return;
  }
  Fiber *mine = owner;
  if (!whole) {
    for (uint32_t i = 0; i < count; ++i) read_row(*this, next++);
    if (next < rows) return;
    whole = true, next = 0;
    --group->unread;
    progress();
  } else {
    for (uint32_t i = 0; i < count; ++i) store_row(*this, next++);
    if (next < rows) return;
    --group->unwritten;
    finish(this);
  }
  wake_owner(mine);
}

void tma_load(uint32_t rank, uint32_t to, const void *map, uint32_t barrier, int x, int y, int z) {
  maybe_yield(8);
  Copy *c = make(map, rank, to, x, y, z);
  c->barrier = barrier;
  c->role = LOADS;
  for (const Copy *other : c->cta->copies)
    if (other != c && !other->whole && meets(*other, to, c->rows * ROW))
      fail("a load into shared memory at %u, where another copy is on its way", to);
  check_products(c->cta, to, c->rows * ROW);
  loads.push_back(c);
  add_actor(c);
  progress();
}
void tma_store(uint32_t rank, const void *map, uint32_t from, int x, int y, int z) {
  maybe_yield(8);
  if (current->warp->dirty)
    fail("a store of shared memory that lanes %08x wrote without a proxy fence",
         current->warp->dirty);
  Copy *c = make(map, rank, from, x, y, z);
  c->store = true;
  c->role = STORES;
  c->read.resize(c->rows * ROW);
  if (!current->open) current->open = new CopyGroup;
  c->group = current->open;
  ++c->group->unread, ++c->group->unwritten;
  add_actor(c);
  progress();
}
void tma_commit() {
  if (!current->open) current->open = new CopyGroup;
  current->groups.push_back(current->open);
  current->open = nullptr;
}
void tma_wait(uint32_t pending, bool only_reads) {
  maybe_yield(8);
  auto &groups = current->groups;
  const size_t count = groups.size() > pending ? groups.size() - pending : 0;
  for (size_t i = 0; i < count; ++i)
    while (only_reads ? groups[i]->unread : groups[i]->unwritten)
      block("copies", only_reads, pending);
  while (!groups.empty() && !groups[0]->unwritten) {
    delete groups[0];
    groups.erase(groups.begin());
  }
}

void check_shared_write(Cta *cta, uint32_t from, uint32_t bytes, const char *by) {
  for (const Copy *c : cta->copies)
    if (!c->whole && meets(*c, from, bytes))
      fail("%s writes shared memory at %u, where a %s is on its way", by, from,
           c->store ? "store" : "load");
}
bool overlaps_pending_load(Cta *cta, uint32_t from, uint32_t bytes) {
  for (const Copy *c : cta->copies)
    if (!c->store && meets(*c, from, bytes)) return true;
  return false;
}
void check_copies_done(Cta *cta) {
  for (const Copy *c : cta->copies)
    if (!c->whole) fail("a CTA ends while a %s of its is on its way", c->store ? "store" : "load");
}
// Rows that loads on their way still have to read must not be written. Weights (3-D) never are.
void check_unread(uint64_t address, uint64_t bytes, const char *by) {
  if (draining()) return;
  for (const Copy *c : loads) {
    const Map &m = c->map;
    if (m.rank != 2 || address + bytes <= m.base) continue;
    const uint64_t offset = address - m.base, row = offset / m.strides[0];
    const uint64_t column = offset % m.strides[0] / 2;
    const uint64_t first = (uint64_t)c->y + c->next, end = (uint64_t)c->y + c->rows;
    if (row < m.sizes[1] && row >= first && row < end && column < (uint64_t)c->x + 64 &&
        column + bytes / 2 > (uint64_t)c->x)
      fail("%s writes %s while a load has not read it", by, describe(address).c_str());
  }
}
void forget_copies() { loads.clear(); }

}  // namespace emu
