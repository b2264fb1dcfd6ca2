// What the digest kernel is told and how it is specialised: parts, tasks, sizes.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

#ifndef WORDS
#define WORDS 16  // consecutive words of a thread; their table entries stay in registers
#endif
#ifndef STAGES
#define STAGES 4  // tiles of a warp in shared memory
#endif
#ifndef PREFETCH
#define PREFETCH 0  // bytes that a read pulls into L2: 0, 128 or 256
#endif

constexpr int BLOCK = 4096;            // words that share one multiplier
constexpr int THREADS = BLOCK / WORDS; // of a CTA, which takes a block at a time: a tile
constexpr int CTAS_PER_SM = 512 / THREADS;      // so many have room for 128 registers a thread
constexpr u64 TILE_BYTES = 4ull * BLOCK;
constexpr int PIECES = WORDS / 4;               // of 16 bytes, in the run of a thread
constexpr int WARPS = THREADS / 32;
constexpr int BLOCK_QUADS = BLOCK / 4;
constexpr int MAX_DIMS = 8;
constexpr u64 TABLE_WORTHWHILE = 6;  // quads of a thread from which on the table is built
static_assert((STAGES & (STAGES - 1)) == 0, "tiles go round the stages without a division");
static_assert(STAGES >= 2, "a tile is read while the next one is on its way");
static_assert(WORDS == 16 || WORDS == 32, "a CTA's threads share one block");

// A range of a tensor's bytes. `offset` is where it begins in the whole tensor. Sizes and strides
// are of units of `unit` bytes, slowest first; `dims` 0 says contiguous. Of dimension `cut` only
// the first `kept` entries are there, the others count as zero: so a shard lies in its whole. Every
// `group` bytes have an output of their own. Strided memory is visited in quads, 16 aligned bytes
// of the whole each. `lines` 0 visits them in the order of the whole. Else neighbours in memory
// are neighbours in the visit: first along `lines` entries, each `line_bytes` of the whole behind
// the last one, then over the `line_quads` quads of a line. verify/device_parts.py writes it.
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
  u64 lines, line_bytes, line_quads;
};

// What a CTA does next: bytes [low, high) of the whole are one output's. Of it the CTA streams
// `blocks` whole tiles from `block` on, each `step` behind the last one, and visits the quads
// [from, done_from) and [done_to, to). Visits along lines count from the part's first quad, others
// from the whole's. It lies in shared memory, so that none of it occupies registers meanwhile.
struct Task {
  u64 low, high;
  u64 from, done_from, done_to, to;
  u64 block;
  u32 blocks, step;
  u64 slot;
  u64 next, end;      // tiles of the launch: to go on with, and where the CTA's end
  const Part *part;   // of this task
  u32 index;          // its number
  bool table_built;   // in the memory that streaming uses too
  bool last;          // of this output, for this CTA
};

struct Seeds {
  u64 table, block;
};
