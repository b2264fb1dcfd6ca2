// The backward kernel of several ranks in one launch, as a function of the emulator.

#include "device.hpp"

thread_local unsigned char raw[16];  // stands for dynamic shared memory

#define GROUP 1
#include "moe/backward.cu"

static void run_group(const emu::Launch &l) {
  backward(*(const Rank *)l.one, *(const Gradient *)l.grad, (const Rank *)l.many,
           (const Gradient *)l.grads, l.ranks_here);
}
static void *shared_variable() { return raw; }
__attribute__((constructor)) static void announce_kernels() {
  emu::add_kernel("backward_group", run_group, shared_variable, raw);
}
