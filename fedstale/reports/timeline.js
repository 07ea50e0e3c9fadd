"use strict";
// Draws what the devices did (devices.py): a row a device.
(() => {
  const section = document.getElementById("timeline");
  if (!section) return;
  const given = JSON.parse(document.getElementById("timeline-data").textContent);
  const part = (name) => section.querySelector(name);
  const canvas = part("canvas"), pen = canvas.getContext("2d");
  const order = part("[name=order]"), search = part("[name=search]"), told = part("output");
  const root = document.documentElement;
  const colour = (role) => getComputedStyle(root).getPropertyValue("--" + role).trim();
  const RIGHT = 10, TOP = 16, BOTTOM = 34, LABEL_PX = 11;

  // Names need a margin; where rows are too thin for them, numbers need less.
  let left = 64;
  let view = [0, given.end], shown = [], data = null, online = null, spots = [];

  const unpacked = async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  };

  const onlineOf = (buffer) => {
    const numbers = new Uint32Array(buffer), n = numbers.length / 3, scale = given.end / given.ticks;
    const rows = given.devices.map(() => []);
    for (let i = 0; i < n; i += 1) rows[numbers[i]].push([numbers[n + i] * scale, (numbers[n + i] + numbers[2 * n + i]) * scale]);
    return rows;
  };

  // Jobs are columns of numbers, one after the other; instants count from 0 to `ticks` at the end.
  const jobsOf = (buffer) => {
    const n = given.n_jobs, numbers = new Uint32Array(buffer);
    const column = (i) => numbers.subarray(i * n, (i + 1) * n);
    const [id, row, start, first, second, third, state, ending] = [0, 1, 2, 3, 4, 5, 6, 7].map(column);
    const scale = given.end / given.ticks, rows = given.devices.map(() => []);
    for (let i = 0; i < n; i += 1) {
      const at = [start[i]];
      for (const span of [first[i], second[i], third[i]]) at.push(at[at.length - 1] + span);
      rows[row[i]].push({ id: id[i], at: at.map((tick) => tick * scale), state: given.states[state[i]], ending: given.endings[ending[i]] });
    }
    return rows;
  };

  const hatched = () => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const inside = tile.getContext("2d");
    inside.fillStyle = colour("wasted") + "55";
    inside.fillRect(0, 0, 6, 6);
    inside.strokeStyle = colour("wasted");
    inside.lineWidth = 1.5;
    for (const shift of [-6, 0, 6]) {
      inside.beginPath();
      inside.moveTo(shift, 6);
      inside.lineTo(shift + 6, 0);
      inside.stroke();
    }
    return pen.createPattern(tile, "repeat");
  };

  const words = (value) => String(Number((value / given.unit_s).toPrecision(4)));

  const frame = (width, height) => {
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    const [from, to] = view, span = (to - from) / given.unit_s;
    const raw = span / Math.max(2, Math.floor(width / 110)), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
    pen.textAlign = "center";
    for (let k = Math.ceil(from / given.unit_s / step); k * step <= to / given.unit_s + 1e-9; k += 1) {
      const at = x(k * step * given.unit_s, width);
      pen.fillStyle = colour("grid");
      pen.fillRect(at, TOP, 1, height - TOP - BOTTOM);
      pen.fillStyle = colour("ink");
      pen.fillText(String(Number((k * step).toPrecision(6))), at, height - BOTTOM + 11);
    }
    pen.fillText(`${given.time} (${given.unit})`, (left + width - RIGHT) / 2, height - 8);
    pen.fillStyle = colour("faint");
    let last = -3;
    for (const at of given.versions) {
      const here = x(at, width);
      // Ticks that would run into one another become every second, third, and so on.
      if (at < from || at > to || here < last + 3) continue;
      pen.fillRect(here, 2, 1, TOP - 5);
      last = here;
    }
    pen.textAlign = "right";
    pen.fillText("versions", left - 8, TOP / 2);
  };

  const x = (at, width) => left + (at - view[0]) / (view[1] - view[0]) * (width - left - RIGHT);

  const drawJobs = (width, height) => {
    const rows = shown.length, high = (height - TOP - BOTTOM) / Math.max(rows, 1), bar = Math.min(Math.max(high * 0.8, 2), 14);
    const inks = Object.fromEntries(given.states.map((state) => [state, colour(state)])), grey = colour("online");
    if (bar >= 4) inks.wasted = hatched();
    const text = (name) => (name.length > 17 ? name.slice(0, 16) + "…" : name);
    shown.forEach((device, i) => {
      const middle = TOP + (i + 0.5) * high, top = middle - bar / 2;
      if (high >= LABEL_PX) {
        pen.fillStyle = colour("ink");
        pen.fillText(text(given.devices[device]), left - 8, middle);
      }
      if (online) {
        pen.fillStyle = grey;
        for (const [from, to] of online[device]) block(from, to, middle - high / 2 + high * 0.03, high * 0.94, width, 0);
      }
      for (const { id, at, state, ending } of data[device]) {
        if (at[3] < view[0] || at[0] > view[1]) continue;
        const isUsed = state !== "wasted" && state !== "in-flight";
        if (!isUsed) {
          pen.fillStyle = inks[state];
          block(at[0], at[3], top, bar, width, 2);
        } else {
          for (let k = 0; k < 3; k += 1) {
            pen.fillStyle = inks[["download", state, "upload"][k]];
            block(at[k], at[k + 1], top, bar, width, k === 1 ? 2 : 0.5);
          }
        }
        spots.push({ id, device, isUsed, ending, state, at, from: x(at[0], width) - 2, to: x(at[3], width) + 2, top: middle - high / 2, high });
      }
    });
  };

  // What is shorter than a pixel still leaves a trace of `least` pixels.
  const block = (from, to, top, high, width, least) => {
    const begin = Math.max(x(from, width), left), end = Math.min(x(to, width), width - RIGHT);
    if (end >= begin) pen.fillRect(begin, top, Math.max(end - begin, least), high);
  };

  const draw = () => {
    if (!data) return;
    const width = canvas.clientWidth, height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    spots = [];
    left = (height - TOP - BOTTOM) / Math.max(shown.length, 1) >= LABEL_PX ? 118 : 64;
    frame(width, height);
    pen.save();
    drawJobs(width, height);
    pen.restore();
    section.dataset.drawn = "yes";
  };

  const pick = () => {
    const key = order.value, wanted = search.value.trim().toLowerCase();
    shown = given.devices.map((_, i) => i).filter((i) => given.devices[i].toLowerCase().includes(wanted));
    if (key !== "name") shown.sort((a, b) => given[key][b] - given[key][a] || a - b);
    else shown.sort((a, b) => (given.devices[a] < given.devices[b] ? -1 : 1));
    if (wanted) told.textContent = `${shown.length.toLocaleString("en")} devices found.`;
    draw();
  };

  canvas.addEventListener("click", (event) => {
    const found = spots.filter((spot) => event.offsetX >= spot.from && event.offsetX <= spot.to
      && event.offsetY >= spot.top && event.offsetY < spot.top + spot.high);
    if (!found.length) return;
    const { id, device, isUsed, ending, state, at } = found[found.length - 1];
    const [waits, ends] = [at[0], at[3]].map(words);
    const phases = isUsed ? `: download ${words(at[1] - at[0])}, ${state} ${words(at[2] - at[1])}, upload ${words(at[3] - at[2])}` : "";
    told.textContent = `Job ${id} of ${given.devices[device]}, ${ending}, ${waits} to ${ends} ${given.unit}${phases}.`;
  });

  const zoom = (from, to) => {
    const span = Math.min(Math.max(to - from, given.end * 1e-5), given.end);
    const start = Math.min(Math.max(from, 0), given.end - span);
    view = [start, start + span];
    draw();
  };
  part(".tools").addEventListener("click", (event) => {
    const [from, to] = view, quarter = (to - from) / 4;
    const moves = {
      in: [from + quarter, to - quarter], out: [from - 2 * quarter, to + 2 * quarter],
      left: [from - quarter, to - quarter], right: [from + quarter, to + quarter], all: [0, given.end],
    };
    if (event.target.dataset.move) zoom(...moves[event.target.dataset.move]);
  });
  let dragged = null;
  const instant = (event) => view[0] + (event.offsetX - left) / (canvas.clientWidth - left - RIGHT) * (view[1] - view[0]);
  canvas.addEventListener("pointerdown", (event) => { dragged = event.pointerType === "mouse" ? [event.offsetX, instant(event)] : null; });
  canvas.addEventListener("pointerup", (event) => {
    if (dragged && Math.abs(event.offsetX - dragged[0]) > 8) zoom(...[dragged[1], instant(event)].sort((a, b) => a - b));
    dragged = null;
  });
  canvas.addEventListener("dblclick", () => zoom(0, given.end));
  order.addEventListener("change", pick);
  search.addEventListener("input", pick);
  document.addEventListener("theme", draw);
  window.addEventListener("afterprint", draw);
  new ResizeObserver(draw).observe(canvas);

  Promise.all(given.packed.map(unpacked)).then((buffers) => {
    data = jobsOf(buffers[0]);
    if (buffers.length > 1) online = onlineOf(buffers[1]);
    section.timeline = { view: () => view, spots: () => spots, shown: () => shown };
    pick();
  });
})();
