"""Saved rows: from the kernel's padded order to the canonical one, for any counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.checks import ErrorRecord
from mok.dispatch import make_schedule
from mok.errors import RoutingError
from mok.hopper.deferred import DeferredSchedule, on_host
from mok.hopper.saved import padded_count, padded_rows, without_padding

COUNTS = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([0, 127, 128, 129])), max_size=9)


@given(COUNTS)
def test_each_row_is_found_where_its_expert_begins(rows_E):
    rows = padded_rows(rows_E, torch.device("cpu"))
    expected, start = [], 0
    for count in rows_E:
        expected += [start + row for row in range(count)]
        start += -(-count // 128) * 128
    assert rows.tolist() == expected
    assert padded_count(rows_E) == start


def test_padding_is_never_read():
    rows_E = (3, 0, 130)
    gate = torch.full((padded_count(rows_E) + 128, 2), torch.nan)
    rows = padded_rows(rows_E, gate.device)
    gate[rows] = torch.arange(266.0).view(133, 2)
    found = without_padding(gate, gate + 1, rows_E)
    assert torch.equal(found.gate, torch.arange(266.0).view(133, 2))
    assert torch.equal(found.up, found.gate + 1)


def test_a_deferred_schedule_becomes_the_hosts_once():
    raw = torch.tensor([[0, 9], [1, 1], [-1, 3]])
    deferred = DeferredSchedule(raw, 4, None)
    found = on_host(deferred)
    assert found is on_host(deferred)
    cleaned = torch.tensor([[0, -1], [1, -1], [-1, 3]])
    wanted = make_schedule(cleaned, 4, None)
    assert torch.equal(found.topk_TK, cleaned)
    assert torch.equal(found.position_TK, wanted.position_TK)
    assert (found.rows_E, deferred.num_experts) == (wanted.rows_E, 4)
    assert on_host(wanted) is wanted


def test_bad_ids_of_a_deferred_schedule_are_recorded_where_a_portable_forward_asks() -> None:
    raw = torch.tensor([[0, 99], [1, 2]])
    errors = ErrorRecord()
    on_host(DeferredSchedule(raw, 4, None))  # the kernel has counted them
    errors.raise_pending()
    on_host(DeferredSchedule(raw, 4, None), errors)
    with pytest.raises(RoutingError, match="99"):
        errors.raise_pending()
