// The backward kernel of one rank a launch, as a function of the emulator.

#include "device.hpp"

thread_local unsigned char raw[16];  // stands for dynamic shared memory

#define GROUP 0
#include "moe/backward.cu"

static void run_alone(const emu::Launch &l) {
  backward(*(const Rank *)l.one, *(const Gradient *)l.grad, (const Rank *)l.many,
           (const Gradient *)l.grads, l.ranks_here);
}
static void *shared_variable() { return raw; }
__attribute__((constructor)) static void announce_kernels() {
  emu::add_kernel("backward", run_alone, shared_variable, raw);
}
