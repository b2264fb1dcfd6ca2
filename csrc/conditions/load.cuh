// What every load has in common: the clock that all kernels of a device share, the SM a block is on,
// and a record in host-mapped memory through which the host watches the load and lets it go.
//
// Record of 64-bit words: [0] the host's wish that the load ends; from RECORD_HEAD on RECORD_BLOCK
// words a block: first and last nanosecond seen, steps done, SM + 1, how it ended, when it ended.
// Only block 0 reads the host's word, across the bus; it passes the wish on in device memory.

#pragma once

#define RECORD_HEAD 8
#define RECORD_BLOCK 8
#define ENDED_RELEASED 1ull
#define ENDED_TIMED_OUT 2ull

typedef unsigned long long u64;

static __device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

static __device__ __forceinline__ unsigned multiprocessor() {
  unsigned id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

static __device__ __forceinline__ u64 read_system(const u64* address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

static __device__ __forceinline__ void write_system(u64* address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

static __device__ __forceinline__ unsigned read_device(const unsigned* address) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

static __device__ __forceinline__ void write_device(unsigned* address, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// 16 bytes past L1, so that they cost what memory costs.
static __device__ __forceinline__ uint4 read_vector(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

static __device__ __forceinline__ void write_vector(uint4* address, uint4 v) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Where a block is in its own time; only thread 0 keeps it.
struct Progress {
  u64* mine;
  u64 begin;
  u64 steps;
};

static __device__ __forceinline__ Progress start_load(u64* record) {
  Progress p;
  p.mine = record + RECORD_HEAD + RECORD_BLOCK * (u64)blockIdx.x;
  p.begin = nanoseconds();
  p.steps = 0;
  if (threadIdx.x == 0) {
    write_system(p.mine + 3, multiprocessor() + 1);
    write_system(p.mine + 1, p.begin);
    write_system(p.mine, p.begin);
  }
  return p;
}

// One more step is done. Returns for all threads of the block whether the load is to end; thread 0
// has then written how. A block ends at its time-out whatever the host does, so nothing can hang.
static __device__ __forceinline__ bool step_load(Progress& p, u64* record, unsigned* stopped,
                                                 u64 timeout) {
  bool over = false;
  if (threadIdx.x == 0) {
    const u64 now = nanoseconds();
    p.steps++;
    write_system(p.mine + 2, p.steps);
    write_system(p.mine + 1, now);
    if (blockIdx.x == 0 && read_system(record) != 0) write_device(stopped, 1u);
    const bool released = read_device(stopped) != 0;
    over = released || now - p.begin > timeout;
    if (over) {
      write_system(p.mine + 5, now);
      write_system(p.mine + 4, released ? ENDED_RELEASED : ENDED_TIMED_OUT);
    }
  }
  return __syncthreads_or(over);
}

// Reads, changes and writes `rounds` vectors a thread, each block in its own stretch of the buffer.
// cursor: where this thread is; it goes on from step to step, so that all of the buffer is used.
static __device__ __forceinline__ void hammer(uint4* buffer, u64 vectors, u64& cursor, int rounds) {
  const u64 stride = (u64)gridDim.x * blockDim.x;
  for (int round = 0; round < rounds; round += 4) {
    uint4 held[4];
    u64 at[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      at[i] = cursor;
      cursor += stride;
      if (cursor >= vectors) cursor = (u64)blockIdx.x * blockDim.x + threadIdx.x;
      held[i] = read_vector(buffer + at[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      held[i].x += 1u;
      write_vector(buffer + at[i], held[i]);
    }
  }
}
