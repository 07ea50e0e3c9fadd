"""What is named in `saved` survives a file, with its kinds of containers."""

from collections import Counter, deque
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_updates import packed

from fedstale.strategies import StaleStrategy
from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.types import Stateful
from fedstale.strategies.weighting import Weighting

KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.text(max_size=3), st.integers())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=10,
)


class Part(Stateful):
    saved = ("n", "seen")

    def __init__(self):
        self.n, self.seen = 0, Counter()


class Whole(Stateful):
    saved = ("part", "last", "model", "by_node")

    def __init__(self):
        self.part, self.last = Part(), deque(maxlen=2)
        self.model, self.by_node = {}, {}
        self.untold = "kept to itself"


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_file_gives_back_what_was_written_with_kinds_and_keys(state):
    assert repr(unpacked(packed(state))) == repr(state)
    assert packed(state) == packed(deepcopy(state)), "equal states make equal files"


@pytest.mark.parametrize("name", ["array", "tuple", "dict", "", "a/b"])
def test_arrays_and_dicts_may_have_any_names(name):
    state = unpacked(packed({"m": {name: np.arange(3)}, name: {name: (name, {name: 1})}}))
    assert state["m"][name].tolist() == [0, 1, 2]
    assert state[name] == {name: (name, {name: 1})}


def test_object_goes_on_as_it_was_saved():
    one, two = Whole(), Whole()
    one.part.n, one.by_node[2**63 + 5] = 3, (1.5, "x")
    one.part.seen["bad"] += 2
    one.last.extend([1.0, 2.0, 3.0])
    one.model["w"] = np.ones(2)
    two.load_state_dict(unpacked(packed(one.state_dict())))
    assert (two.part.n, two.part.seen, two.by_node) == (3, {"bad": 2}, {2**63 + 5: (1.5, "x")})
    assert list(two.last) == [2.0, 3.0]
    two.last.append(4.0)
    assert list(two.last) == [3.0, 4.0]
    two.model["w"] += 1.0
    assert one.model["w"].tolist() == [1.0, 1.0]


def test_counts_that_others_look_at_stay_the_same_object():
    whole = Whole()
    seen = whole.part.seen
    other = Whole()
    other.part.seen["late"] = 4
    whole.load_state_dict(other.state_dict())
    assert seen == {"late": 4}


def test_part_of_a_user_is_in_the_repr_of_the_strategy_with_its_settings():
    class Halving(Weighting):
        def __init__(self, after, *, floor=0.1):
            self.after, self.floor = after, floor
            self._seen = 0

        def weigh(self, update):
            return 1.0

    strategy = StaleStrategy(weighting=Halving(3, floor=0.2))
    assert repr(strategy) == "StaleStrategy(weighting=Halving(3, floor=0.2))"


def test_what_is_not_named_is_not_saved():
    assert set(Whole().state_dict()) == set(Whole.saved)
