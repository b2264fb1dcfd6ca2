"""Runs on other numbers of ranks, or sharded otherwise: sums, and what cannot be added up."""

from __future__ import annotations

import pytest
from trace_toy import SHAPE, added, header, lanes, record_toy, write_step

from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, Whole
from verify.tracing.sentences import sentence
from verify.tracing.shards import FORMS, UNCOVERED, UNPLACED


def spread(folder, faults=(), *, ranks=4, shards=4, of=None, only=None):
    """The toy on several ranks, its parameters sharded or replicated; `faults` on the rank `of`, or
    on all. only: ranks to write."""
    for rank in range(ranks) if only is None else only:
        planted = faults if of is None or of == rank else ()
        record_toy(folder, planted, rank=rank, world=ranks, shards=shards)
    return folder


def piece(writer, number, name, ranges, content, *, kind="parameter", dtype="float32", shape=None):
    """A step with one tensor, or a part of one."""
    local = shape or tuple(stop - start for start, stop in ranges)
    whole = None if ranges is None else Whole(SHAPE, ranges)
    writer.step(number, [writer.define(name, kind, "", dtype, local, whole=whole)], content)


def test_one_rank_against_shards_of_four(tmp_path):
    found = diff(record_toy(tmp_path / "a"), spread(tmp_path / "b"))
    assert found.verdict is Verdict.VERIFIED
    assert [one.rank for one in found.ranks] == [None]
    assert found.worlds == (1, 4)
    assert found.compared == 14 + 3 * 20  # parameters, buffers, moments; gradients from step 0 on
    (left,) = found.left
    assert "1 and 4 ranks" in left.reason
    assert (left.open, left.events) == (False, 5 * (1 + 3 * 45))


@pytest.mark.parametrize("sides", ["ab", "ba"])
def test_a_fault_is_found_across_layouts(tmp_path, sides):
    record_toy(tmp_path / "a")
    spread(tmp_path / "b", [(1, "optimizer", "head")])
    found = diff(*(tmp_path / side for side in sides))
    assert found.verdict is Verdict.MISMATCH
    assert (found.culprit.cause, found.culprit.place.rank) == (Cause.OPTIMIZER, None)
    assert (found.culprit.place.step, found.culprit.names) == (1, ("head.weight",))
    assert "sum over ranks, step 1, optimizer" in sentence(found.culprit, found)


def test_a_gradient_across_layouts_says_that_activations_were_not_compared(tmp_path):
    record_toy(tmp_path / "a")
    spread(tmp_path / "b", [(1, "gradient", "head")])
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.culprit.cause is Cause.BACKWARD
    assert "activations were not compared" in sentence(found.culprit, found)


def test_replicas_count_once_and_must_agree(tmp_path):
    one = record_toy(tmp_path / "a")
    same = diff(one, spread(tmp_path / "b", shards=1, ranks=2))
    assert (same.verdict, same.differing) == (Verdict.VERIFIED, 0)
    other = spread(tmp_path / "c", [(1, "optimizer", "head")], of=1, shards=1, ranks=2)
    for found in (diff(one, other), diff(other, one)):
        assert found.verdict is Verdict.MISMATCH
        assert found.culprit.place.difference == "replicas"
        assert found.culprit.names == ("head.weight",)


def test_equal_worlds_that_shard_otherwise(tmp_path):
    whole, parts = (
        spread(tmp_path / "a", ranks=2, shards=1),
        spread(tmp_path / "b", ranks=2, shards=2),
    )
    found = diff(whole, parts)
    assert found.verdict is Verdict.VERIFIED
    assert [one.rank for one in found.ranks] == [0, 1, None]
    assert (found.left, found.ranks[2].compared) == ((), 12 + 3 * 18)
    other = spread(tmp_path / "c", [(0, "gradient", "head")], ranks=2, shards=2)
    assert diff(whole, other).culprit.place.rank is None


def test_equal_worlds_that_shard_alike_need_no_sums(tmp_path):
    found = diff(spread(tmp_path / "a"), spread(tmp_path / "b"))
    assert (found.verdict, len(found.ranks)) == (Verdict.VERIFIED, 4)


def test_a_missing_rank_leaves_the_sum_open(tmp_path):
    found = diff(record_toy(tmp_path / "a"), spread(tmp_path / "b", only=(0, 1, 3)))
    assert found.verdict is Verdict.UNVERIFIED
    assert f"{tmp_path / 'b'} lacks 1 of 4 ranks: 2" in found.reasons
    assert f"not compared: {UNCOVERED}" in found.reasons
    assert found.differing == 0


def test_parts_that_overlap_are_not_added(tmp_path):
    """Their sizes add up to the whole, but a row is there twice and another one missing."""
    record = TraceWriter(tmp_path / "a", header())
    piece(record, 0, "w", ((0, 4), (0, 6)), lanes("w"))
    record.close()
    for rank, rows in enumerate(((0, 2), (1, 3))):
        writer = TraceWriter(tmp_path / "b", header(rank, 2))
        piece(writer, 0, "w", (rows, (0, 6)), lanes(f"{rank}"))
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, [one.reason for one in found.left]) == (Verdict.UNVERIFIED, [UNCOVERED])


def test_blocks_in_two_dimensions_and_empty_parts(tmp_path):
    blocks = [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 6)), ((4, 4), (0, 6))]
    contents = [lanes(f"{number}") for number in range(3)] + [bytes(32)]
    record = TraceWriter(tmp_path / "a", header())
    piece(record, 0, "w", ((0, 4), (0, 6)), added(contents))
    record.close()
    for rank, (block, content) in enumerate(zip(blocks, contents, strict=True)):
        writer = TraceWriter(tmp_path / "b", header(rank, 4))
        piece(writer, 0, "w", block, content)
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.compared, found.left) == (Verdict.VERIFIED, 1, ())


def test_local_tensors_of_another_shape_are_not_taken_for_replicas(tmp_path):
    record = TraceWriter(tmp_path / "a", header())
    piece(record, 0, "experts.w", None, lanes("w"), shape=(8, 6))
    record.close()
    for rank in range(2):
        writer = TraceWriter(tmp_path / "b", header(rank, 2))
        piece(writer, 0, "experts.w", None, lanes(f"{rank}"), shape=(4, 6))
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.unmatched) == (Verdict.UNVERIFIED, ())
    assert [one.reason for one in found.left] == [UNPLACED]


def test_ranks_that_store_one_tensor_in_two_dtypes(tmp_path):
    record = TraceWriter(tmp_path / "a", header())
    piece(record, 0, "w", None, lanes("w"), shape=SHAPE)
    record.close()
    for rank, dtype in enumerate(("float32", "bfloat16")):
        writer = TraceWriter(tmp_path / "b", header(rank, 2))
        piece(writer, 0, "w", None, lanes("w"), shape=SHAPE, dtype=dtype)
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [one.reason for one in found.left] == [FORMS]
    assert found.verdict is Verdict.UNVERIFIED


def test_real_digests_of_parts_add_up(tmp_path):
    """With the digests that a recorder takes: a parameter whole, and in two halves."""
    import struct

    import torch

    from verify import digest
    from verify.hashing import digest_shard

    tensor = torch.arange(24, dtype=torch.float32).reshape(SHAPE)
    record = TraceWriter(tmp_path / "a", header())
    piece(record, 0, "w", None, struct.pack("<4Q", *digest(tensor).lanes), shape=SHAPE)
    record.close()
    for side, changed in (("b", 0.0), ("c", 1.0)):
        for rank, rows in enumerate(((0, 1), (1, 4))):
            part = digest_shard(tensor[slice(*rows)] + changed * rank, 0, rows[0], SHAPE)
            writer = TraceWriter(tmp_path / side, header(rank, 2))
            piece(writer, 0, "w", (rows, (0, 6)), struct.pack("<4Q", *part.lanes))
            writer.close()
    assert diff(tmp_path / "a", tmp_path / "b").verdict is Verdict.VERIFIED
    assert diff(tmp_path / "a", tmp_path / "c").verdict is Verdict.MISMATCH


def test_a_tensor_that_only_some_steps_hold(tmp_path):
    for rank in range(2):
        writer = TraceWriter(tmp_path / "b", header(rank, 2))
        write_step(writer, 0, [("w", "parameter", "", "w0")])
        write_step(writer, 1, [("w", "parameter", "", "w1"), ("v", "parameter", "", "v")])
        writer.close()
    writer = TraceWriter(tmp_path / "a", header())
    write_step(writer, 0, [("w", "parameter", "", "w0")])
    write_step(writer, 1, [("w", "parameter", "", "w1")])
    writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.compared) == (Verdict.UNVERIFIED, 2)
    assert [(one.side, one.name, one.rank) for one in found.unmatched] == [("b", "v", None)]
