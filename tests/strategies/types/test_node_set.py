import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.strategies.types import (
    History,
    NodeIndex,
    NodeSet,
    bits_at,
    clear_bits,
    packed,
    set_bits,
    unpacked,
)

IDS = st.integers(0, 2**64 - 1)


@given(st.lists(IDS, unique=True), st.sets(IDS))
def test_places_are_found_in_any_order_of_ids(ids, others):
    places = NodeIndex(np.array(ids, dtype=np.uint64))
    wanted = [*ids[::2], *others]
    expected = [ids.index(node) for node in wanted if node in set(ids)]
    assert places.of(wanted).tolist() == expected


@given(st.lists(st.booleans()), st.data())
def test_bits_are_read_and_written_as_in_a_mask(values, data):
    mask = np.array(values, dtype=np.bool_)
    words = packed(mask)
    n = mask.size
    drawn = data.draw(st.lists(st.integers(0, n - 1))) if n else []
    places = np.array(drawn, dtype=np.int64)
    assert bits_at(words, places).tolist() == mask[places].tolist()
    write, new = data.draw(st.sampled_from([(set_bits, True), (clear_bits, False)]))
    mask[places] = new
    write(words, places)
    assert unpacked(words, n).tolist() == mask.tolist()
    assert words.tolist() == packed(mask).tolist()


@st.composite
def sets(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.sampled_from([0, 1, 63, 64, 65, 1000, 10_000]))
    ids = rng.permutation(20_000)[:n].astype(np.uint64)
    return NodeSet(
        NodeIndex(ids), packed(rng.random(n) < draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])))
    )


@given(sets(), st.data())
def test_a_few_positions_are_found_as_in_the_array_of_all_ids(nodes, data):
    ids = nodes.everyone.ids[unpacked(nodes.words, nodes.everyone.ids.size)].tolist()
    assert len(nodes) == len(ids)
    drawn = data.draw(st.lists(st.integers(-len(ids), len(ids) - 1), max_size=5)) if ids else []
    which = np.array(drawn, dtype=np.int64)
    assert nodes.at(which).tolist() == [ids[i] for i in which]
    assert nodes.ids.tolist() == ids
    assert nodes.at(slice(1, None, 2)).tolist() == ids[1::2]
    assert nodes.at(np.ones(len(ids), dtype=np.bool_)).tolist() == ids


@given(sets(), st.sets(st.integers(0, 20_000)))
def test_nodes_are_counted_that_are_in_the_set(nodes, others):
    assert nodes.n_of(others) == len(others & set(nodes.ids.tolist()))


@pytest.mark.parametrize("n", [3, 10_000])
def test_a_position_beyond_the_last_node_is_an_error(n):
    with pytest.raises(IndexError):
        NodeSet.of(np.arange(n, dtype=np.uint64)).at(np.array([n]))


def test_a_few_candidates_of_many_are_taken_without_the_ids_of_all():
    history = History()
    history.picked(4242, 1.0)
    nodes = NodeSet.of(np.arange(10_000, dtype=np.uint64))
    few = history.candidates(nodes).take(np.array([7, 4242]))
    assert few.node_ids.tolist() == [7, 4242]
    assert few.times_picked.tolist() == [0, 1]
    assert "ids" not in vars(nodes)
