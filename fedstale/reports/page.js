"use strict";
// Draws the figures of a page with Chart.js. A figure is data in the words of plotly (figure.py), of
// which this understands what fedstale's figures use: lines, marks, bands, bars, rows of bars.
(() => {
  const root = document.documentElement;
  let figures = JSON.parse(document.getElementById("plots").textContent);
  const button = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;

  const colour = (role) => getComputedStyle(root).getPropertyValue("--" + role).trim();
  const fontFamily = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

  const SYMBOLS = {
    circle: "circle", square: "rect", diamond: "rectRot", cross: "cross", x: "crossRot",
    "triangle-up": "triangle", star: "star",
  };
  const DASHES = {
    solid: [], dash: [8, 4], dot: [2, 3], dashdot: [8, 3, 2, 3], longdash: [14, 5],
    longdashdot: [14, 4, 2, 4],
  };
  // Chart.js only strokes these: without a border they are not there.
  const STROKED = new Set(["cross", "crossRot", "star"]);
  const STEPS = { hv: "before", vh: "after", hvh: "middle" };

  const percent = (value, digits) => (100 * value).toFixed(digits) + "%";
  const plain = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);
  const grouped = (value) => (Math.abs(value) >= 1e4 ? value.toLocaleString("en") : plain(value));

  // What is said of a point: the words of its trace, with {x}, {y}, {text} and {customdata} in them.
  const said = ({ trace, x, y, i }) => {
    const at = { x, y, text: trace.text && trace.text[i], customdata: trace.customdata && trace.customdata[i] };
    const where = grouped(x);
    if (!trace.hovertemplate) return `${trace.name ? trace.name + ": " : ""}${where}, ${grouped(y)}`;
    return trace.hovertemplate.replace("<extra></extra>", "").replace(
      /%\{(\w+)(?::([^}]*))?\}/g,
      (_, name, format) => (format && format.endsWith("%") ? percent(at[name], 0) : plain(at[name])),
    );
  };

  const looks = (trace) => {
    const value = colour(trace.meta), marker = trace.marker || {}, line = trace.line || {};
    const hasMarks = (trace.mode || "").includes("markers");
    const isHollow = (marker.symbol || "").endsWith("-open");
    const symbol = SYMBOLS[(marker.symbol || "circle").replace("-open", "")];
    return {
      borderColor: value, backgroundColor: trace.fill ? value + "33" : value,
      stack: trace.stackgroup,
      borderWidth: line.width === undefined ? 2 : line.width, borderDash: DASHES[line.dash || "solid"],
      stepped: STEPS[line.shape] || false,
      pointRadius: hasMarks ? (marker.size || 5) / 2 : 0, pointHitRadius: 8,
      pointBorderWidth: isHollow || STROKED.has(symbol) ? 2 : 0,
      pointHoverRadius: hasMarks ? (marker.size || 5) / 2 + 1 : 3,
      pointStyle: symbol,
      pointBackgroundColor: isHollow ? colour("card") : value, pointBorderColor: value,
      showLine: trace.mode !== "markers",
      fill: { tonexty: "-1", tozeroy: "origin" }[trace.fill] || false,
    };
  };

  const line = (trace) => ({
    ...looks(trace), label: trace.name, isNamed: trace.showlegend !== false && Boolean(trace.name),
    data: ordered(trace, trace.x.map((x, i) => ({ x, y: trace.y[i], i, trace }))),
  });

  // Chart.js takes points to be in order: it looks at the ends for what an axis has to hold.
  const ordered = (trace, points) => (trace.mode === "markers" ? points.sort((a, b) => a.x - b.x) : points);

  // Bars on intervals of their own: four corners each, and what is said of one is said at its top.
  const bars = (trace) => ({
    ...looks({ ...trace, mode: "lines", line: { width: 0 } }), backgroundColor: colour(trace.meta), fill: "origin",
    label: trace.name, isNamed: trace.showlegend !== false && Boolean(trace.name),
    data: trace.x.flatMap((x, i) => {
      const half = (trace.width ? trace.width[i] : 0.8) / 2;
      const corner = (at, y) => ({ x: at, y, i, trace, middle: x, top: trace.y[i] });
      return [corner(x - half, 0), corner(x - half, trace.y[i]), corner(x + half, trace.y[i]), corner(x + half, 0)];
    }),
  });

  const axis = (own, more) => {
    const format = own.tickformat ? { callback: (value) => percent(value, value * 100 % 1 ? 1 : 0) } : {};
    const made = {
      type: own.type === "log" ? "logarithmic" : "linear",
      title: { display: Boolean(own.title && own.title.text), text: own.title && own.title.text, color: colour("ink") },
      grid: { color: colour("grid"), display: own.showgrid !== false }, border: { color: colour("line") },
      ticks: { color: colour("ink"), maxRotation: 0, autoSkipPadding: 12, includeBounds: false, ...format },
      beginAtZero: own.rangemode === "tozero", ...more,
    };
    // An end of the data that is no round number has no room between round ones for its name.
    made.afterBuildTicks = (scale) => {
      const at = scale.ticks.map(({ value }) => value), gaps = at.slice(1).map((value, i) => value - at[i]);
      const isFull = (gap) => gap === undefined || gap > 0.999 * Math.max(...gaps);
      scale.ticks = scale.ticks.filter((_, i) => (i ? i < gaps.length || isFull(gaps[i - 1]) : isFull(gaps[0])));
    };
    if (own.type === "log") {
      // Of a wide range the powers of ten, of a narrow one 1, 2 and 5 of each.
      made.ticks.callback = (value, i, all) => {
        const leading = Number((value / 10 ** Math.floor(Math.log10(value))).toPrecision(3));
        const isWide = all[all.length - 1].value > 1000 * all[0].value;
        return (isWide ? leading === 1 : [1, 1.5, 2, 3, 5, 7].includes(leading)) ? plain(value) : "";
      };
    }
    if (own.range) {
      const [from, to] = own.range;
      Object.assign(made, { min: Math.min(from, to), max: Math.max(from, to), reverse: from > to });
    }
    if (own.tickvals) {
      made.afterBuildTicks = (scale) => { scale.ticks = own.tickvals.map((value) => ({ value })); };
      made.ticks.callback = (value, i) => own.ticktext[i];
      made.ticks.autoSkip = false;
    }
    return made;
  };

  const common = (names) => ({
    animation: false, responsive: true, maintainAspectRatio: false, parsing: false, normalized: false,
    font: { family: fontFamily, size: 13 }, interaction: { mode: "nearest", intersect: false, axis: "xy" },
    plugins: {
      legend: {
        display: names > 1, align: "start",
        labels: {
          color: colour("ink"), usePointStyle: true, boxHeight: 7, font: { size: 13 },
          filter: (item, data) => data.datasets[item.datasetIndex].isNamed,
        },
      },
      tooltip: {
        displayColors: false, backgroundColor: colour("card"), borderColor: colour("line"), borderWidth: 1,
        bodyColor: colour("ink"), filter: (item) => !item.raw.trace || item.raw.trace.hoverinfo !== "skip",
      },
    },
  });

  const rowsOfBars = (traces, layout) => {
    const labels = [...new Set(traces.flatMap((trace) => trace.y))];
    const datasets = traces.map((trace) => {
      const lengths = new Map(trace.y.map((label, i) => [label, trace.x[i]]));
      return {
        label: trace.name, isNamed: trace.showlegend !== false, data: labels.map((label) => lengths.get(label) || 0),
        backgroundColor: colour(trace.meta), trace,
      };
    });
    const isStacked = layout.barmode === "stack";
    const options = common(datasets.filter((one) => one.isNamed).length);
    delete options.parsing;
    options.indexAxis = "y";
    options.interaction = { mode: "nearest", intersect: true };
    options.plugins.legend.labels.usePointStyle = false;
    options.plugins.legend.labels.boxWidth = 12;
    options.plugins.tooltip.callbacks = {
      title: () => "",
      label: ({ dataset, dataIndex, raw, label }) => {
        const text = dataset.trace.text && dataset.trace.text[dataset.trace.y.indexOf(labels[dataIndex])];
        return `${dataset.label}, ${label}: ${grouped(raw)}${text ? `, ${text}` : ""}`;
      },
    };
    options.scales = {
      x: axis(layout.xaxis, { stacked: isStacked, beginAtZero: true }),
      y: axis(layout.yaxis, { type: "category", stacked: isStacked, grid: { display: false } }),
    };
    options.scales.y.ticks.autoSkip = false;
    return { type: "bar", data: { labels, datasets }, options };
  };

  const onAxes = (traces, layout) => {
    const isStacked = traces.some((trace) => trace.stackgroup);
    const datasets = traces.flatMap((trace, i) => {
      if (trace.stackgroup) return [{ ...line(trace), fill: i ? "-1" : "origin" }];
      if (trace.type === "bar") return [bars(trace)];
      return [line(trace)];
    });
    const options = common(datasets.filter((one) => one.isNamed).length);
    options.plugins.tooltip.callbacks = {
      title: () => "",
      label: ({ raw }) => said({ ...raw, x: raw.middle ?? raw.x, y: raw.top ?? raw.y }),
    };
    // Beside rows of marks, and under bars, values are read off the axis: it has round numbers, and
    // room at its ends.
    const isRead = layout.yaxis.tickvals || traces.some((trace) => trace.type === "bar");
    options.scales = {
      x: axis(layout.xaxis, { bounds: isRead ? "ticks" : "data" }),
      y: axis(layout.yaxis, { stacked: isStacked }),
    };
    return { type: "line", data: { datasets }, options };
  };

  const described = ({ traces, layout }) =>
    (traces.some((trace) => trace.orientation === "h") ? rowsOfBars : onAxes)(traces, layout);

  // A figure with several horizontal axes is drawn against the one that was chosen.
  const chosenAxis = new Map();
  const against = (figure) => {
    const other = figure.others && figure.others[(chosenAxis.get(figure.id) || 0) - 1];
    if (!other) return figure;
    const [own, positions] = other;
    const xaxis = { ...figure.layout.xaxis, ...own };
    const traces = figure.traces.map((trace, i) => ({ ...trace, x: positions[i] }));
    return { ...figure, traces, layout: { ...figure.layout, xaxis } };
  };
  for (const select of document.querySelectorAll("select[data-plot]")) {
    select.addEventListener("change", () => {
      chosenAxis.set(select.dataset.plot, select.selectedIndex);
      const figure = figures.find((one) => one.id === select.dataset.plot);
      if (place(figure).chart) place(figure).chart.isZoomed = false;
      paint(figure);
    });
  }

  const place = (figure) => document.getElementById("plot-" + figure.id);

  const paint = (figure) => {
    const chart = place(figure).chart, config = described(against(figure));
    if (chart && chart.config.type === config.type) {
      // What was zoomed stays so while a run goes on.
      const { x } = chart.options.scales;
      if (chart.isZoomed) Object.assign(config.options.scales.x, { min: x.min, max: x.max });
      chart.data = config.data;
      chart.options = config.options;
      chart.update("none");
      return;
    }
    if (chart) chart.destroy();
    const canvas = document.createElement("canvas");
    place(figure).replaceChildren(canvas);
    place(figure).chart = new Chart(canvas, config);
    if (config.type === "line") zoomable(place(figure).chart, canvas);
  };

  // Drag along the horizontal axis to zoom, double-click to see everything again.
  const zoomable = (chart, canvas) => {
    let from = null;
    const at = (event) => chart.scales.x.getValueForPixel(event.offsetX);
    const show = (min, max) => {
      chart.isZoomed = min !== undefined;
      Object.assign(chart.options.scales.x, { min, max });
      chart.update("none");
    };
    canvas.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = [event.offsetX, at(event)]; });
    canvas.addEventListener("pointerup", (event) => {
      if (from && Math.abs(event.offsetX - from[0]) > 8) show(...[from[1], at(event)].sort((a, b) => a - b));
      from = null;
    });
    canvas.addEventListener("dblclick", () => {
      const { range } = figures.find((figure) => place(figure).chart === chart).layout.xaxis;
      show(range && Math.min(...range), range && Math.max(...range));
      chart.isZoomed = false;
    });
  };

  // What is in the window or near it is drawn, one figure at a time, so that the page is there to
  // read and to scroll meanwhile; the rest when it comes near.
  const near = new Set();
  const waiting = new Set();
  let isDrawing = false;
  const next = () => figures.find((figure) => waiting.has(figure.id) && near.has(figure.id));
  const drawNear = async () => {
    if (isDrawing) return;
    isDrawing = true;
    for (let figure = next(); figure; figure = next()) {
      waiting.delete(figure.id);
      paint(figure);
      await new Promise((resume) => { setTimeout(resume); });
    }
    isDrawing = false;
    root.dataset.drawn = "yes";
  };
  const draw = () => {
    delete root.dataset.drawn;
    figures.forEach((figure) => waiting.add(figure.id));
    if (near.size || !figures.length) drawNear();
  };
  const places = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target.id.slice("plot-".length));
    }
    drawNear();
  }, { rootMargin: "25% 0px" });
  document.querySelectorAll(".plot").forEach((one) => places.observe(one));

  const show = (theme) => {
    root.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(theme === "dark"));
    document.dispatchEvent(new CustomEvent("theme"));
    draw();
  };

  // The heads of tables of numbers sort them: numbers downwards first, words upwards.
  const sortable = (table) => {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    const value = (row, i) => Number(row.cells[i].textContent.replace(/[,%]/g, ""));
    heads.forEach((head, i) => {
      const sorter = document.createElement("button");
      sorter.type = "button";
      sorter.textContent = head.textContent;
      if (!head.textContent) return;
      head.replaceChildren(sorter);
      sorter.addEventListener("click", () => {
        const rows = [...body.rows], isNumeric = rows.some((row) => !Number.isNaN(value(row, i)));
        const isDown = head.ariaSort ? head.ariaSort === "ascending" : isNumeric;
        const order = (a, b) => (isNumeric
          ? (Number.isNaN(value(a, i)) ? -Infinity : value(a, i)) - (Number.isNaN(value(b, i)) ? -Infinity : value(b, i))
          : a.cells[i].textContent.localeCompare(b.cells[i].textContent));
        rows.sort((a, b) => (isDown ? order(b, a) : order(a, b)) || 0);
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.ariaSort = isDown ? "descending" : "ascending";
        body.replaceChildren(...rows);
      });
    });
  };
  document.querySelectorAll("table").forEach((table) => { if (!table.tBodies[0].id) sortable(table); });

  // A page that watches a run has new figures every second.
  document.addEventListener("figures", (event) => {
    figures = event.detail;
    draw();
  });

  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    show(chosen);
  });
  prefersDark.addEventListener("change", () => { if (!chosen) show(prefersDark.matches ? "dark" : "light"); });
  // Paper is white, whole, and waits for no input.
  let folded = [];
  window.addEventListener("beforeprint", () => {
    const isDark = root.dataset.theme === "dark";
    root.dataset.theme = "light";
    document.dispatchEvent(new CustomEvent("theme"));
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((one) => { one.open = true; });
    figures.filter((figure) => isDark || waiting.has(figure.id)).forEach(paint);
    waiting.clear();
  });
  window.addEventListener("afterprint", () => {
    folded.forEach((one) => { one.open = false; });
    show(chosen || (prefersDark.matches ? "dark" : "light"));
  });
  show(prefersDark.matches ? "dark" : "light");
})();
