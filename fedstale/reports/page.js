"use strict";
(() => {
  const root = document.documentElement;
  let figures = JSON.parse(document.getElementById("plots").textContent);
  const button = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;

  const colour = (role) => getComputedStyle(root).getPropertyValue("--" + role).trim();

  // Without WebGL (remote desktops, hardened browsers) the same lines are drawn as SVG.
  const hasWebGL = (() => {
    try {
      return Boolean(document.createElement("canvas").getContext("webgl"));
    } catch (problem) {
      return false;
    }
  })();

  const painted = (trace) => {
    const value = colour(trace.meta);
    const copy = { ...trace, hoverlabel: { namelength: -1 } };
    if (copy.type === "scattergl" && !hasWebGL) {
      copy.type = "scatter";
      // A dot is an element of its own in SVG: of tens of thousands a browser gets slow.
      copy.mode = "lines";
    }
    if (copy.line) copy.line = { ...copy.line, color: value };
    // Bands overlap; what lies behind must stay visible.
    if (copy.fill) copy.fillcolor = value + "33";
    if (copy.type === "bar" || copy.marker) copy.marker = { ...copy.marker, color: value };
    return copy;
  };

  const axis = (own) => ({
    gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"),
    automargin: true, ...own, title: { standoff: 8, ...own.title },
  });

  const layout = (own, height) => ({
    ...own, height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 13, color: colour("ink") },
    margin: { l: 52, r: 12, t: 8, b: 44 }, hovermode: own.hovermode || "closest", dragmode: "zoom",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", xanchor: "left", traceorder: "normal" },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    xaxis: axis(own.xaxis), yaxis: axis(own.yaxis), uirevision: "kept",
  });

  const settings = { displayModeBar: false, responsive: true, displaylogo: false };

  const paint = (figure) => {
    const place = document.getElementById("plot-" + figure.id);
    const own = structuredClone(figure.layout);
    Plotly.react(place, figure.traces.map(painted), layout(own, Number(place.dataset.height)), settings);
  };

  // What is in the window or near it is drawn, one figure at a time, so that the page is there to
  // read and to scroll meanwhile; what takes long comes last, and the rest when it comes near.
  const isHeavy = (figure) => figure.traces.some((trace) => trace.type === "scattergl");
  const near = new Set();
  const waiting = new Set();
  let isDrawing = false;
  const next = () => {
    const inTurn = figures.filter((figure) => waiting.has(figure.id) && near.has(figure.id));
    return inTurn.find((figure) => !isHeavy(figure)) || inTurn[0];
  };
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
    if (near.size) drawNear();
  };
  const places = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target.id.slice("plot-".length));
    }
    drawNear();
  }, { rootMargin: "25% 0px" });
  document.querySelectorAll(".plot").forEach((place) => places.observe(place));

  const show = (theme) => {
    root.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(theme === "dark"));
    draw();
  };

  // Zoom and pan along the horizontal axis, for hands that use no mouse.
  const move = (place, what) => {
    const [from, to] = place._fullLayout.xaxis.range;
    const middle = (from + to) / 2, half = (to - from) / 2;
    const ranges = {
      in: [middle - half / 2, middle + half / 2], out: [middle - half * 2, middle + half * 2],
      left: [from - half / 2, to - half / 2], right: [from + half / 2, to + half / 2],
    };
    if (what === "all") {
      const figure = figures.find((one) => "plot-" + one.id === place.id);
      const range = figure.layout.yaxis.range;
      const rows = range ? { "yaxis.range": [...range] } : { "yaxis.autorange": figure.layout.yaxis.autorange || true };
      Plotly.relayout(place, { "xaxis.autorange": true, ...rows });
    } else {
      Plotly.relayout(place, { "xaxis.range": ranges[what] });
    }
  };

  for (const tools of document.querySelectorAll(".tools")) {
    const place = document.getElementById(tools.dataset.plot);
    tools.addEventListener("click", (event) => {
      if (event.target.dataset.move && place.data) move(place, event.target.dataset.move);
    });
  }

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
  window.addEventListener("beforeprint", () => {
    const isDark = root.dataset.theme === "dark";
    root.dataset.theme = "light";
    figures.filter((figure) => isDark || waiting.has(figure.id)).forEach(paint);
    waiting.clear();
  });
  window.addEventListener("afterprint", () => show(chosen || (prefersDark.matches ? "dark" : "light")));
  show(prefersDark.matches ? "dark" : "light");
})();
