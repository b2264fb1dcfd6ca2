// The state of an emulated GPU: threads that switch by hand, their warps and CTAs, and what is
// on its way through the copy engine and the tensor cores.
//
// One thread of the host runs everything, so no state needs a lock. Whatever can make a step (a
// warp with a thread that is not blocked, a copy on its way, a warp's products) is an Actor in
// one list, and the scheduler draws from it. Memory is sequentially consistent.

#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "include/emulator.hpp"

namespace emu {

struct Cta;
struct Warp;

constexpr uint32_t LOADS = 29, STORES = 30, PRODUCTS = 31;  // roles of actors

struct Actor {
  int place = -1;  // in the list of those that can make a step
  uint32_t priority = 0;
  uint32_t role = 0;  // a warp's index, or LOADS, STORES, PRODUCTS
  virtual void step() = 0;
  virtual ~Actor() = default;
};

// Copies of a thread that were committed together.
struct CopyGroup {
  uint32_t unread = 0, unwritten = 0;
};

struct Fiber {
  void *stack_pointer = nullptr;
  char *stack = nullptr;
  Warp *warp = nullptr;
  Where where{};
  uint32_t lane = 0, thread = 0, number = 0;
  bool done = false;
  const char *waits_for = nullptr;  // in words, null: does not
  uint64_t waits_at = 0;            // an address, or a number that goes with it
  uint32_t wanted = 0;
  const uint32_t *polled = nullptr;
  uint32_t seen = 0;
  std::vector<CopyGroup *> groups;  // committed
  CopyGroup *open = nullptr;
};

enum class Together { none, sync, shuffle, ballot, matrices, fetch, product, commit, drain };
const char *name_of(Together kind);

// What an instruction of the tensor cores is given: descriptors, and which operands lie with K
// outside.
struct Operands {
  uint64_t a, b;
  bool across_a, across_b, accumulate;
  bool operator==(const Operands &) const = default;
};
// One instruction of the tensor cores, for the 16 rows of a warp.
struct Product {
  float *accumulators[32];
  Operands operands;
  uint32_t group;
  uint64_t number;  // of the warpgroup
};
struct TensorCore : Actor {
  Warp *warp = nullptr;
  std::deque<Product> queue;
  uint32_t committed = 0;
  uint64_t issued = 0;
  void step() override;
};

struct Warp : Actor {
  Cta *cta = nullptr;
  uint32_t index = 0, ready = 0;
  uint32_t dirty = 0;  // lanes that wrote shared memory and made no fence since
  Fiber *lanes[32] = {};
  Together kind = Together::none;
  uint32_t arrived = 0;
  uint64_t rounds = 0;
  uint64_t in[32] = {}, out[32] = {};
  uint32_t words[32][4];
  float *accumulators[32];
  TensorCore core;
  void step() override;
};

struct Barrier {
  uint32_t expected = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
};

struct Map {  // what the 128 bytes of a tensor map hold here; tests/support/emulation.py packs them
  uint64_t magic, base, sizes[3], strides[2];
  uint32_t box[3], rank;
};
constexpr uint64_t MAP_MAGIC = 0x6d61702e656d7531;

struct Copy : Actor {
  bool store = false;
  Cta *cta = nullptr;
  Map map{};
  uint32_t shared = 0, barrier = 0, rows = 0, next = 0;
  int x = 0, y = 0, z = 0;
  CopyGroup *group = nullptr;
  Fiber *owner = nullptr;
  std::vector<uint8_t> read;  // a store: what was read of shared memory
  bool whole = false;
  void step() override;
};

struct Kernel {
  std::string name;
  void (*run)(const Launch &);
  void *(*shared_variable)();
  const void *dynamic;
};

struct Running;  // a launch and its CTAs

struct Cta {
  Running *launch = nullptr;
  uint32_t number = 0, alive = 0, threads = 0;
  std::vector<Warp> warps;
  std::vector<Fiber *> fibers;
  std::vector<uint8_t> dynamic, fixed;
  std::unordered_map<uint32_t, Barrier> barriers;
  std::unordered_map<uint32_t, std::vector<Fiber *>> meeting;  // bar.sync by id
  std::vector<Copy *> copies;
};

struct Running {
  Launch launch{};
  const Kernel *kernel = nullptr;
  uint32_t started = 0, finished = 0, copies = 0;  // copies: on their way
  std::vector<Cta *> ctas;
};

struct Region {
  const char *name;
  uint64_t address, bytes;
  std::vector<uint64_t> *writers;  // by 16 bytes: who wrote last, and fences of it then
};

// ---- scheduler.cpp
extern Fiber *current;
uint32_t random_below(uint32_t limit);
void add_actor(Actor *actor);
void remove_actor(Actor *actor);
void block(const char *what, uint64_t at, uint32_t wanted);  // until someone calls wake
void wake(Fiber *fiber);
void progress();  // something changed that others may wait for
bool draining();  // waits were given up: what is read no longer matters, where is
void start_fiber(Fiber *fiber);
void finish_fiber();
void make_current_cta(Cta *cta);
std::string run_to_end(uint64_t seed, bool let_time_pass, uint64_t most_steps);
void take_back_stack(Fiber *fiber);

// ---- launches.cpp
bool start_ctas();        // those that can start; false when all launches are over
void finish_cta(Cta *cta);
std::string describe_waits();
std::pair<uint8_t *, size_t> shared_block(void *variable);
extern std::vector<uint32_t> fences_of;  // by a thread's number

// ---- barriers.cpp
void complete_bytes(Cta &cta, uint32_t address, uint32_t bytes);

// ---- memory.cpp
Region *region_of(uint64_t address, uint64_t bytes);
uint8_t *shared_bytes(Cta *cta, uint32_t address, uint32_t bytes, const char *what);
void check_unread(uint64_t address, uint64_t bytes, const char *by);  // of copies on their way
void set_regions(const char *const *names, const uint64_t *extents, uint32_t count);
std::string describe(uint64_t address);

// ---- copies.cpp
void check_shared_write(Cta *cta, uint32_t from, uint32_t bytes, const char *by);
void check_copies_done(Cta *cta);
bool overlaps_pending_load(Cta *cta, uint32_t from, uint32_t bytes);
extern std::vector<Copy *> loads;  // of all CTAs, on their way
void forget_copies();

// ---- products.cpp
void check_products(Cta *cta, uint32_t from, uint32_t bytes);
void check_filled(Cta *cta, const Operands &operands);  // no load into them is on its way
void start_products(Warp &warp);
// Where the 16 bytes of an address lie: bits 4 to 6 exclusive-or bits 7 to 9.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

}  // namespace emu
