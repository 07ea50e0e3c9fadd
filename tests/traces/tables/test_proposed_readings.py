"""The command to type next is right by names or by cells, and is left out where neither tells."""

import re

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import TraceSet
from fedstale.traces.tables import TableOptions, UnclearLogError, read_table

T = 1_717_228_800  # 2024-06-01 08:00 UTC
K = np.arange(40)
STAMPS = [str(at) for at in pd.to_datetime(T + 300 * K, unit="s", utc=True)]
LOCAL = [f"{1 + k // 20:02}.{6 + k % 2:02}.2024 {k % 20:02}:00:00" for k in K]
LATER = [f"{1 + k // 20:02}.{6 + k % 2:02}.2024 {k % 20:02}:30:00" for k in K]
HOSTS = [f"box{k % 4}" for k in K]
UNEVEN = [f"{12.5 + k % 17:.2f}" for k in K]


def proposed(frame: pd.DataFrame) -> str | None:
    """Return the options to type next, None if there are none; empty if nothing is asked.

    With those options the log is read.
    """
    frame = frame.astype("str")
    try:
        read_table(frame, TableOptions())
    except UnclearLogError as problem:
        words = problem.words
        given = dict(zip(words[::2], words[1::2], strict=True))
        if given:
            columns = dict(re.findall(r"(\w+)=(\S+)", given.get("--columns", "")))
            values = tuple(filter(None, given.get("--online-values", "").split(",")))
            more = {"time_zone": given.get("--time-zone"), "kind": given.get("--kind")}
            form = given.get("--time-format")
            read_table(
                frame,
                TableOptions(columns=columns, online_values=values, time_format=form, **more),
            )
        return " ".join(words) or None
    return ""


SPANS = {
    "visitId": K,
    "watchUUID": HOSTS,
    "visitBegin": STAMPS,
    "visitDuration": [f"00:{k:02}:00" for k in K],
}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param(SPANS, "", id="a duration by name"),
        pytest.param(dict(reversed(SPANS.items())), "", id="in another order"),
        pytest.param(
            {"Rechner": HOSTS, "Beginn": STAMPS, "Dauer": [f"{k} min" for k in K]},
            "--columns start=Beginn duration=Dauer device=Rechner",
            id="a duration by its cells",
        ),
        pytest.param(
            {"Fin": LATER, "Poste": HOSTS, "Debut": LOCAL},
            "--columns start=Debut end=Fin device=Poste --time-format %d.%m.%Y %H:%M:%S "
            "--time-zone UTC",
            id="the later of two times is the end",
        ),
        pytest.param(
            {"unit": HOSTS, "kom": T + 300 * K, "gik": T + 300 * K + 60},
            "--columns start=kom end=gik device=unit",
            id="two times that count since 1970",
        ),
        pytest.param(
            {"when": STAMPS, "box": HOSTS, "relay": K % 2, "volts": UNEVEN},
            "--columns device=box online=relay",
            id="a state among numbers",
        ),
        pytest.param(
            {
                "probe": HOSTS,
                "ts": STAMPS,
                "answer": ["lost" if k % 9 == 8 else f"{k}.5" for k in K],
            },
            "--columns online=answer --online-values >=0",
            id="numbers, or a word that none came",
        ),
        pytest.param(
            {"Uhrzeit": STAMPS, "Mast 1 (kbit/s)": UNEVEN, "Mast 2 (kbit/s)": UNEVEN[::-1]},
            "--columns time=Uhrzeit downlink=*",
            id="a column for each host, with units",
        ),
        pytest.param(
            {"Time": STAMPS, "a": [f"{k} Mb/s" for k in K], "b": [f"{k} kB/s" for k in K]},
            "--columns downlink=*",
            id="a column for each host, with units in its cells",
        ),
        pytest.param(
            {"ts": STAMPS, "host": "a", "metric": "uplink_kbps", "value": UNEVEN},
            "",
            id="a value that another column names",
        ),
        pytest.param(
            {"reading": UNEVEN, "item": "vm.memory", "at": STAMPS, "host": "a"},
            None,
            id="no quantity",
        ),
        pytest.param(
            {"ts": STAMPS, "host": "a", "metric": "vm.memory", "value": UNEVEN},
            None,
            id="a value of nothing known",
        ),
        pytest.param(
            {"ts": STAMPS, "host": HOSTS, "cpu_idle": UNEVEN, "mem": UNEVEN}, None, id="load"
        ),
        pytest.param(
            {"%idle": UNEVEN, "%user": UNEVEN[::-1], "ts": STAMPS, "box": HOSTS}, None, id="percent"
        ),
        pytest.param(
            {"ts": STAMPS, "box": HOSTS, "lamp": K % 2, "door": K // 2 % 2},
            None,
            id="two states, of which neither is named",
        ),
        pytest.param({"Time": STAMPS, "a": UNEVEN, "b": UNEVEN[::-1]}, None, id="unknown numbers"),
        pytest.param(
            {"ride_id": K, "bike": HOSTS, "left": STAMPS, "came": [*STAMPS[1:], "2024-06-02"]},
            "--columns start=left end=came device=bike",
            id="a number for each row is no device",
        ),
        pytest.param(
            {"caller": HOSTS, "begin": STAMPS, "seconds": K + 60},
            "--columns device=caller",
            id="a name that is a unit",
        ),
        pytest.param(
            {"t": STAMPS, "dst": [f"10.0.0.{k % 3}" for k in K], "success": K % 2},
            "--columns device=dst online=success",
            id="addresses are no numbers",
        ),
        pytest.param(
            {"kom": STAMPS, "gik": STAMPS[::-1], "box": HOSTS}, None, id="times in no order"
        ),
    ],
)
def test_a_proposal_is_what_names_and_cells_support(columns, words):
    assert proposed(pd.DataFrame(columns)) == words


KEYS = {
    "net.in.bytes": 5_000_000 + K,
    "agent.alive": K % 2,
    "sys.temp": 20.5 + K,
}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2)])
def test_of_several_quantities_the_one_that_tells_when_devices_are_online_is_proposed(order):
    names = [list(KEYS)[k] for k in order]
    rows = [
        pd.DataFrame({"host": "a", "clock": T + 60 * K, "key": n, "value": KEYS[n].astype("str")})
        for n in names
    ]
    log = pd.concat(rows, ignore_index=True)
    with pytest.raises(UnclearLogError, match="is of what 'key' says") as problem:
        read_table(log, TableOptions())
    words = dict(zip(*[iter(problem.value.words)] * 2, strict=True))
    assert words["--only"] == "key=agent.alive"
    roles = dict(text.split("=") for text in words.get("--columns", "online=value").split())
    traces = read_table(log, TableOptions(columns=roles, only=(words["--only"],))).traces
    assert traces.availability.windows(0)[0].tolist() == [
        [60 * k, 60 * k + 60] for k in range(1, 39, 2)
    ]


def test_a_quantity_of_an_unknown_name_is_told_by_its_values():
    log = pd.DataFrame(
        {
            "hostid": "h1",
            "itemkey": np.where(K % 2, "icmpping", "icmppingloss"),
            "clock": T + 60 * (K // 2),
            "lastvalue": np.where(K % 2, K // 2 % 2, 100 - K // 2 % 2 * 100).astype("str"),
        }
    )
    with pytest.raises(UnclearLogError) as problem:
        read_table(log, TableOptions())
    assert problem.value.words == ("--columns", "online=lastvalue", "--only", "itemkey=icmpping")


@pytest.mark.parametrize(("name", "size"), [("downlink_mbps", 1e6), ("rx_kB/s", 8e3)])
def test_a_quantity_that_another_column_names_has_its_unit(name, size):
    log = pd.DataFrame(
        {"at": T + 60 * K[:3], "host": "a", "_field": name, "_value": ["1", "2", "3"]}
    )
    read = read_table(log, TableOptions())
    assert read.traces.downlink.segments(0)[1].tolist() == [size, 2 * size]
    assert name in read.interpretation["downlink"]


@pytest.mark.parametrize(
    "names", [("cpu_percent", "mem_used"), ("System load", "Load (15 min)"), ("load1", "load5")]
)
def test_load_alone_is_said_to_be_load(names):
    log = pd.DataFrame({"ts": STAMPS, "host": HOSTS} | dict.fromkeys(names, UNEVEN))
    with pytest.raises(TraceError, match=f"the load in '{names[0]}'"):
        read_table(log, TableOptions())


@pytest.mark.parametrize(
    ("kind", "windows"), [("samples", [[0, 600], [1200, 1800]]), ("battery", [[300, 900]])]
)
def test_each_kind_of_a_log_of_several_is_read_from_its_own_columns(kind, windows):
    log = pd.DataFrame(
        {
            "time": STAMPS[:7],
            "device.id": "p",
            "battery.plugged": [0, 1, 1, 0, 0, 0, 0],
            "wifi.connected": [1, 1, 0, 0, 1, 1, 0],
        }
    ).astype("str")
    with pytest.raises(UnclearLogError, match="samples or battery"):
        read_table(log, TableOptions())
    traces = TraceSet.from_frame(log, kind=kind)
    assert traces.availability.windows(0)[0].tolist() == windows


@pytest.mark.parametrize(("values", "words"), [(["up", "idle"], "up"), (["busy", "idle"], None)])
def test_values_are_proposed_if_their_words_are_known(values, words):
    log = pd.DataFrame({"host": "a", "ts": STAMPS, "status": values * 20})
    assert proposed(log) == (words and f"--online-values {words}")
