// Global memory in named regions: no access reaches beyond one, and none that the copy engine still
// has to make is overtaken by a write.

#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace emu {

namespace {
std::vector<Region> regions;  // by address
}

void set_regions(const char *const *names, const uint64_t *extents, uint32_t count) {
  for (Region &region : regions) delete region.writers;
  regions.clear();
  for (uint32_t i = 0; i < count; ++i)
    regions.push_back({names[i], extents[2 * i], extents[2 * i + 1], nullptr});
  std::sort(regions.begin(), regions.end(),
            [](const Region &a, const Region &b) { return a.address < b.address; });
}

Region *region_of(uint64_t address, uint64_t bytes) {
  auto next = std::upper_bound(regions.begin(), regions.end(), address,
                               [](uint64_t a, const Region &r) { return a < r.address; });
  if (next == regions.begin()) return nullptr;
  Region &r = *--next;
  return address + bytes <= r.address + r.bytes ? &r : nullptr;
}

std::string describe(uint64_t address) {
  const Region *r = region_of(address, 1);
  char text[160];
  if (r)
    snprintf(text, sizeof text, "%s + %llu", r->name, (unsigned long long)(address - r->address));
  else snprintf(text, sizeof text, "%#llx, in no region", (unsigned long long)address);
  return text;
}

void check_global(const void *address, uint32_t bytes, const char *what) {
  if (!region_of((uint64_t)address, bytes))
    fail("%s of %u bytes at %s", what, bytes, describe((uint64_t)address).c_str());
}

uint32_t poll(const uint32_t *word) {
  maybe_yield(4);
  check_global(word, 4, "a load");
  current->polled = word;
  return current->seen = *word;
}
uint32_t exchange_add(uint32_t *word, uint32_t value) {
  maybe_yield(4);
  check_global(word, 4, "an atomic addition");
  const uint32_t old = *word;
  *word = old + value;
  changed(word);
  return old;
}
void store_word(uint32_t *word, uint32_t value) {
  maybe_yield(4);
  check_global(word, 4, "a store");
  *word = value;
  changed(word);
}

void read_global(const void *from, void *to, uint32_t bytes) {
  maybe_yield(32);
  check_global(from, bytes, "a load");
  memcpy(to, from, bytes);
}
void write_global(void *to, const void *from, uint32_t bytes) {
  maybe_yield(32);
  const uint64_t address = (uint64_t)to;
  Region *r = region_of(address, bytes);
  if (!r) fail("a store of %u bytes at %s", bytes, describe(address).c_str());
  check_unread(address, bytes, "a store");
  if (!r->writers) r->writers = new std::vector<uint64_t>(r->bytes / 16 + 1);
  (*r->writers)[(address - r->address) / 16] =
      (uint64_t)current->number << 32 | fences_of[current->number];
  memcpy(to, from, bytes);
}
void proxy_fence() {
  maybe_yield(8);
  ++fences_of[current->number];
  current->warp->dirty &= ~(1u << current->lane);
}

uint8_t *shared_bytes(Cta *cta, uint32_t address, uint32_t bytes, const char *what) {
  if (address < DYNAMIC_BASE || address + bytes > DYNAMIC_BASE + cta->dynamic.size())
    fail("%s of %u bytes at shared address %u; dynamic memory is %u to %zu", what, bytes, address,
         DYNAMIC_BASE, DYNAMIC_BASE + cta->dynamic.size());
  return cta->dynamic.data() + (address - DYNAMIC_BASE);
}
void read_shared(uint32_t from, void *to, uint32_t bytes) {
  Cta *cta = current->warp->cta;
  if (overlaps_pending_load(cta, from, bytes))
    fail("a thread reads shared memory at %u, which a load has not filled yet", from);
  memcpy(to, shared_bytes(cta, from, bytes, "a load"), bytes);
}
void write_shared(uint32_t to, const void *from, uint32_t bytes) {
  maybe_yield(8);
  Cta *cta = current->warp->cta;
  if (to % bytes) fail("a store of %u bytes at shared address %u", bytes, to);
  check_shared_write(cta, to, bytes, "a store");
  memcpy(shared_bytes(cta, to, bytes, "a store"), from, bytes);
  current->warp->dirty |= 1u << current->lane;
}
uint32_t shared_address(const void *pointer) {
  const Kernel &kernel = *current->warp->cta->launch->kernel;
  if (pointer == kernel.dynamic) return DYNAMIC_BASE;
  const auto [base, size] = shared_block(kernel.shared_variable());
  const uint64_t offset = (const uint8_t *)pointer - base;
  if (offset >= size || offset >= DYNAMIC_BASE) fail("%p is not in shared memory", pointer);
  return (uint32_t)offset;
}

}  // namespace emu
