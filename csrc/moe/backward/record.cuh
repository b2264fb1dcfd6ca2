// What the kernels of the backward pass know of one rank beside its `Rank`, and the order of its work.
//
// The host fills `Gradient` (mok/hopper/gradient_records.py has the same layout, by test). The words of
// rank.cuh hold: rows, blocks, tickets, groups, segments. One ring of `ring` blocks serves all rows: block
// b of the rows of d_out, x, d_gate, d_up and of the weighted hidden rows lies at b % ring, from the
// moment its rows are dispatched until all tiles of its segment that read them are done. So two
// neighbouring segments have to fit into the ring together. g and u that are computed again lie where
// d_gate and d_up will: one tile of HIDDEN reads them, has them in its stages, and stores over them.

#pragma once

#include "moe/rank.cuh"

// Kinds of groups. Order of a launch, those without tickets left out:
//   SHARED_AGAIN, SHARED_HIDDEN, AGAIN 0, HIDDEN 0, SHARED_INPUT, SHARED_WEIGHTS,
//   AGAIN 1, HIDDEN 1, INPUT 0, WEIGHTS 0 .., AGAIN 2, HIDDEN 2, INPUT 1, WEIGHTS 1 .., ... ,
//   INPUT last, WEIGHTS last .., WEIGHTS of experts without rows, SUM, END.
// WEIGHTS i stands for one group for each expert with rows in segment i, those with more rows first,
// of equal ones the lower expert first; a part of an expert that is cut is a segment of its own.
#define BACK_HIDDEN 0u          // d_out w_down: 128 rows x 256 columns of I; then d_gate, d_up, w h'
#define BACK_INPUT 1u           // d_gate w_gate + d_up w_up: 128 rows x 256 columns of H
#define BACK_WEIGHTS 2u         // gradients of an expert's weights: 128 x 256 of one of them
#define BACK_SHARED_HIDDEN 3u   // the same for the shared expert; its rows are the rank's own tokens
#define BACK_SHARED_INPUT 4u
#define BACK_SHARED_WEIGHTS 5u
#define BACK_AGAIN 6u           // g and u of rows that forward did not keep: 128 rows x 128 columns of both
#define BACK_SHARED_AGAIN 7u
#define BACK_SUM 9u             // SUM_TOKENS tokens  (8 is LOG_DISPATCH)
#define BACK_END 10u

struct BackGroup {
  u32 ticket;   // the first one
  u32 kind;
  u32 block;    // the first one; of WEIGHTS the first of its rows; of shared groups, SUM, END 0
  u32 blocks;   // how many. HIDDEN, INPUT, AGAIN and their shared ones: ticket t is block + (t - ticket) %
                // blocks, column tile (t - ticket) / blocks. WEIGHTS: 0 for an expert without rows;
                // tile t - ticket. SHARED_WEIGHTS: ceil(T / 128)
  u32 segment;  // whose counters it reads and adds to
  u32 wanted;   // INPUT, WEIGHTS: what DONE_HIDDEN of the segment reaches; SHARED_INPUT, SHARED_WEIGHTS: what
                // COUNT_SHARED_HIDDEN reaches; SHARED_HIDDEN: what COUNT_SHARED_AGAIN reaches (0 if nothing is
                // computed again); else 0
  u32 expert;   // WEIGHTS
  u32 part;     // WEIGHTS: PART_*
};
// An expert with more blocks than `uncut` is cut into parts, whose sums go through `scratch` in fp32. Cut
// parts are numbered 1, 2, ... over all experts of the rank, in the order of segments; part number n
// begins when COUNT_CUT is (n - 1) tiles-of-an-expert. 0: a whole expert.
#define PART_NUMBER(part) ((part) & 0x3fffffffu)
#define PART_FIRST 0x40000000u  // begins at zero
#define PART_LAST 0x80000000u   // its sums are the gradient. A whole expert: PART_FIRST | PART_LAST

// Which gradients of weights are wanted.
#define WANT_GATE 1u
#define WANT_UP 2u
#define WANT_DOWN 4u
#define WANT_SHARED_GATE 8u
#define WANT_SHARED_UP 16u
#define WANT_SHARED_DOWN 32u

// Counters of the backward, zeroed by `enter_backward`, behind Gradient.counters: a head, then
// READY[max_blocks]: rows dispatched (128 when whole); AGAIN[max_blocks]: tiles of g and u again;
// HIDDEN[max_blocks]: tiles of HIDDEN, by segment; USED[max_blocks]: tiles of INPUT and WEIGHTS, by segment.
// Queues, COUNT_DOWN (tiles of INPUT and SHARED_INPUT), PLAN_*, epochs and the failure are those of Rank.
#define BACK_HEAD 8
#define COUNT_SHARED_AGAIN 0
#define COUNT_SHARED_HIDDEN 1
#define COUNT_CUT 2           // tiles of cut parts
#define BACK_TABLES 4         // how many arrays of max_blocks words follow the head

// Symmetric memory of one rank for the backward, as its peers see it.
struct BackPeer {
  const u16* x;         // [max_tokens, H]: where the forward stages it; staged anew when it enters
  const u16* d_out;     // [max_tokens, H], likewise (own rank: both unused)
  const float* router;  // [max_tokens * slots], likewise
  u16* d_x;             // [max_tokens * slots, H]: gradient of x of every route of this rank's tokens
  float* d_router;      // [max_tokens * slots]
};

struct alignas(64) Gradient {
  // Of bf16, 128-byte swizzle, innermost dimension first, boxes of 64 columns x 64 rows to load and 64 x 16
  // to store; weights in boxes of 64 x 64 x 1. Stores clip at the borders, loads give zeros beyond.
  TensorMap d_rows, x_rows;                      // rings [ring * 128, H]; load
  TensorMap d_gate, d_up, weighted;              // rings [ring * 128, I]; load
  TensorMap d_gate_out, d_up_out, weighted_out;  // the same memory; store
  TensorMap gate, up, down;                      // weights [E, I, H], [E, I, H], [E, H, I]; load
  TensorMap saved_gate, saved_up;                // [saved_blocks * 128, I]; load
  TensorMap w_gate_out, w_up_out, w_down_out;    // gradients [E, I, H], [E, I, H], [E, H, I]; store 64 x 16 x 1
  TensorMap d_out, x;                            // own [T, H]; load
  TensorMap shared_d_gate, shared_d_up, shared_weighted;              // [T, S]; load
  TensorMap shared_d_gate_out, shared_d_up_out, shared_weighted_out;  // the same memory; store
  TensorMap shared_gate, shared_up, shared_down;                      // [1, S, H], [1, S, H], [1, H, S]; load
  TensorMap shared_saved_gate, shared_saved_up;                       // [T, S]; load
  TensorMap shared_w_gate_out, shared_w_up_out, shared_w_down_out;    // [1, S, H], [1, S, H], [1, H, S]; store
  // Rank's own maps that AGAIN and SHARED_AGAIN use: gate, up, shared_gate, shared_up (boxes of 128 rows).
  const u16* own_d_out;   // [T, H]
  u16* d_x;               // [T, H]
  float* d_router;        // [T, slots]
  u16* shared_d_x;        // [T, H], null without a shared expert
  u16 *d_ring, *x_ring;   // memory of d_rows and x_rows
  float* row_weights;     // [ring * 128]: router weight of each row; 0 for padding
  float* partials;        // [ring * 128, I / 64]: the router gradient's sums over 64 columns
  float* scratch;         // [tiles of an expert's weights, 32, 256] of 4 floats; null if no expert is ever cut
  float *main_gate, *main_up, *main_down;  // fp32 gradients, or null: then bf16 by the maps
  float *shared_main_gate, *shared_main_up, *shared_main_down;
  const BackPeer* peers;  // [ranks], this rank included
  BackGroup* groups;      // [max_groups]
  u32* counters;          // BACK_HEAD + BACK_TABLES * max_blocks
  u32* segment_of;        // [max_blocks]: the segment of a block
  u32* used_target;       // [max_blocks], by segment: what USED reaches
  u32 ring;               // blocks
  u32 saved_blocks;       // forward kept g and u of blocks below
  u32 shared_again;       // 1: g and u of the shared expert are computed again
  u32 wants;              // WANT_*
  u32 fresh;              // WANT_* of fp32 gradients to write, aligned to 8 bytes; others are added to
  u32 uncut;              // an expert with more blocks is cut, into parts of at most segment_most
  u32 max_groups;
};
