"""Properties that the expert-sorted order has for any ids."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from nmoe_kernels import group_rows


@st.composite
def ids_and_experts(draw):
    experts = draw(st.integers(1, 12))
    shape = (draw(st.integers(0, 30)), draw(st.integers(1, 6)))
    # -1, E and beyond stand for dropped assignments.
    elements = st.integers(-1, experts + 1)
    dtype = draw(st.sampled_from(["int64", "int32"]))
    return draw(arrays.arrays(dtype, shape, elements=elements)), experts


@settings(max_examples=200, deadline=None)
@given(ids_and_experts())
def test_rows_are_a_stable_sort_by_expert(case):
    ids, experts = case
    grouping = group_rows(torch.from_numpy(ids), experts)
    flat = [e if 0 <= e < experts else experts for e in ids.flatten().tolist()]
    want = sorted(range(len(flat)), key=lambda i: (flat[i], i))
    assert grouping.order_M.tolist() == want
    assert grouping.token_M.tolist() == [i // ids.shape[1] for i in want]
    bounds = [sum(f < e for f in flat) for e in range(experts + 1)]
    assert grouping.offsets_E1.tolist() == bounds
    assert grouping.offsets_E1.dtype == torch.int32


@settings(max_examples=100, deadline=None)
@given(ids_and_experts())
def test_inverse_leads_back_and_no_row_is_lost(case):
    ids, experts = case
    grouping = group_rows(torch.from_numpy(ids), experts)
    flat_inverse = grouping.inverse_TK.flatten()
    assert grouping.inverse_TK.shape == ids.shape
    assert grouping.order_M[flat_inverse].tolist() == list(range(ids.size))
    kept = torch.from_numpy((ids >= 0) & (ids < experts))
    assert torch.equal(grouping.kept_TK, kept)
    assert grouping.offsets_E1[-1] == kept.sum()


def test_all_rows_of_one_expert():
    grouping = group_rows(torch.full((5, 1), 2), 4)
    assert grouping.offsets_E1.tolist() == [0, 0, 0, 5, 5]
    assert grouping.order_M.tolist() == [0, 1, 2, 3, 4]


def test_ids_need_not_be_contiguous():
    ids = torch.randint(0, 8, (4, 10))
    strided = group_rows(ids.t(), 8)
    assert torch.equal(strided.order_M, group_rows(ids.t().contiguous(), 8).order_M)
