"""What a selection costs, on profiles made by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from oracle import every_mask
from profiles import branched, layers, operator, straight, tensor

from snugfit._core.profile import TensorProfile
from snugfit.selection import backward_seconds
from snugfit.selection.network import Network


def test_figure_3_only_layer_3_of_5_is_selected():
    dw, dy = [1, 2, 4, 8, 16], [100, 200, 400, 800, 1600]
    net = Network(straight(*((p, [(t, 0)]) for p, t in zip(dy, dw, strict=True))), 1)
    assert net.t_dw.tolist() == dw
    assert net.t_dy.tolist() == dy
    assert net.backward_seconds(net.mask(["2.0"])) == 4 + 800 + 1600


def test_section_5_1_a_bias_passes_nothing():
    net = Network(straight((1, [(0, 0)]), (7, [(5, 1), (3, 1)]), (9, [(4, 0), (2, 0)])), 1)
    assert net.t_dy.tolist() == [1, 7, 0, 9, 0]
    assert net.t_dw.tolist() == [0, 6, 4, 4, 2]


def test_section_5_2_any_tensor_of_a_norm_before_which_one_is_selected_pays_for_the_whole_norm():
    """The black box: whatever is selected before it, all its operations run once."""
    net = Network(straight((1, [(1, 0)]), (6, [(0, 0), (0, 0)]), (2, [(1, 0)])), 1)
    assert net.t_dy[1:3].sum() == 6
    before = net.backward_seconds(net.mask(["0.0"]))
    assert before == 1 + 6 + 2
    assert net.backward_seconds(net.mask(["0.0", "1.0", "1.1"])) == before
    assert net.backward_seconds(net.mask(["1.1"])) == net.backward_seconds(net.mask(["1.0"])) == 2


def test_section_5_3_a_layer_without_tensors_counts_to_the_tensor_after_it():
    net = Network(straight((1, [(1, 0)]), (20, []), (300, []), (4000, [(1, 0), (1, 0)]), (50000, [])), 1)
    assert net.t_dy.tolist() == [50000 * 0 + 1, 4320, 0]
    assert net.backward_seconds(net.mask(["0.0"])) == 1 + 4320 + 50000
    assert net.backward_seconds(net.mask(["3.0"])) == 1 + 50000, "what no tensor stands behind is always passed"


def test_layers_before_the_first_tensor_count_to_it_and_are_never_charged():
    net = Network(straight((10, []), (2, [(1, 0)]), (3, [(1, 0)])), 1)
    assert net.t_dy.tolist() == [12, 3]
    assert net.backward_seconds(np.array([True, True])) == 2 + 3


@given(layers())
@settings(max_examples=60, deadline=None)
def test_graph_and_chain_agree_on_every_selection_of_a_straight_network(made):
    net = Network(straight(*made), 1)
    for mask in every_mask(len(net.names)):
        chain = backward_seconds(mask, net.t_dw, net.t_dy)
        assert net.backward_seconds(mask) == pytest.approx(chain, rel=1e-12, abs=1e-12)


@given(branched())
@settings(max_examples=60, deadline=None)
def test_where_branches_meet_the_chain_charges_at_least_as_much(profile):
    net = Network(profile, 1)
    for mask in every_mask(min(len(net.names), 8)):
        whole = np.append(mask, np.zeros(len(net.names) - len(mask), dtype=bool))
        assert net.backward_seconds(whole) <= backward_seconds(whole, net.t_dw, net.t_dy) * (1 + 1e-12) + 1e-12


@given(layers(least=2))
@settings(max_examples=100, deadline=None)
def test_it_is_the_papers_aggregation_where_the_earliest_selected_is_the_second_tensor_of_its_layer(made):
    """Section 3.3's f(M) also charges the earliest's own t_dy: nothing, for a bias; a beta's is the norm's whole time.

    So both conventions agree for a bias. For a beta the paper's is one norm higher: it runs "all operations" of a norm
    whose own tensor is selected, which lean operators do not.
    """
    net = Network(straight(*made), 1)
    for mask in every_mask(len(net.names)):
        chosen = np.flatnonzero(mask)
        if len(chosen) and net.names[chosen[0]].endswith(".1"):
            inclusive = net.t_dw[mask].sum() + net.t_dy[chosen[0] :].sum()
            assert net.backward_seconds(mask) == pytest.approx(inclusive, rel=1e-12, abs=1e-12)


def residual():
    """stem -> (conv -> act) + shortcut -> fc; the shortcut is identity."""
    return Network(
        TensorProfile(
            2,
            (
                operator("op0", (-1,), 1, tensor("stem", 1, macs=10, saved=[(0, 8)]), macs=10),
                operator("op1", (0,), 2, tensor("conv", 2, macs=20, saved=[(100, 8)]), macs=20),
                operator("op2", (1,), 4, saved=[(50, 6)]),
                operator("op3", (0,), 8, tensor("side", 3, macs=40, saved=[(100, 8)]), macs=40),
                operator("op4", (2, 3), 16),
                operator("op5", (4,), 32, tensor("fc", 4, 5, size=40, macs=80, saved=[(104, 8)]), tensor("b", 1, 6)),
            ),
            input_bytes=8,
        ),
        batch=6,
        state_copies=2,
    )


def test_a_gradient_passes_what_lies_between_the_output_and_a_selected_tensor_only():
    net = residual()
    passes = lambda *names: net.gradients(net.mask(names))[0].tolist()  # noqa: E731
    assert passes("fc", "b") == [False] * 6
    assert passes("conv") == [False, False, True, False, True, True]
    assert passes("side") == [False, False, False, False, True, True]
    assert passes("stem") == [False, True, True, True, True, True]
    assert passes() == [False] * 6


def test_times_grow_with_the_batch_and_updates_do_not():
    net = residual()
    assert net.scale == 3
    assert net.t_dw.tolist() == [3, 6, 9, 17, 9]
    assert net.forward_seconds() == 18
    assert net.backward_seconds(net.mask(["conv", "b"])) == 3 * (4 + 16 + 32) + 6 + 9


def test_multiply_accumulates():
    net = residual()
    assert net.macs(net.mask([])) == 70
    assert net.macs(net.head) == 70 + 80
    assert net.macs(net.mask(["stem"])) == 70 + (20 + 40) + 10
    assert net.macs(net.mask(net.names)) == 70 + (20 + 40) + 10 + 20 + 40 + 80


def test_the_head_is_the_last_layer_that_has_tensors():
    assert residual().head.tolist() == [False, False, False, True, True]
    assert Network(straight((1, [(1, 1)]), (1, [(1, 1)]), (1, [])), 1).head.tolist() == [False, True]
    assert Network(straight((1, [])), 1).head.tolist() == []


def test_tensors_that_read_the_same_map_share_it():
    net = residual()
    numbers, sizes = net.shared_inputs(np.array([0, 1, 2, 4]))
    assert numbers.tolist() == [0, 1, 1, -1]
    assert sizes.tolist() == [48, 48]
    assert net.input_bytes.tolist() == [48, 48, 48, 48, 0]


def test_bytes_of_a_tensor():
    net = residual()
    assert net.gradient_bytes.tolist() == [4, 4, 4, 40, 4]
    assert net.own_bytes.tolist() == [8, 8, 8, 80, 8]
    assert net.state_bytes(net.head) == 88
    own = tensor("w", saved=[(0, 8), (9, 5)])
    assert Network(TensorProfile(1, (operator("op0", (-1,), 0, own),)), 4, 0).own_bytes.tolist() == [20]


def test_bytes_that_pass_count_a_map_once_where_the_gradient_needs_it_first():
    net = residual()
    assert net.pass_bytes.tolist() == [0, 0, 36, 0, 0]
    shared = [
        operator("op0", (-1,), 0, tensor("a"), saved=[(0, 3)]),
        operator("op1", (0,), 0, tensor("b"), saved=[(100, 5)]),
        operator("op2", (1,), 0, tensor("c"), saved=[(100, 5), (101, 7)]),
    ]
    assert Network(TensorProfile(1, tuple(shared)), 1).pass_bytes.tolist() == [3, 0, 12]
