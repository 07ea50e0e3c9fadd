"""What the page of speed says in words stands in the results of its benchmarks."""

import pytest
from published import figures, page, rows

CPU = "clients per processor second, "


@pytest.fixture(scope="module")
def text():
    return page("speed.md")


@pytest.fixture(scope="module")
def batched():
    return {
        (row["what"].removeprefix(CPU), row["model"], row["together"]): row
        for row in rows("batched")
    }


@pytest.fixture(scope="module")
def clients():
    return {
        (row["what"].removeprefix("clients per second, "), row["a round"]): row
        for row in rows("clients")
    }


def test_what_the_program_reaches(text, batched):
    said = figures(text, "The program trains # (32 clients), # (128) and # (512) of what")
    program = "batched, the program alone"
    reached = [batched[program, "64-32-10", n]["ratio to the limit"] for n in (32, 128, 512)]
    assert said == reached
    low, high, least, most = figures(
        text, "is trained # to # times as fast as by the loop, and the program reaches # to #"
    )
    ratios = [batched["batched", "convolutions", n]["ratio to the loop"] for n in (32, 128)]
    assert [round(x) for x in ratios] == [low, high]
    limits = [batched[program, "convolutions", n]["ratio to the limit"] for n in (32, 128)]
    assert sorted(limits) == [least, most]
    faster, part = figures(text, "of `shakespeare` # times, and #")
    assert batched["batched", "recurrent", 32]["ratio to the loop"] == pytest.approx(
        faster, abs=0.05
    )
    assert batched[program, "recurrent", 32]["ratio to the limit"] == part


def test_what_messages_take_of_the_time(text):
    by = {row["what"].removeprefix(CPU): row["median"] for row in rows("peers")}
    assert "Messages take a third to two fifths of its time" in text
    assert 1 / 3 < 1 - by["batched"] / by["batched, the program alone"] < 2 / 5


def test_a_gpu_gains_little_for_few_and_small_clients():
    found = {
        (row["what"].removeprefix("clients per second, batched "), row["model"], row["together"]): (
            row["ratio to one thread"]
        )
        for row in rows("batched_gpu")
    }
    with_messages = {key[1:]: x for key, x in found.items() if key[0] == "with messages, GPU"}
    small = [x for (model, _), x in with_messages.items() if model == "64-32-10"]
    assert max(small) < 2
    assert all(x > 3 for (model, n), x in with_messages.items() if n >= 128 and model != "64-32-10")
    assert all(x < 3 for (_, n), x in with_messages.items() if n < 128)


def test_beside_the_engine_of_flower(text, clients):
    said = figures(
        text, "`processes` #, # and # times as many clients a second, `batched` #, # and #"
    )
    sizes = 64, 256, 1024
    for way, own, digits in (("2 processes", said[:3], 0.06), ("batched", said[3:], 0.5)):
        assert [clients[way, n]["to Flower"] for n in sizes] == pytest.approx(own, abs=digits)
    low, high = figures(text, "`inline` trains # to # times as many as a loop by hand")
    least, most = figures(text, "two Ray actors # to # times as many as one")
    loop = sorted(clients["inline", n]["to the loop"] for n in sizes)
    assert [loop[0], loop[-1]] == pytest.approx([low, high], abs=0.05)
    actors = sorted(
        clients["2 Ray actors", n]["median"] / clients["1 Ray actor", n]["median"] for n in sizes
    )
    assert [actors[0], actors[-1]] == pytest.approx([least, most], abs=0.05)


def test_what_an_empty_app_moves(text):
    found = {(row["what"], row["devices"], row["in flight"]): row for row in rows("messages")}
    (moved,) = figures(text, "An empty app moves # messages a second in one thread")
    million, gib = figures(text, "a million devices with 10,000 in flight #, in # GiB")
    small = found["messages per second", 1000, 1000]["median"]
    large = found["messages per second", 10**6, 10**4]
    assert (moved, million) == pytest.approx((small, large["median"]), abs=5)
    assert large["peak MiB of all"] / 1024 == pytest.approx(gib, abs=0.05)
    phones, many = figures(
        text, "# a second on 2,000 phones with 100 jobs in flight, # on a million with 10,000"
    )
    replies = [
        found["replies per second, FedBuff", n, m]["median"]
        for n, m in ((2000, 100), (10**6, 10**4))
    ]
    assert replies == pytest.approx([phones, many], abs=5)


def test_what_costs_of_each_message_cost(text):
    by = {row["what"]: row["ratio"] for row in rows("against") + rows("against_million")}
    few = [by[f"messages per second, {n}"] for n in ("1 device", "10 devices", "50 devices")]
    assert min(few) > 1
    thousand, others = figures(
        text, "# % with 1,000, and # % under FedBuff and in training `batched`"
    )
    slower = {
        "messages per second, 1,000 devices": thousand,
        "replies per second, FedBuff, 100 of 2,000 phones": others,
        "clients per second, batched, 256": others,
    }
    for what, percent in slower.items():
        assert 100 * (1 - by[what]) == pytest.approx(percent, abs=0.5)
    million, faster = figures(text, "in flight it is # % slower, and # % faster under FedBuff")
    (each, buffered) = (by[row["what"]] for row in rows("against_million"))
    assert 100 * (1 - each) == pytest.approx(million, abs=0.5)
    assert 100 * (buffered - 1) == pytest.approx(faster, abs=0.51)
