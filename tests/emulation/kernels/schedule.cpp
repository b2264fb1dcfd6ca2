// The kernels before `forward`, as functions of the emulator.

#include "device.hpp"

static thread_local unsigned char shared_start[16];

#include "moe/schedule.cu"

extern "C" void enter(const Rank one, const Rank *many);

static void run_publish(const emu::Launch &l) {
  publish(*(const Rank *)l.one, (const Rank *)l.many, (const long long *)l.ids,
          (const long long *const *)l.ids_many);
}
template <void (*KERNEL)(Rank, const Rank *)> static void run(const emu::Launch &l) {
  KERNEL(*(const Rank *)l.one, (const Rank *)l.many);
}
static void *shared_variable() { return shared_start; }
__attribute__((constructor)) static void announce_kernels() {
  emu::add_kernel("publish", run_publish, shared_variable, nullptr);
  emu::add_kernel("count", run<count>, shared_variable, nullptr);
  emu::add_kernel("scan", run<scan>, shared_variable, nullptr);
  emu::add_kernel("place", run<place>, shared_variable, nullptr);
  emu::add_kernel("enter", run<enter>, shared_variable, nullptr);
}
