import hashlib
import json
import re
import shutil
import sys
from importlib import resources

import pytest
import tomli_w
from made_run import EVERYTHING, HOSTILE, write_run
from read_page import Seen, plots_of

import fedstale
from fedstale.errors import ConfigError, ProtocolError
from fedstale.live.server import Board
from fedstale.reports.devices import DRAWN, JOBS
from fedstale.reports.figure import time_text
from fedstale.reports.run import Run, report_at_end
from fedstale.runs import DEPLOYED


def test_a_report_shows_every_figure_that_the_run_has_data_for(page_of):
    text = page_of()
    expected = {
        *(
            "metric-0",
            "metric-1",
            "states",
            "failures",
            "device-hours",
            "traffic",
            "participation",
        ),
        *("staleness", "weights"),
    }
    plots = plots_of(text)
    assert set(plots) == expected
    for name, plot in plots.items():
        assert f'id="plot-{name}"' in text
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in plot["traces"])
        assert plot["layout"]["xaxis"]["title"]["text"]
    assert '<section id="timeline">' in text


@pytest.mark.parametrize(
    ("executor", "name"), [("inline", "virtual time"), (DEPLOYED, "time")], ids=str
)
def test_time_is_virtual_in_a_simulation_and_device_hours_are_a_sum(
    page_of, tmp_path, executor, name
):
    page = page_of(executor=executor)
    cards = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    run = Run(tmp_path / "run")
    assert cards[name] == time_text(run.end_s)
    hours = float(re.search(r"Of ([\d.]+) device-hours", page)[1])
    assert hours == pytest.approx(run.jobs["busy_s"].sum() / 3600, rel=0.01)
    titles = {plot["layout"]["xaxis"]["title"]["text"] for plot in plots_of(page).values()}
    assert any(title.startswith(f"{name} (") for title in titles)


def test_a_run_that_took_advice_shows_each_figure_before_and_now(page_of, tmp_path):
    write_run(tmp_path / "earlier", n_jobs=20, n_devices=2)
    assert "→" not in re.search(r'<dl class="cards">.*?</dl>', page_of(n_devices=2))[0]
    taken = {"before": "../earlier", "do": "Set x = 2", "promised": 0.4, "achieved": 0.37}
    (tmp_path / "run" / "advised.json").write_text(json.dumps(taken), encoding="utf-8")
    page = Run(tmp_path / "run").report().read_text(encoding="utf-8")
    shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert shown["jobs"] == "20 → 70"
    assert shown["devices used"].count("of") == 1, "what is the same stands once"
    assert "Set x = 2: 40% promised, 37% saved" in page


def test_the_same_run_gives_the_same_bytes(tmp_path):
    folder = write_run(tmp_path / "run")
    first = Run(folder).report().read_bytes()
    assert Run(folder).report(tmp_path / "other.html").read_bytes() == first


def test_the_report_of_the_demo_has_a_third_of_a_megabyte_and_no_page_much_more(tmp_path):
    run = fedstale.simulate("digits", traces="synthetic:100", out=tmp_path / "demo")
    assert run.report().stat().st_size < 350_000
    most = {"n_jobs": JOBS, "n_devices": DRAWN, **EVERYTHING}
    assert Run(write_run(tmp_path / "large", **most)).report().stat().st_size < 550_000


def test_a_report_names_no_address_that_a_browser_would_ask_for(page_of):
    text = page_of()
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "default-src 'none'" in text
    assert "/tmp" not in text


def test_a_report_begins_with_strategy_selector_and_traces_and_shows_no_folder(page_of, tmp_path):
    about = {"strategy": "FedBuff(10, 5)", "selector": "AgentSelector('/home/me/own agent')"}
    reason = "FileNotFoundError: '/home/me/my data/a.csv' (/home/me/app/task.py:3)"
    settings = {"app": "/home/me/my app", "traces": "/home/me/phones.parquet"}
    folder = write_run(tmp_path / "run", about=about, reason=reason)
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    text = "".join(Seen((page := Run(folder).report()).read_text()).text)
    assert text.split("Strategy: FedBuff; selector: AgentSelector; traces: phones.parquet.")[1:]
    assert 'app = "my app"' in text
    assert "FileNotFoundError: 'a.csv' (task.py:3)" in text
    assert "/home" not in page.read_text()


def test_hostile_names_add_no_element(tmp_path, page_of):
    peaceful = Seen(page_of()).tags
    shutil.rmtree(tmp_path / "run")
    names = [f"{HOSTILE}{i}" for i in range(7)]
    text = page_of(names=names, app=HOSTILE, reason=HOSTILE)
    assert Seen(text).tags.count("script") == peaceful.count("script")
    assert "img" not in Seen(text).tags
    assert HOSTILE in "".join(Seen(text).text)


def test_a_name_that_looks_like_a_place_in_the_template_is_left_alone(page_of):
    assert "{{timeline}}" in "".join(Seen(page_of(app="{{timeline}}")).text)


def test_a_run_without_any_job_has_a_page_without_figures(page_of):
    assert plots_of(page_of(n_jobs=0)) == {}


def test_numbers_that_are_not_finite_become_gaps(page_of):
    metrics = [(float(t), t, "server", "loss", v) for t, v in enumerate((1.0, float("nan"), 2.0))]
    plot = plots_of(page_of(metrics=metrics))["metric-1"]
    assert plot["traces"][0]["y"] == [1.0, None, 2.0]


@pytest.mark.parametrize("name", ["config.toml", "events.parquet", "metrics.parquet"])
def test_a_missing_file_is_one_sentence_that_names_it(tmp_path, name):
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"has no {re.escape(name)}: expected") as caught:
        Run(folder).report()
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("events.parquet", b"PAR1"), ("summary.json", b"{"), ("summary.json", b"{}")],
)
def test_a_damaged_file_is_one_sentence(tmp_path, name, content):
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    with pytest.raises(ProtocolError, match="run fedstale simulate again") as caught:
        Run(folder).report()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        Run(tmp_path / "nothing")


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        Run(folder).report(tmp_path / "nowhere" / "report.html")


def test_the_program_that_draws_is_the_released_one():
    # Version 4.6.1 of the package chart.js on npm, dist/chart.umd.min.js.
    program = resources.files("fedstale.reports") / "vendor" / "chart.js"
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    assert digest == "87364cc2b2a76a6684929e7d6b80b18a897794db38400caff1fcf1791c6925d2"


def test_a_run_leaves_its_page(tmp_path):
    folder = write_run(tmp_path / "run")
    report_at_end(folder)
    assert (folder / "report.html").exists()


def test_without_plotly_only_figures_for_notebooks_are_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    run = Run(write_run(tmp_path / "run"))
    run.report()
    with pytest.raises(ConfigError, match=r"needs plotly, .* pip install plotly$"):
        run.plot("accuracy")
    assert Board("digits").snapshot()["cards"]
