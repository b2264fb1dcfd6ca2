// What kernels of the layer know of one rank, and where its counters, flags and tables lie.
//
// The host fills `Rank` (mok/hopper/records.py has the same layout, by test) and passes it by value,
// so that a recorded graph keeps it; ranks that share one launch (LocalGroup) pass an array in global
// memory instead. Words: a *row* is one route of a local expert, rows of an expert are in canonical
// order (global token, then slot) and padded to a multiple of 128; a *block* is 128 rows; block b of a
// ring of n blocks lies at b % n. A *ticket* is the number that a CTA draws for its next tile; a
// *group* is a run of tickets of one kind; a *segment* is a run of blocks whose tickets come together.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;  // also the bits of a bf16
typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCK 128       // rows of a block
#define MAX_RANKS 64
#define ROUTE_BITS 25   // a route: rank << 25 | token * slots + slot
#define PADDING 0xffffffffu
#define TICKET_ROWS 4   // rows of one dispatch ticket
#define SUM_TOKENS 8    // tokens of one ticket of the final sum

struct alignas(64) TensorMap { u64 opaque[16]; };

// Kinds of groups, in the order of a launch: SHARED_UP, SHARED_DOWN (if there is a shared expert),
// UP 0, UP 1, DOWN 0, UP 2, DOWN 1, ... , DOWN last, SUM, END.
#define GROUP_UP 0u           // tiles of 128 rows x 128 columns of gate and of up
#define GROUP_DOWN 1u         // tiles of 128 rows x 256 columns
#define GROUP_SHARED_UP 2u    // the same for the shared expert; its rows are the rank's own tokens
#define GROUP_SHARED_DOWN 3u
#define GROUP_SUM 4u          // SUM_TOKENS tokens
#define GROUP_END 5u          // no more tickets

struct Group {
  u32 ticket;  // the first one
  u32 kind;
  u32 block;   // the first one; for GROUP_SUM and GROUP_END 0
  u32 blocks;  // how many; ticket t is block + (t - ticket) % blocks, column tile (t - ticket) / blocks
};

// A block's expert << 16 | its valid rows (1 .. 128).
#define BLOCK_EXPERT(word) ((word) >> 16)
#define BLOCK_ROWS(word) ((word) & 0xffffu)

// Symmetric memory of one rank, as its peers see it.
struct Peer {
  const u16* x;    // [max_tokens, H], staged by the rank itself when it enters (own rank: unused)
  u32* ids;        // [2][1 + max_tokens * slots] by parity of the schedule's epoch: the number of
                   // tokens, then expert ids (int32, -1 unused, bad ones already unused)
  u16* y;          // [max_tokens * slots, H]: result of every route of this rank's tokens
  u32* flags;      // [FLAGS][MAX_RANKS], written by peers, each in its own place
};
// Kinds of flags: peer p writes the epoch into flags[kind * MAX_RANKS + p] of the rank it tells.
#define FLAG_SCHEDULED 0  // p's ids of this schedule epoch can be read
#define FLAG_ENTERED 1    // p's x of this launch epoch can be read, and its y can be written
#define FLAG_PUSHED 2     // p has written all its results into my y, so it has read all it needs of my x
#define FLAGS 3

// Counters: u32 words, all of one rank's own. [0, COUNTER_HEAD) single words, then per block
// READY[max_blocks] (rows dispatched, 128 when whole), UP[max_blocks], DOWN[max_blocks] (tiles that are
// done), SHARED[max_shared_blocks] (tiles of the shared expert's hidden rows). The queues, COUNT_DOWN and
// all that is per block are zeroed by `enter`, a kernel before the launch; epochs and the failure never.
#define COUNTER_HEAD 32
#define COUNT_DISPATCH 0    // queue of dispatch tickets
#define COUNT_COMPUTE 1     // queue of compute tickets
#define COUNT_DOWN 3        // tiles of GROUP_DOWN and GROUP_SHARED_DOWN that are done
#define COUNT_FAILED 5      // not zeroed: a wait ended by time, nobody waits any more
#define COUNT_EPOCH 6       // not zeroed: launches so far; `enter` adds one
#define COUNT_SCHEDULE 7    // not zeroed: schedules so far; `publish` adds one
// What `scan` and `enter` say of the work:
#define PLAN_BLOCKS 8       // blocks of routed rows
#define PLAN_GROUPS 9       // entries of the table of groups, END included
#define PLAN_DISPATCH 10    // dispatch tickets: blocks * 128 / TICKET_ROWS
#define PLAN_DOWN 11        // what COUNT_DOWN ends at
#define PLAN_ROWS 12        // valid routed rows
#define PLAN_BAD 13         // ids of this rank that were bad and became unused
#define COUNT_SCAN 14       // arrivals of CTAs in `publish` and `enter`; zero between kernels
#define COUNT_BAD 15        // bad ids that `publish` has met so far; zero between kernels
#define COUNT_LOG 16        // entries of the log, which the host zeroes

// A failed wait, in host-mapped memory. state is written last: 0 none, 1 there is one.
struct Failure {
  u32 state, what, index, rank;  // what: one of WAIT_*; index: the block or peer waited for
  u32 seen, wanted, cta, ticket;
};
#define WAIT_SCHEDULED 1u
#define WAIT_ENTERED 2u
#define WAIT_PUSHED 4u
#define WAIT_ROWS 5u     // rows of a block
#define WAIT_RING_X 6u   // readers of the rows that lay in this place of the ring before
#define WAIT_HIDDEN 7u   // hidden rows of a block
#define WAIT_RING_H 8u
#define WAIT_RESULTS 9u  // all results of this rank's experts

struct alignas(64) Rank {
  // Loads and stores of bf16, 128-byte swizzle, innermost dimension first. Stores clip at the borders.
  TensorMap x_rows;        // ring [ring_x * 128, H]; load, box 64 x 64
  TensorMap gate, up;      // [E, I, H]; load, box 64 x 128 x 1
  TensorMap hidden;        // ring [ring_h * 128, I]; load, box 64 x 64
  TensorMap hidden_out;    // the same memory; store, box 64 x 16
  TensorMap down;          // [E, H, I]; load, box 64 x 256 x 1
  TensorMap saved_gate, saved_up;              // [saved_rows, I]; store, box 64 x 16
  TensorMap x;             // own tokens [T, H]; load, box 64 x 64
  TensorMap shared_gate, shared_up;            // [1, S, H]; load, box 64 x 128 x 1
  TensorMap shared_hidden, shared_hidden_out;  // [T, S]; box 64 x 64 and 64 x 16
  TensorMap shared_down;   // [1, H, S]; load, box 64 x 256 x 1
  TensorMap shared_saved_gate, shared_saved_up;  // [T, S]; store, box 64 x 16
  const u16* own_x;        // [T, H]
  u16* out;                // [T, H]
  const float* router;     // [T, slots]
  u16* shared_y;           // [T, H], null without a shared expert
  u16* x_ring;             // memory of x_rows
  const Peer* peers;       // [ranks], this rank included
  u32* routes;             // [max_blocks * 128]: the route of each row, or PADDING
  u32* blocks;             // [max_blocks]: expert and rows
  Group* groups;           // [max_groups]
  u32* counters;
  u32* expert_rows;        // [E]
  u32* counts;             // [E][max_chunks]: scratch of the schedule
  Failure* failure;        // host-mapped
  u64 timeout_enter, timeout;  // ns: until a peer enters; inside a started exchange
  u32 rank, ranks, experts, slots;             // experts: of this rank
  u32 tokens, max_tokens, hidden_size, width, shared_width;  // H, I, S (0: none)
  u32 ring_x, ring_h;      // blocks
  u32 max_blocks, max_shared_blocks, max_groups, max_chunks;
  u32 save;                // 1: store g and u
  u32 segment_least, segment_most;  // blocks of a segment; see `enter`
  float limit;             // swiglu_limit, +inf without
  u32 *log;                // kernels compiled with LOG write here what they do, four words an entry
  u32 log_room;            // entries
};
