// The kernel that enters a backward launch; a unit of its own, since it shares names with others.

#include "device.hpp"

static thread_local unsigned char shared_start[16];

#include "moe/enter_backward.cu"

static void run_enter(const emu::Launch &l) {
  enter_backward(*(const Rank *)l.one, (const Rank *)l.many, *(const Gradient *)l.grad,
                 (const Gradient *)l.grads);
}
static void *shared_variable() { return shared_start; }
__attribute__((constructor)) static void announce_kernels() {
  emu::add_kernel("enter_backward", run_enter, shared_variable, nullptr);
}
