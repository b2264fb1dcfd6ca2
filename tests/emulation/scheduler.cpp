// Threads that switch by hand, and who runs next.
//
// A step is drawn from all actors: of a few drawn at random the one with the highest priority.
// Priorities are random and change now and then, and in some runs one role or one kind of work
// is slow throughout, so that it falls far behind or others run far ahead, which a fair draw
// would never show.

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "machine.hpp"

#if !defined(__x86_64__) || defined(EMULATION_UCONTEXT)
#include <ucontext.h>
#endif

namespace emu {

Where *where;
Fiber *current;

namespace {
constexpr size_t STACK = 64 * 1024;
constexpr uint64_t CANARY = 0x5afe57acc0ffee11;

std::vector<Actor *> actors;
std::vector<char *> spare_stacks;
std::unordered_map<const uint32_t *, std::vector<Fiber *>> pollers;
uint64_t random_state, steps, jumped, changes, looked;
uint32_t tournament = 1, constancy = 64;
uint32_t slow;  // roles of actors that rarely run while others can, as bits
bool hurry;  // time passes quickly: waits with a time limit end
Cta *current_cta;
std::string failure;

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
void *main_pointer;
extern "C" void emulator_switch(void **from, void *to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
void to_fiber(Fiber *f) { emulator_switch(&main_pointer, f->stack_pointer); }
void to_main(Fiber *f) { emulator_switch(&f->stack_pointer, main_pointer); }
void enter_fiber();
void prepare(Fiber *f) {
  auto *top = (uint64_t *)(f->stack + STACK);
  *--top = 0;                     // keeps the stack aligned as after a call
  *--top = (uint64_t)enter_fiber; // where the switch returns to
  for (int i = 0; i < 6; ++i) *--top = 0;
  f->stack_pointer = top;
}
#else
ucontext_t main_context;
void to_fiber(Fiber *f) { swapcontext(&main_context, (ucontext_t *)f->stack_pointer); }
void to_main(Fiber *f) { swapcontext((ucontext_t *)f->stack_pointer, &main_context); }
void enter_fiber();
void prepare(Fiber *f) {
  auto *context = (ucontext_t *)(f->stack + 64);
  getcontext(context);
  context->uc_stack.ss_sp = f->stack + 4096;
  context->uc_stack.ss_size = STACK - 4096;
  context->uc_link = nullptr;
  makecontext(context, enter_fiber, 0);
  f->stack_pointer = context;
}
#endif

void forget_actors() {
  for (Actor *actor : actors) actor->place = -1;
  actors.clear();
}

Actor *choose() {
  const uint32_t count = (uint32_t)actors.size();
  Actor *best = actors[random_below(count)];
  for (int i = 0; i < 32 && slow >> best->role & 1; ++i) best = actors[random_below(count)];
  for (uint32_t i = 1; i < tournament; ++i) {
    Actor *other = actors[random_below(count)];
    if (other->priority > best->priority && !(slow >> other->role & 1)) best = other;
  }
  if (random_below(constancy) == 0) actors[random_below(count)]->priority = random_below(1u << 30);
  return best;
}

// Everybody who polls looks again. False if that changed nothing: then nobody can ever go on.
bool wake_pollers() {
  if (looked == changes + 1) return false;
  looked = changes + 1;
  auto waiting = std::move(pollers);
  pollers.clear();
  for (auto &[word, fibers] : waiting)
    for (Fiber *fiber : fibers) wake(fiber);
  return !waiting.empty();
}
}  // namespace

uint32_t random_below(uint32_t limit) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)((random_state >> 11) % limit);
}

void add_actor(Actor *actor) {
  if (actor->place >= 0) return;
  if (actor->priority == 0) actor->priority = random_below(1u << 30);
  actor->place = (int)actors.size();
  actors.push_back(actor);
}

void remove_actor(Actor *actor) {
  if (actor->place < 0) return;
  Actor *last = actors.back();
  actors[actor->place] = last;
  last->place = actor->place;
  actors.pop_back();
  actor->place = -1;
}

void fail(const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  failure = text;
  if (current) {
    const Fiber &f = *current;
    snprintf(text, sizeof text, " [%s, CTA (%u, %u), warp %u, lane %u]",
             f.warp->cta->launch->kernel->name.c_str(), f.where.block.x, f.where.block.y,
             f.warp->index, f.lane);
    failure += text;
    to_main(current);
  }
  throw 1;  // outside of threads: the loop's frame catches it
}

void maybe_yield(uint32_t one_in) {
  if (random_below(one_in) == 0) to_main(current);
}
uint64_t now() {
  if (hurry) jumped += 1ull << 28;  // a quarter of a second between two looks at the clock
  return steps * 10 + jumped;
}

void block(const char *what, uint64_t at, uint32_t wanted) {
  Fiber *f = current;
  f->waits_for = what, f->waits_at = at, f->wanted = wanted;
  f->warp->ready &= ~(1u << f->lane);
  if (f->warp->ready == 0) remove_actor(f->warp);
  to_main(f);
}
void wake(Fiber *fiber) {
  fiber->waits_for = nullptr;
  fiber->warp->ready |= 1u << fiber->lane;
  add_actor(fiber->warp);
}
void progress() { ++changes; }
bool draining() { return hurry; }

void pause() {
  Fiber *f = current;
  if (hurry || !f->polled || *f->polled != f->seen) {
    to_main(f);
    return;
  }
  pollers[f->polled].push_back(f);
  block("a word", (uint64_t)f->polled, f->seen);
}
void changed(const uint32_t *word) {
  progress();
  if (pollers.empty()) return;
  const auto found = pollers.find(word);
  if (found == pollers.end()) return;
  const auto fibers = std::move(found->second);
  pollers.erase(found);
  for (Fiber *fiber : fibers) wake(fiber);
}

void make_current_cta(Cta *cta) {
  if (current_cta == cta) return;
  // static shared memory of each library lies in one block; the CTA that ran there last owns it
  static std::unordered_map<void *, Cta *> owners;
  current_cta = cta;
  if (!cta) {
    owners.clear();
    return;
  }
  void *memory = cta->launch->kernel->shared_variable();
  const auto [base, size] = shared_block(memory);
  Cta *&owner = owners[base];
  if (owner == cta) return;
  if (owner) memcpy(owner->fixed.data(), base, size);
  if (cta->fixed.empty()) cta->fixed.assign(size, 0xff);
  memcpy(base, cta->fixed.data(), size);
  owner = cta;
}

void start_fiber(Fiber *fiber) {
  if (spare_stacks.empty()) {
    char *const memory = (char *)mmap(nullptr, STACK * 64, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for stacks");
    for (int i = 0; i < 64; ++i) spare_stacks.push_back(memory + STACK * i);
  }
  fiber->stack = spare_stacks.back();
  spare_stacks.pop_back();
  memcpy(fiber->stack, &CANARY, sizeof CANARY);
  prepare(fiber);
  wake(fiber);
}

namespace {
void enter_fiber() {
  Fiber *self = current;
  self->warp->cta->launch->kernel->run(self->warp->cta->launch->launch);
  self->done = true;
  self->warp->ready &= ~(1u << self->lane);
  if (self->warp->ready == 0) remove_actor(self->warp);
  if (self->open) fail("a thread ends with copies that it did not commit");
  progress();
  to_main(self);
}

void run_fiber(Fiber *f) {
  make_current_cta(f->warp->cta);
  current = f;
  where = &f->where;
  to_fiber(f);
  current = nullptr;
  if (memcmp(f->stack, &CANARY, sizeof CANARY) != 0) fail("a thread's stack is too small");
  if (failure.empty() && f->done) {
    spare_stacks.push_back(f->stack);
    f->stack = nullptr;
    Cta *cta = f->warp->cta;
    if (--cta->alive == 0) finish_cta(cta);
  }
}
}  // namespace

void Warp::step() {
  const uint32_t start = random_below(32), all = ready;
  const bool single = random_below(4) == 0;
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t lane = (start + i) % 32;
    if (!(all >> lane & 1)) continue;
    Cta *const before = cta;
    const bool last = before->alive == 1;
    run_fiber(lanes[lane]);
    if (!failure.empty() || single || last) return;  // a CTA that ended is gone
  }
}

const char *name_of(Together kind) {
  switch (kind) {
    case Together::sync: return "__syncwarp";
    case Together::shuffle: return "a shuffle";
    case Together::ballot: return "a ballot";
    case Together::matrices: return "stmatrix";
    case Together::fetch: return "ldmatrix";
    case Together::product: return "wgmma";
    case Together::commit: return "wgmma.commit";
    case Together::drain: return "wgmma.wait";
    default: return "nothing";
  }
}

// Runs until all launches are over. Empty, or what went wrong.
std::string run_to_end(uint64_t seed, bool let_time_pass, uint64_t most_steps) {
  random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  for (int i = 0; i < 8; ++i) random_below(2);
  static const uint32_t sizes[] = {1, 2, 4, 16, 64}, times[] = {64, 1024, 16384};
  tournament = sizes[random_below(5)];
  constancy = times[random_below(3)];
  // none, one of everything, or a role: warps 1 to 3, 4 to 7, 8 to 11
  static const uint32_t roles[] = {0xe, 0xf0, 0xf00};
  const uint32_t choice = random_below(4);
  slow = choice == 0 ? 0 : choice == 1 ? roles[random_below(3)] : 1u << random_below(32);
  if (choice == 3) slow = 1u << (LOADS + random_below(3));
  steps = jumped = changes = looked = 0;
  hurry = false;
  failure.clear();
  pollers.clear();
  forget_actors();
  try {
    for (;;) {
      if (random_below(16) == 0 || actors.empty())
        if (!start_ctas()) break;
      if (actors.empty()) {
        if (wake_pollers()) continue;
        if (!let_time_pass || hurry) {
          failure = "deadlock: nobody can go on.\n" + describe_waits();
          break;
        }
        hurry = true;
        changes += 2;
        continue;
      }
      choose()->step();
      if (!failure.empty()) break;
      if (++steps > most_steps) {
        failure = "no end after " + std::to_string(most_steps) + " steps.\n" + describe_waits();
        break;
      }
    }
  } catch (int) {
  }
  forget_actors();
  pollers.clear();
  current = nullptr;
  make_current_cta(nullptr);
  return failure;
}

void take_back_stack(Fiber *fiber) {
  if (fiber->stack) spare_stacks.push_back(fiber->stack);
}

}  // namespace emu
