"""Logs in the manner of real exports become traces at the first or the second command.

The first command either converts, or prints the command to type next.
"""

import json
import shlex
import sys
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.traces import TraceSet

T = 1_717_228_800  # 2024-06-01 08:00 UTC


def found(traces: TraceSet):
    """Return the windows of each device, or where each of its rates begins and what it is."""
    if traces.availability is not None:
        windows = [traces.availability.windows(k)[0] for k in range(traces.n_devices)]
        return {d: w.tolist() for d, w in zip(traces.device_ids, windows, strict=True)}
    segments = [traces.downlink.segments(k) for k in range(traces.n_devices)]
    return {
        device: (starts.tolist(), rates.tolist())
        for device, (starts, rates, _) in zip(traces.device_ids, segments, strict=True)
    }


def lines(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


PROMETHEUS = json.dumps(
    {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                {
                    "metric": {"__name__": "up", "instance": f"edge-{i}:9100", "job": "node"},
                    "values": [[T + 60 * k, str(int((k + i) % 3 > 0))] for k in range(6)],
                }
                for i in range(2)
            ],
        },
    }
)
ZABBIX = json.dumps(
    {
        "jsonrpc": "2.0",
        "result": [
            {"itemid": str(23 + i), "clock": str(T + 60 * k), "value": str(int(k < 2)), "ns": "7"}
            for k in range(4)
            for i in range(2)
        ],
        "id": 1,
    }
)
ANDROID = "".join(
    json.dumps(
        {
            "timestampMillis": (T + 600 * k) * 1000,
            "deviceUUID": "u-1",
            "battery": {"status": status, "plugged": plugged, "level": 50 + k},
        }
    )
    + "\n"
    for k, (status, plugged) in enumerate([(2, 1), (5, 2), (3, 0), (3, 0)])
)
CLOUDWATCH = lines(
    "Full label,StatusCheckPassed,StatusCheckPassed",
    "Label,i-0abc,i-0def",
    *(f"2024/06/01 08:0{k}:00,{float(k != 2)},{float(k < 2)}" for k in range(5)),
)
SMOKEPING = lines(
    "                      uptime                loss              median",
    "",
    *(f"{T + 300 * k}: nan {loss:.10e} 1.5e-02" for k, loss in enumerate([0, 20, 100, 0])),
)
SNMP = lines(
    "hostname,ifName,polled_at,ifHCInOctets,ifHCOutOctets",
    *(
        f"sw,eth0,2024-06-01 08:{5 * k:02}:00+0000,{n},{n // 10}"
        for k, n in enumerate([37_500_000, 75_000_000, 0, 37_500_000])
    ),
)
SADF = lines(
    "# hostname;interval;timestamp;IFACE;rxpck/s;txpck/s;rxkB/s;txkB/s",
    *(
        f"node;600;2024-06-01 08:{10 * k:02}:01 UTC;{name};1.00;2.00;{rate}.00;10.00"
        for k in range(4)
        for name, rate in (("lo", 0), ("eth0", 100 + k))
    ),
)
SYSLOG = lines(
    "Jun  1 08:00:00 cam-1 netmon[312]: link is up",
    "Jun  1 08:30:00 cam-2 netmon[312]: link is up",
    "Jun  1 09:00:00 cam-1 netmon[312]: link is down",
    "Jun  1 10:00:00 cam-2 netmon[312]: link is down",
    "Jun  1 11:00:00 cam-1 netmon[312]: link is up",
)
PRTG = lines(
    '"Date Time","Date Time(RAW)","Traffic In (Speed)","Traffic In (Speed)(RAW)","Coverage"',
    *(
        f'"{k + 10}.06.2024 08:00:00 - 08:05:00","4544{k}.33","{k + 1}.5 Mbit/s","{k}","100 %"'
        for k in range(8)
    ),
    '"Sums (of 8 values)","","","",""',
    '"Averages (of 8 values)","","9 Mbit/s","",""',
)
INFLUX = lines(
    "#group,false,false,true,true,false,false,true,true",
    "#datatype,string,long,dateTime:RFC3339,dateTime:RFC3339,dateTime:RFC3339,long,string,string",
    "#default,_result,,,,,,,",
    ",result,table,_start,_stop,_time,_value,_field,host",
    *(
        f",,{i},2024-06-01T08:00:00Z,2024-06-01T09:00:00Z,2024-06-01T08:{5 * k:02}:00Z,"
        f"{int(k != i)},online,h{i}"
        for i in range(2)
        for k in range(4)
    ),
)
IPERF = json.dumps(
    {
        "start": {"connected": [{"socket": 5, "local_host": "10.0.0.2"}], "version": "iperf 3.9"},
        "intervals": [
            {
                "streams": [{"socket": 5, "start": k, "end": k + 1, "bits_per_second": 1e6 * k}],
                "sum": {"start": k, "end": k + 1, "bits_per_second": 1e6 * k},
            }
            for k in range(4)
        ],
        "end": {"sum_sent": {"bytes": 3}},
    }
)
GERMAN = lines(
    "Ereignis;Rechner;Datum;Uhrzeit;Dauer",
    "An;PC1;21.10.2024;08:15:00;1,0",
    "An;PC2;21.10.2024;08:15:00;1,5",
    "Aus;PC1;21.10.2024;09:15:00;2,0",
    "Aus;PC2;21.10.2024;10:15:00;2,5",
    "An;PC1;22.10.2024;08:15:00;3,0",
).encode("utf-16")
WEEKS = lines(
    "asset\tbegin\tlasted",
    "van 1\t2024-W23-1T08:00\t1h 20m",
    "van 1\t2024-W23-2T08:00\t00:20:00",
    "van 2\t2024-W23-1T09:00\t2 hours",
)
UNITS = lines(
    "node;ts;dl;ul",
    ";µs;kbit/s;kbit/s",
    *(f"n;{(T + 10 * k) * 10**6};{'N/A' if k == 1 else 800 + k};80" for k in range(4)),
)
GRAFANA = lines(
    "sep=;",
    "Time;edge-a;10.0.0.7",
    *(f"{1000 * (T + 60 * k):.9e};{k + 1}.5 Mb/s;{20 * k} kb/s" for k in range(3)),
)
ELASTIC = json.dumps(
    {
        "took": 3,
        "hits": {
            "total": {"value": 4},
            "hits": [
                {
                    "_id": f"x{k}",
                    "_source": {
                        "@timestamp": f"2024-06-01T08:0{k}:00.000Z",
                        "monitor": {"status": "up" if k < 2 else "down", "ip": "10.0.0.1"},
                    },
                }
                for k in range(4)
            ],
        },
    }
)

H = 3600.0


@pytest.mark.parametrize(
    ("name", "content", "asked", "expected"),
    [
        pytest.param(
            "up.json",
            PROMETHEUS,
            "--columns online=value",
            {"edge-0:9100": [[60, 180], [240, 300]], "edge-1:9100": [[0, 120], [180, 300]]},
            id="Prometheus, range query",
        ),
        pytest.param(
            "history.json",
            ZABBIX,
            "--columns 'device=itemid online=value'",
            {"23": [[0, 120]], "24": [[0, 120]]},
            id="Zabbix, history",
        ),
        pytest.param(
            "battery.jsonl",
            ANDROID,
            "--online-values 2,5",
            {"u-1": [[0, 1200]]},
            id="Android, BatteryManager",
        ),
        pytest.param(
            "cloudwatch.csv",
            CLOUDWATCH,
            "--columns 'time=Label online=*' --time-zone UTC",
            {"i-0abc": [[0, 120], [180, 240]], "i-0def": [[0, 120]]},
            id="CloudWatch",
        ),
        pytest.param(
            "router.txt",
            SMOKEPING,
            "--columns 'time=1 online=loss' --device router --online-values '<100'",
            {"router": [[0, 600]]},
            id="SmokePing, of rrdtool",
        ),
        pytest.param(
            "ports.csv",
            SNMP,
            "--unit bytes/total --unit uplink=bytes/total",
            {"sw": ([0, 300], [1e6, 1e6])},
            id="SNMP, counters that begin again",
        ),
        pytest.param(
            "net.csv",
            SADF,
            "--only IFACE=eth0",
            {"node": ([0, 600, 1200], [800e3, 808e3, 816e3])},
            id="sadf -d",
        ),
        pytest.param(
            "syslog",
            SYSLOG,
            "--columns online=message --time-format 'YEAR %b %d %H:%M:%S' --time-zone UTC",
            {"cam-1": [[0, H]], "cam-2": [[H / 2, 2 * H]]},
            id="syslog, without a year",
        ),
        pytest.param(
            "wan.csv",
            PRTG,
            "--device wan --time-zone UTC",
            {"wan": ([24 * H * k for k in range(7)], [(k + 1.5) * 1e6 for k in range(7)])},
            id="PRTG, with sums below",
        ),
        pytest.param(
            "influx.csv",
            INFLUX,
            "--columns online=_value",
            {"h0": [[300, 900]], "h1": [[0, 300], [600, 900]]},
            id="InfluxDB, annotated CSV",
        ),
        pytest.param(
            "iperf3.json",
            IPERF,
            "--kind rates --device iperf3 --unit s",
            {"iperf3": ([0, 1, 2], [0, 1e6, 2e6])},
            id="iperf3",
        ),
        pytest.param(
            "ereignisse.csv",
            GERMAN,
            "--columns 'time=Datum+Uhrzeit device=Rechner online=Ereignis' --time-zone UTC "
            "--max-gap none",
            {"PC1": [[0, H]], "PC2": [[0, 2 * H]]},
            id="Windows, in German and UTF-16",
        ),
        pytest.param(
            "vans.tsv",
            WEEKS,
            "--time-zone UTC",
            {"van 1": [[0, 4800], [24 * H, 24 * H + 1200]], "van 2": [[H, 3 * H]]},
            id="weeks and durations",
        ),
        pytest.param(
            "links.csv",
            UNITS,
            None,
            {"n": ([0, 20], [800e3, 802e3])},
            id="a row of units, microseconds and N/A",
        ),
        pytest.param(
            "panel.csv",
            GRAFANA,
            "--columns 'downlink=*'",
            {"10.0.0.7": ([0, 60], [0, 20e3]), "edge-a": ([0, 60], [1.5e6, 2.5e6])},
            id="Grafana, one column a host",
        ),
        pytest.param("es.json", ELASTIC, None, {"10.0.0.1": [[0, 120]]}, id="Elasticsearch"),
    ],
)
def test_an_export_is_converted_at_the_second_command(
    tmp_path, monkeypatch, *, name, content, asked, expected
):
    log, out = tmp_path / name, tmp_path / "own.parquet"
    log.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["traces", "convert", str(log), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fedstale", *words])
    result = CliRunner().invoke(app, words)
    assert (result.exit_code == 2) is (asked is not None), result.output
    if asked is not None:
        command = shlex.split(result.stderr.rpartition("type next: ")[2])
        # A log that states no year is taken to be of its file's.
        year = str(datetime.fromtimestamp(log.stat().st_mtime, UTC).year)
        more = shlex.split(asked.replace("YEAR", year))
        assert command[-len(more) :] == more
        result = CliRunner().invoke(app, command[command.index("traces") :])
        assert result.exit_code == 0, result.output
    traces = TraceSet.read(out)
    assert found(traces) == expected
