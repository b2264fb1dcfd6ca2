// What the digest kernel is told and how it is specialised: parts, tasks, sizes.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

#ifndef WORDS
#define WORDS 16  // consecutive words of a thread; its WORDS + 3 table entries stay in registers
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef STAGES
#define STAGES 4  // tiles of a warp in shared memory
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif
#ifndef SHARED_PRODUCTS
#define SHARED_PRODUCTS 1  // three products for two words and two lanes instead of four
#endif
#ifndef PREFETCH
#define PREFETCH 0  // bytes that a read pulls into L2: 0, 128 or 256
#endif

constexpr int BLOCK = 4096;            // words that share one multiplier
constexpr int TILE = THREADS * WORDS;  // words of one step of a CTA
constexpr int TILES_PER_BLOCK = BLOCK / TILE;
constexpr u64 TILE_BYTES = 4ull * TILE;
constexpr u64 RUN_BYTES = 4ull * WORDS;         // of one thread
constexpr u64 GATHER_BYTES = 4ull * THREADS;    // a step through strided memory
constexpr int PIECES = WORDS / 4;               // of 16 bytes, in the run of a thread
constexpr int STAGE_PIECES = 32 * PIECES + 1;   // of a warp; the last one only if runs are shifted
constexpr int WARPS = THREADS / 32;
constexpr int MAX_DIMS = 8;
constexpr u64 TABLE_WORTHWHILE = 32;  // steps of gathering from which on the table is built
static_assert(BLOCK % TILE == 0, "a tile lies inside one block");
static_assert(PIECES == 2 || PIECES == 4, "the swizzle repeats every 32 pieces");

// A range of a tensor's bytes. `offset` is where it begins in the whole tensor. Sizes and strides
// are of units of `unit` bytes, slowest first; `dims` 0 says contiguous. Of dimension `cut` only
// the first `kept` entries are there, the others count as zero: so a shard lies in its whole. Every
// `group` bytes have an output of their own. verify/device_parts.py writes it.
struct Part {
  const u8 *data;
  u64 offset;
  u64 bytes;
  u64 group;
  u64 first_tile;
  u64 group_tiles;
  u64 kept;
  u32 slot, unit;
  u32 dims, cut;
  u32 flip[4];  // bits to invert in words 0 .. 3 mod 4 of the whole: lazy conjugates and negatives
  u64 size[MAX_DIMS];
  u64 stride[MAX_DIMS];
};

// What a CTA does next: bytes [low, high) of the whole are one output's, of which it takes the
// tiles [from, to), counted from the whole's byte 0. It lies in shared memory, so that none of it
// occupies registers while tiles are streamed.
struct Task {
  u64 low, high;
  u64 from, to;
  u64 slot;
  u64 next;           // tile of the launch to go on with
  const Part *part;   // of this task
  u32 index;          // its number
  bool table_built;   // in the memory that streaming uses too
};

struct Seeds {
  u64 table, block;
  u32 zero;  // 0 at run time
};
