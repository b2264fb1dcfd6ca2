// What kernels on emulated threads may call. Every function acts for the thread that runs.
//
// Addresses of shared memory are 32-bit numbers of the CTA's window, as on the device: static
// memory from 0 on, dynamic memory from DYNAMIC_BASE on, which is deliberately not aligned to
// 1024 bytes.

#pragma once

#include <cstdint>

namespace emu {

constexpr uint32_t DYNAMIC_BASE = 1072;

struct Index {
  uint32_t x, y, z;
};
struct Where {
  Index thread, block, grid;
};
extern Where *where;  // of the thread that runs

// ---- scheduling
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void maybe_yield(uint32_t one_in);  // another thread may run here
uint64_t now();
void pause();  // after a poll that saw nothing new: until the word that was read changes

// ---- a warp together: all 32 lanes call, the last one does it for all
uint32_t lane();
void sync_warp();
uint32_t shuffle(uint32_t value, uint32_t source);
uint64_t shuffle64(uint64_t value, uint32_t source);
uint32_t shuffle_up(uint32_t value, uint32_t distance);
uint32_t ballot(bool value);
void store_matrices(uint32_t to, const uint32_t (&words)[4]);
void load_matrices(uint32_t from, uint32_t (&words)[4]);

// ---- barriers
void bar_sync(uint32_t id, uint32_t threads);  // threads 0: all of the CTA
void barrier_init(uint32_t address, uint32_t arrivals);
void barrier_arrive(uint32_t address, uint32_t bytes);
bool barrier_done(uint32_t address, uint32_t parity);
void barrier_wait(uint32_t address, uint32_t parity);

// ---- shared memory, the copy engine, the tensor cores
uint32_t shared_address(const void *pointer);
void read_shared(uint32_t from, void *to, uint32_t bytes);
void write_shared(uint32_t to, const void *from, uint32_t bytes);
// rank: dimensions of the map, 2 or 3; z counts for 3.
void tma_load(uint32_t rank, uint32_t to, const void *map, uint32_t barrier, int x, int y, int z);
void tma_store(uint32_t rank, const void *map, uint32_t from, int x, int y, int z);
void tma_commit();
void tma_wait(uint32_t pending, bool only_reads);
void proxy_fence();
// across: the operand lies with its rows or columns innermost, K outside (transposed).
void wgmma(float *accumulator, uint64_t a, uint64_t b, bool accumulate, bool across_a,
           bool across_b);
void wgmma_commit();
void wgmma_wait(uint32_t pending);

// ---- global memory
void check_global(const void *address, uint32_t bytes, const char *what);
uint32_t poll(const uint32_t *word);               // a load that a pause may follow
uint32_t exchange_add(uint32_t *word, uint32_t value);
void store_word(uint32_t *word, uint32_t value);
void changed(const uint32_t *word);                // it was written by other means
void read_global(const void *from, void *to, uint32_t bytes);
void write_global(void *to, const void *from, uint32_t bytes);

// ---- kernels announce themselves when their library is loaded
struct Launch {
  uint32_t stream, kernel, grid_x, grid_y, block, shared, resident, ranks_here;
  const void *one, *many;
  const void *ids, *ids_many;    // of publish
  const void *grad, *grads;      // of the backward's kernels
};
void add_kernel(const char *name, void (*run)(const Launch &), void *(*shared_variable)(),
                const void *dynamic);

}  // namespace emu
