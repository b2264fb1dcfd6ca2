"""Faults planted into the sources of the backward, and which example shows each.

They exist so that what the emulated examples see is known. A fault is a replacement of text; when
a source changes so that a text is no longer there, the test says so and the fault is to be planted
anew. Values that are wrong whatever the schedule need no fault here: the exact cases compare all.
"""

from __future__ import annotations

from emulation_faults import Fault

PRODUCER, MOVERS = "moe/backward/producer.cuh", "moe/backward/movers.cuh"
HIDDEN, WEIGHTS = "moe/backward/hidden.cuh", "moe/backward/weights.cuh"
SWIGLU, KERNEL = "moe/backward/swiglu.cuh", "moe/backward.cu"
SUMS = "moe/backward/sums.cuh"


FAULTS = {
    "movers do not wait for readers": Fault(
        MOVERS, "if (block >= g.ring && lane == 0)", "if (false)", "ring wraps"
    ),
    "padding of d_out is not cleared": Fault(
        MOVERS, "clear_row(g.d_ring + to, r.hidden_size, lane);", "", "tail of 65", "reads NaN"
    ),
    "no proxy fence of movers": Fault(
        MOVERS, "proxy_fence();", "", "one token", "made no proxy fence"
    ),
    "weights do not wait for hidden rows": Fault(
        PRODUCER,
        "if (group.blocks == 0) break;",
        "if (group.kind == BACK_WEIGHTS) break;",
        "ring wraps",
    ),
    "only a group's first hidden tile waits for its rows": Fault(
        PRODUCER,
        "return kind != BACK_HIDDEN && kind != BACK_AGAIN;",
        "return true;",
        "full block and one",
    ),
    "sums of the router gradient before all are there": Fault(
        PRODUCER,
        "g, group.segment), group.wanted,",
        "g, group.segment), group.wanted - 1,",
        "two column tiles",
    ),
    "a part reads sums too early": Fault(
        PRODUCER, "if (PART_NUMBER(group.part) > 1)", "if (false)", "parts of an expert"
    ),
    "g and u again are not waited for": Fault(
        PRODUCER, "group.kind == BACK_HIDDEN && block >= g.saved_blocks", "false", "all again"
    ),
    "gate and up exchanged in input": Fault(
        PRODUCER,
        "(part ? &Gradient::up : &Gradient::gate)",
        "(part ? &Gradient::gate : &Gradient::up)",
        "one token",
        "wrong d_x",
    ),
    "the ring's end is passed": Fault(
        PRODUCER,
        "++place == g.ring && !shared",
        "++place == g.ring && shared",
        "an expert over the ring's end",
    ),
    "an empty half is multiplied": Fault(
        PRODUCER,
        "BLOCK_ROWS(r.blocks[last]) <= 64) --task.steps",
        "false) --task.steps",
        "tail of 64",
        "reads NaN",
    ),
    "a part is told before its sums are there": Fault(
        KERNEL,
        "  if (!last) store_sums(d, scratch_of(reread(g, s), c, task.column));\n"
        "  __syncwarp();\n  if (c.lane == 0) barrier_arrive(finished);\n",
        "  __syncwarp();\n  if (c.lane == 0) barrier_arrive(finished);\n"
        "  if (!last) store_sums(d, scratch_of(reread(g, s), c, task.column));\n",
        "parts of an expert",
    ),
    "stage released before its transposed products": Fault(
        "moe/consumer.cuh", "wgmma_wait<1>();", "", "clipped columns", "which a product of warp"
    ),
    "something is added beyond a border": Fault(
        WEIGHTS,
        "if ((u32)q * 64 >= inside) break;",
        "",
        "added to main gradients",
        "somebody wrote beside",
    ),
    "unaligned, something is added beyond a border": Fault(
        WEIGHTS,
        "if ((u32)first * 2 >= inside) break;",
        "",
        "added to main gradients",
        "somebody wrote beside",
    ),
    "sums in fp32 leave before all lanes have staged them": Fault(
        WEIGHTS,
        "d[32 * q + 2 * i], d[32 * q + 2 * i + 1]);\n    }\n    __syncwarp();",
        "d[32 * q + 2 * i], d[32 * q + 2 * i + 1]);\n    }",
        "fp32 gradients",
        "wrong d_",
    ),
    "sums in fp32 are staged before the last ones have left": Fault(
        WEIGHTS,
        "add_bits(old[i].w, v.w));\n    }\n    __syncwarp();",
        "add_bits(old[i].w, v.w));\n    }",
        "fp32 gradients",
        "wrong d_",
    ),
    "accumulators stay where they are": Fault(
        HIDDEN, "move_on<8, 32>(d);", "", "one token", "wrong d_"
    ),
    "accumulators of the next piece stay where they are": Fault(
        HIDDEN, "move_on<32, 128>(d);", "", "two column tiles", "wrong d_"
    ),
    "no wait for peers' results": Fault(
        PRODUCER,
        "if (r.ranks > 1)\n        for",
        "if (false)\n        for",
        "two ranks apart, three passes",
        "wrong d_",
    ),
    "padding gives what lies in g and u": Fault(
        HIDDEN,
        "if (padding.any) clear_padding",
        "if (false) clear_padding",
        "padding of 63 holds NaN",
        "reads NaN",
    ),
    "a stage of g and u let go while it is read": Fault(
        HIDDEN,
        "tma_wait_read<1>();\n      barrier_arrive",
        "barrier_arrive",
        "two column tiles",
        "where another copy is on its way",
    ),
    "slope without 1 - s": Fault(
        SWIGLU,
        "__fmaf_rn(gc, __fadd_rn(1.0f, -s), 1.0f)",
        "__fmaf_rn(gc, s, 1.0f)",
        "four slots",
        "wrong d_gate",
    ),
    "second operand not transposed": Fault(
        KERNEL,
        "b = operand_columns(stage + A_BYTES)",
        "b = operand(stage + A_BYTES)",
        "one token",
        "leading offset",
    ),
    "sums are not taken up": Fault(
        KERNEL,
        "task.steps, false, 0);",
        "task.steps, false, 1);",
        "parts of an expert",
        "wrong d_",
    ),
    "an expert without rows gets no zeros": Fault(
        KERNEL,
        "if (!idle) finish_no_rows(",
        "if (false) finish_no_rows(",
        "empty experts",
        "wrong d_",
    ),
    "an expert without rows gets no zeros in fp32": Fault(
        WEIGHTS,
        "} else if (is_fresh(",
        "} else if (false && is_fresh(",
        "fp32 gradients of empty experts",
        "wrong d_",
    ),
    "a main gradient is written over": Fault(
        WEIGHTS,
        "return (shared ? g.fresh >> 3 : g.fresh) & of;",
        "return shared ? g.fresh >> 3 : g.fresh;",
        "fp32 gradients",
        "wrong main",
    ),
    "what lies in a fresh gradient is added": Fault(
        WEIGHTS,
        "return (shared ? g.fresh >> 3 : g.fresh) & of;",
        "return (shared ? g.fresh : g.fresh >> 3) & of;",
        "fp32 gradients",
        "wrong d_",
    ),
    "a fresh gradient is written beyond a border": Fault(
        WEIGHTS,
        "send_sums<false>(d, c, to, t.width, inside)",
        "send_sums<false>(d, c, to, t.width, 256u)",
        "fp32 gradients beyond a tile",
        "wrong d_",
    ),
    "the staging memory's halves in a wrong order": Fault(
        WEIGHTS,
        "send_piece(c, q, v,",
        "send_piece(c, 0, v,",
        "clipped columns",
        "stmatrix writes shared memory",
    ),
    "unused slots keep an old router gradient": Fault(
        SUMS,
        "id >= 0 ? load_relaxed_float(own.d_router + at) : 0.0f",
        "load_relaxed_float(own.d_router + at)",
        "four slots",
        "wrong d_router",
    ),
}
