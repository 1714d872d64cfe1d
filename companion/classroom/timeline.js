// A profiler trace on a canvas: zoom, pan, hover, select. One file, no library, no network.
//
// What is drawn depends on the picture's width, not on the trace's length: rows are searched by
// halving, and what is narrower than a pixel is merged into columns of a grid that is fixed in
// time, so that it does not shimmer while you pan.

const GUTTER = 150, ROW = 18, GAP = 7, RULER = 38, OVERVIEW = 40, TALLEST = 430, BLOCK = 64;
const INK = "#222222", GREY = "#5F6368", FAINT = "#D0D4D9", PAPER = "#FFFFFF", MARK = "#C14A00";
const FONT = "11.5px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

// ── data ─────────────────────────────────────────────────────────────────────────────────────

/** Head and columns from the bytes that timeline.py packs. Times become ticks of `head.tick` µs. */
export function decode(view) {
  const buffer = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const kinds = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
  const data = { head };
  for (const [name, kind, offset, count] of head.columns) {
    data[name] = new kinds[kind](buffer, 4 + length + offset, count);
  }
  const { start, duration } = data, n = start.length;
  for (let i = 1; i < n; i++) start[i] += start[i - 1]; // stored as differences, modulo 2^32
  data.before = new Float64Array(n + 1); // time covered by all earlier spans
  data.longest = new Uint32Array(Math.ceil(n / BLOCK)); // of each block
  for (let i = 0; i < n; i++) {
    data.before[i + 1] = data.before[i] + duration[i];
    const block = (i / BLOCK) | 0;
    if (i % BLOCK === 0 || duration[i] > duration[data.longest[block]]) data.longest[block] = i;
  }
  data.rowOf = new Uint16Array(n);
  for (let r = 0; r + 1 < data.rows.length; r++) data.rowOf.fill(r, data.rows[r], data.rows[r + 1]);
  data.caller = new Map(); // from work on the device to the call that launched it
  data.launched = new Map(); // and back, to the first work of a call
  for (let i = 0; i < data.links.length; i += 2) {
    const [call, work] = [data.links[i], data.links[i + 1]];
    data.caller.set(work, call);
    if (!data.launched.has(call)) data.launched.set(call, work);
  }
  return data;
}

/** The first span from `low` to `high` that begins at `time` or later. */
function firstFrom(data, low, high, time) {
  const { start } = data;
  let step = 1; // most answers are near: look ahead in growing steps, then halve
  while (low + step < high && start[low + step] < time) { low += step; step *= 2; }
  high = Math.min(high, low + step);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}

/** The first span from `low` to `high` that ends after `time`. */
function firstEnding(data, low, high, time) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.start[middle] + data.duration[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

function longest(data, from, to) {
  const { duration } = data;
  let best = from;
  for (let i = from; i < to;) {
    let candidate = i;
    if (i % BLOCK === 0 && i + BLOCK <= to) { candidate = data.longest[i / BLOCK]; i += BLOCK; } else i++;
    if (duration[candidate] > duration[best]) best = candidate;
  }
  return best;
}

function format(us, digits = 3) {
  const size = Math.abs(us);
  const [unit, scale] = size >= 1e6 ? ["s", 1e6] : size >= 1e3 ? ["ms", 1e3] : size >= 1 || !size ? ["µs", 1] : ["ns", 1e-3];
  return `${Number((us / scale).toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 })} ${unit}`;
}

const count = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

// ── colours ──────────────────────────────────────────────────────────────────────────────────

function shades(colour) {
  const rgb = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const mixed = (share, to) => `rgb(${rgb.map((v) => Math.round(v + share * (to - v))).join()})`;
  return {
    // neighbours of one kind are told apart by a little more or less light
    plain: [mixed(0, 0), mixed(0.13, 255), mixed(0.07, 0)],
    // how full a column is, in four steps
    columns: [0.62, 0.42, 0.2, 0].map((share) => mixed(share, 255)),
    dimmed: mixed(0.78, 255),
  };
}

// ── page ─────────────────────────────────────────────────────────────────────────────────────

const CSS = `
:host { display: block; color: ${INK}; background: ${PAPER}; border: 1px solid ${FAINT}; border-radius: 6px;
  font: 13px/1.4 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; position: relative; overflow: hidden;
  max-width: 100%; text-align: left; color-scheme: light; }
* { box-sizing: border-box; }
.bar { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; padding: 7px 10px; border-bottom: 1px solid ${FAINT}; }
.bar b { font-weight: 600; margin-right: auto; overflow-wrap: anywhere; }
button, select, input { font: inherit; color: inherit; background: ${PAPER}; border: 1px solid #9AA0A6; border-radius: 4px;
  padding: 1px 8px; min-height: 26px; margin: 0; }
button { cursor: pointer; } button:hover:enabled { background: #EEF3F8; } button:disabled { opacity: .45; cursor: default; }
:focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
.set { display: inline-flex; gap: 3px; align-items: center; } .set label { color: ${GREY}; }
input { width: 10em; } output { color: ${GREY}; min-width: 5em; padding-left: 4px; }
.body { position: relative; } canvas { display: block; touch-action: pan-y; }
.main { cursor: grab; } .main.dragging { cursor: grabbing; } .main:focus-visible { outline-offset: -2px; }
.over { cursor: ew-resize; border-bottom: 1px solid ${FAINT}; }
.names { position: absolute; left: 0; top: 0; width: ${GUTTER}px; overflow: hidden; pointer-events: none; }
.names button { pointer-events: auto; position: absolute; left: 0; width: ${GUTTER - 1}px; border: 0; border-radius: 0; min-height: 0;
  padding: 0 6px 0 4px; text-align: left; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; font-size: 12px; background: transparent; }
.names button:focus-visible { outline-offset: -2px; }
.names i { font-style: normal; color: ${GREY}; display: inline-block; width: 14px; text-align: center; }
.tip { position: absolute; pointer-events: none; background: ${INK}; color: #fff; border-radius: 4px; padding: 5px 9px; max-width: 380px;
  font-size: 12px; overflow-wrap: anywhere; z-index: 2; box-shadow: 0 1px 5px #0005; } .tip div { color: #D5D9DE; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 14px; padding: 5px 10px; border-top: 1px solid ${FAINT}; font-size: 12px; color: ${GREY}; }
.legend span { display: inline-flex; align-items: center; gap: 5px; } .legend i { width: 12px; height: 12px; border-radius: 2px; }
.details { border-top: 1px solid ${FAINT}; padding: 8px 10px; height: 176px; overflow: auto; display: grid; gap: 4px 24px;
  grid-template-columns: minmax(0, 1fr) minmax(0, 1.25fr); align-content: start; }
.details h4 { margin: 0; font-size: 14px; overflow-wrap: anywhere; } .details h4 { display: flex; gap: 7px; align-items: flex-start; }
.details h4 button { font-size: 12px; font-weight: 400; margin-left: auto; flex: none; }
.details h4 i { flex: none; width: 11px; height: 11px; border-radius: 2px; margin-top: 5px; } .details p { margin: 2px 0; color: ${GREY}; } .details p b { color: ${INK}; font-weight: 600; }
.facts { margin: 3px 0 5px; display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 0 12px; } .facts dt { color: ${GREY}; }
.facts dd { margin: 0; overflow-wrap: anywhere; } .facts big { font-size: 14px; font-weight: 600; }
.inside { align-self: start; border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
.inside caption { text-align: left; color: ${GREY}; padding-bottom: 2px; } .inside td { padding: 1px 0 1px 10px; text-align: right; white-space: nowrap; }
.inside td:first-child { padding-left: 0; text-align: left; width: 60%; max-width: 0; overflow: hidden; text-overflow: ellipsis; position: relative; }
.inside td:first-child u { position: absolute; left: 0; top: 2px; bottom: 2px; opacity: .35; border-radius: 2px; }
.inside td:first-child span { position: relative; padding-left: 4px; }
kbd { font: inherit; font-size: 12px; border: 1px solid ${FAINT}; border-bottom-width: 2px; border-radius: 3px; padding: 0 4px; color: ${INK}; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media (max-width: 640px) { .details { height: auto; grid-template-columns: minmax(0, 1fr); } }
`;

const HELP = [["drag, ← →", "pan"], ["wheel, + −", "zoom"], ["click, N P U D", "select a span, the next, previous, outer, inner one"],
  ["Enter", "zoom to it"], ["[ ]", "step"], ["↑ ↓", "lanes"], ["0", "everything"], ["Esc", "select nothing"]];

function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && key !== "style") element[key] = value; else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

let pointer = ""; // where on the screen the pointer was last seen, over whatever element
const seen = (event) => { pointer = `${event.screenX} ${event.screenY}`; };

/** Draw `data` in `host`; returns a function that lets go of the page. */
export function mount(host, data) {
  const { head, start, duration, name, group, rowOf, rows } = data;
  const { tick, names, lanes, steps, groups, total, marks } = head;
  const paint = groups.map((g) => ({ ...g, ...shades(g.colour) }));
  const end = (i) => start[i] + duration[i];
  const folded = new Set();
  let view = [...head.view], width = 0, height = 0, tall = 0, scroll = 0, selected = -1, hovered = null;
  let found = null, top = [], waiting = 0, overview = null;

  host.classList.add("companion-timeline");
  host.dataset.lmSuppressShortcuts = "true"; // or JupyterLab would act on d, 0, Enter, ...
  const shadow = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  const id = `t${Math.random().toString(36).slice(2)}`;
  const main = h("canvas", { className: "main", tabIndex: 0, role: "application", "aria-label": head.alt, "aria-describedby": id });
  const over = h("canvas", { className: "over", "aria-hidden": "true" });
  const gutter = h("div", { className: "names" });
  const tip = h("div", { className: "tip", hidden: true });
  const details = h("div", { className: "details" });
  const said = h("div", { className: "hidden", role: "status" });
  const stepList = h("select", { "aria-label": "Jump to a step" }, h("option", { value: "" }, "all steps"),
    ...steps.map(([number], at) => h("option", { value: at }, `step ${number}`)));
  const back = button("‹", "Previous step", () => step(-1)), on = button("›", "Next step", () => step(1));
  const find = h("input", { type: "search", placeholder: "name…", "aria-label": "Find spans by name; Enter goes to the next" });
  const hits = h("output");
  const bar = h("div", { className: "bar" }, h("b", {}, head.title),
    ...marks.map(([label, from, to]) => button(`See: ${label}`, `Go to where it is seen best: ${label}`, () => show(from, to, 0.5))),
    steps.length ? h("span", { className: "set" }, back, stepList, on) : null,
    h("span", { className: "set" }, find, hits),
    h("span", { className: "set" }, button("−", "Zoom out", () => zoom(1.6)), button("+", "Zoom in", () => zoom(1 / 1.6)),
      button("All", "Show everything", () => show(0, total, 0.005))));
  const present = new Set(group);
  const legend = h("div", { className: "legend" }, ...paint.filter((_, g) => present.has(g)).map((g) =>
    h("span", {}, h("i", { style: `background:${g.colour}` }), g.name)), ...head.notes.map((note) => h("span", {}, note)));
  const body = h("div", { className: "body" }, main, gutter);
  shadow.replaceChildren(h("style", {}, CSS), bar, over, body, legend, details, tip, said,
    h("div", { className: "hidden", id }, "Keys: " + HELP.map(([keys, does]) => `${keys}: ${does}`).join("; ")));
  const ink = main.getContext("2d"), small = over.getContext("2d");

  function button(text, label, onclick) {
    return h("button", { type: "button", "aria-label": label, title: label, onclick }, text);
  }

  // ── where things are ─────────────────────────────────────────────────────────────────────

  const plot = () => width - GUTTER;
  const scale = () => (view[1] - view[0]) / plot(); // ticks a pixel
  const xOf = (time) => GUTTER + (time - view[0]) / scale();
  const timeAt = (x) => view[0] + (x - GUTTER) * scale();
  const laneOf = (row) => lanes.findIndex(([, , first, n]) => row >= first && row < first + n);

  /** y of each row below the ruler, before scrolling; folded lanes show their first row only. */
  function arrange() {
    top = []; let y = 4;
    lanes.forEach(([, , first, n], lane) => {
      for (let r = 0; r < n; r++) top[first + r] = folded.has(lane) && r ? -1 : y + r * ROW;
      y += (folded.has(lane) ? 1 : n) * ROW + GAP;
    });
    tall = y;
    height = RULER + Math.min(tall, TALLEST);
    scroll = Math.max(0, Math.min(scroll, tall - (height - RULER)));
    gutter.style.height = `${height}px`;
    gutter.replaceChildren(...lanes.map(([label, about, , n], lane) => {
      const open = !folded.has(lane);
      return h("button", { type: "button", title: `${label} (${about})`, "aria-expanded": String(open), disabled: n < 2,
        style: `height:${ROW}px;line-height:${ROW}px;opacity:1`, onclick: () => { if (open) folded.add(lane); else folded.delete(lane); resize(); gutter.children[lane].focus(); } },
      h("i", { "aria-hidden": "true" }, n < 2 ? "" : open ? "▾" : "▸"), label);
    }));
  }

  function resize() {
    width = Math.floor(host.clientWidth);
    if (width < GUTTER + 60) return; // hidden, or not laid out yet
    arrange();
    const dpr = window.devicePixelRatio || 1;
    for (const [canvas, tallness] of [[main, height], [over, OVERVIEW]]) {
      canvas.width = Math.round(width * dpr); canvas.height = Math.round(tallness * dpr);
      canvas.style.width = `${width}px`; canvas.style.height = `${tallness}px`;
      canvas.getContext("2d").setTransform(dpr, 0, 0, dpr, 0, 0);
    }
    overview = null;
    draw();
  }

  function look(from, to) {
    const least = Math.max(20, 0.02 / tick), most = total * 1.06;
    const size = Math.min(Math.max(to - from, least), most);
    const middle = (from + to) / 2;
    const low = Math.min(Math.max(middle - size / 2, -0.03 * total), 1.03 * total - size);
    view = [low, low + size];
    hovered = null; tip.hidden = true; // it is no longer what the pointer is over
    redraw();
  }
  const show = (from, to, margin = 0.05) => look(from - margin * (to - from), to + margin * (to - from));
  function zoom(by, at = (view[0] + view[1]) / 2) {
    const size = view[1] - view[0], least = Math.max(20, 0.02 / tick);
    by = Math.min(Math.max(by, least / size), (1.06 * total) / size);
    look(at - (at - view[0]) * by, at + (view[1] - at) * by);
  }
  function pan(by) { look(view[0] + by, view[1] + by); }
  function redraw() { if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; draw(); }); }

  function currentStep() {
    const middle = (view[0] + view[1]) / 2;
    if (view[1] - view[0] > 0.9 * total && steps.length > 1) return -1;
    return steps.findIndex(([, from, to]) => middle >= from && middle <= to);
  }
  function step(by) {
    const at = currentStep();
    goTo(at < 0 ? (by > 0 ? 0 : steps.length - 1) : Math.min(Math.max(at + by, 0), steps.length - 1));
  }
  function goTo(at) {
    if (!steps[at]) return;
    show(steps[at][1], steps[at][2], 0.02);
    said.textContent = `Step ${steps[at][0]}, ${format((steps[at][2] - steps[at][1]) * tick)}`;
  }

  // ── drawing ──────────────────────────────────────────────────────────────────────────────

  const widths = new Map(); // measuring text is slow
  function widthOf(text) {
    if (!widths.has(text)) widths.set(text, ink.measureText(text).width);
    return widths.get(text);
  }
  function label(i, x, w, y) {
    const text = names[name[i]];
    let shown = text;
    if (widthOf(text) > w) {
      let letters = Math.floor((w / widthOf(text)) * text.length);
      do shown = text.slice(0, --letters) + "…"; while (letters > 2 && widthOf(shown) > w);
      if (letters < 2) return;
    }
    ink.fillStyle = found && !found[name[i]] ? GREY : paint[group[i]].ink;
    ink.fillText(shown, x, y + ROW / 2);
  }

  /** One row, from `x0`, in ticks a pixel; every rectangle goes to `context`. */
  function drawRow(context, row, y, tallness, x0, low, high, perPixel, labels) {
    const last = rows[row + 1], shift = Math.round(low / perPixel);
    let i = firstEnding(data, rows[row], last, low);
    let runColour = "", runX = 0, runW = 0;
    const flush = () => { if (runW) { context.fillStyle = runColour; context.fillRect(runX, y, runW, tallness); runW = 0; } };
    while (i < last && start[i] < high) {
      if (duration[i] >= perPixel) {
        flush();
        const x = Math.max(x0 - 2, x0 + start[i] / perPixel - shift);
        let w = x0 + (start[i] + duration[i]) / perPixel - shift - x;
        if (w > 3) w -= 0.75;
        w = Math.min(w, context === ink ? width + 4 - x : w);
        const g = paint[group[i]];
        context.fillStyle = found && labels && !found[name[i]] ? g.dimmed : g.plain[name[i] % 3];
        context.fillRect(x, y, Math.max(w, 1), tallness);
        if (labels && w > 26) label(i, Math.max(x, x0) + 4, Math.min(w, x + w - x0) - 7, y);
        i++;
      } else {
        // everything that begins in this column, up to the first span that is wider than one
        const column = Math.floor(start[i] / perPixel);
        let j = firstFrom(data, i + 1, last, (column + 1) * perPixel);
        let best = longest(data, i, j);
        if (duration[best] >= perPixel) { j = best; best = longest(data, i, j); }
        const share = (data.before[j] - data.before[i]) / perPixel;
        const g = paint[group[best]];
        const colour = found && labels && !found[name[best]] ? g.dimmed : g.columns[Math.min(3, Math.floor(4 * share))];
        const x = x0 + column - shift;
        if (colour === runColour && x === runX + runW) runW++;
        else { flush(); runColour = colour; runX = x; runW = 1; }
        i = j;
      }
    }
    flush();
  }

  function drawRuler() {
    ink.fillStyle = PAPER; ink.fillRect(0, 0, width, RULER);
    ink.strokeStyle = FAINT; ink.beginPath(); ink.moveTo(0, RULER - 0.5); ink.lineTo(width, RULER - 0.5); ink.stroke();
    ink.save(); ink.beginPath(); ink.rect(GUTTER, 0, plot(), RULER); ink.clip();
    steps.forEach(([number, from, to], at) => {
      const a = Math.max(xOf(from), GUTTER), b = Math.min(xOf(to), width);
      if (b < GUTTER || a > width || b - a < 1) return;
      ink.fillStyle = at % 2 ? "#E4E7EB" : "#F1F3F5"; ink.fillRect(a, 0, b - a, 17);
      const text = `step ${number}`, size = ink.measureText(text).width;
      if (b - a > size + 6) { ink.fillStyle = INK; ink.textAlign = "center"; ink.fillText(text, (a + b) / 2, 9); ink.textAlign = "left"; }
    });
    const least = 78 * scale() * tick; // µs between two ticks at least
    const power = 10 ** Math.floor(Math.log10(least));
    const apart = power * [1, 2, 5, 10].find((m) => m * power >= least * 0.999);
    const [unit, size] = apart >= 1e6 ? ["s", 1e6] : apart >= 1e3 ? ["ms", 1e3] : apart >= 1 ? ["µs", 1] : ["ns", 1e-3];
    ink.fillStyle = GREY;
    for (let at = Math.ceil((view[0] * tick) / apart) * apart; at <= view[1] * tick; at += apart) {
      const x = xOf(at / tick);
      ink.fillRect(x, RULER - 6, 1, 6);
      ink.fillText(`${(Math.round(at / apart) * (apart / size) + 0).toLocaleString("en", { maximumFractionDigits: 3 })} ${unit}`, x + 4, RULER - 11);
    }
    for (const [, from, to] of marks) {
      const a = xOf(from), b = Math.max(xOf(to), a + 2);
      ink.fillStyle = MARK; ink.fillRect(a, RULER - 4, b - a, 4);
    }
    ink.restore();
  }

  function draw() {
    if (width < GUTTER + 60) return;
    ink.fillStyle = PAPER; ink.fillRect(0, 0, width, height);
    ink.font = FONT; ink.textBaseline = "middle"; ink.textAlign = "left";
    const perPixel = scale(), offset = RULER - scroll;
    ink.save(); ink.beginPath(); ink.rect(0, RULER, width, height - RULER); ink.clip();
    lanes.forEach(([, , first, n], lane) => {
      if (lane % 2) return;
      ink.fillStyle = "#F7F8FA"; ink.fillRect(0, top[first] + offset - GAP / 2, width, (folded.has(lane) ? 1 : n) * ROW + GAP);
    });
    ink.save(); ink.beginPath(); ink.rect(GUTTER, RULER, plot(), height - RULER); ink.clip();
    for (const [, from, to] of marks) {
      const a = xOf(from), b = Math.max(xOf(to), a + 2);
      ink.fillStyle = "#FBE6DA"; ink.fillRect(a, RULER, b - a, height);
    }
    ink.fillStyle = FAINT;
    for (const [, from] of steps) { const x = Math.round(xOf(from)); if (x >= GUTTER && x <= width) ink.fillRect(x, RULER, 1, height); }
    for (let row = 0; row < top.length; row++) {
      const y = top[row] + offset;
      if (top[row] < 0 || y + ROW < RULER || y > height) continue;
      drawRow(ink, row, y, ROW - 1, GUTTER, view[0], view[1], perPixel, true);
    }
    drawSelection(offset);
    ink.restore();
    ink.fillStyle = FAINT; ink.fillRect(GUTTER - 1, RULER, 1, height);
    ink.restore();
    drawRuler();
    if (tall > height - RULER) {
      const share = (height - RULER) / tall;
      ink.fillStyle = "#9AA0A6"; ink.fillRect(width - 4, RULER + scroll * share, 3, (height - RULER) * share);
    }
    [...gutter.children].forEach((child, lane) => {
      const y = top[lanes[lane][2]] + offset;
      child.style.top = `${y}px`;
      child.style.visibility = y >= RULER - 2 && y + ROW <= height + 2 ? "visible" : "hidden";
    });
    drawOverview();
    const at = currentStep();
    stepList.value = at < 0 ? "" : String(at);
    host.dataset.view = `${(view[0] * tick).toFixed(3)} ${(view[1] * tick).toFixed(3)}`;
  }

  function outline(i, offset, colour, line) {
    const row = rowOf[i];
    if (top[row] < 0) return null;
    const x = Math.max(xOf(start[i]), GUTTER - 4), w = Math.max(Math.min(xOf(end(i)), width + 4) - x, 2);
    ink.strokeStyle = colour; ink.lineWidth = line;
    ink.strokeRect(x, top[row] + offset, w, ROW - 1);
    return [x, top[row] + offset + ROW / 2];
  }

  function drawSelection(offset) {
    if (hovered?.count === 1 && hovered.span !== selected) outline(hovered.span, offset, GREY, 1);
    if (selected < 0) return;
    const other = data.caller.get(selected) ?? data.launched.get(selected);
    if (other !== undefined) {
      const a = outline(selected, offset, INK, 2), b = outline(other, offset, MARK, 1.5);
      if (a && b) { ink.strokeStyle = MARK; ink.lineWidth = 1.5; ink.beginPath(); ink.moveTo(...a);
        ink.bezierCurveTo(a[0] + 20, (a[1] + b[1]) / 2, b[0] - 20, (a[1] + b[1]) / 2, ...b); ink.stroke(); }
    }
    outline(selected, offset, INK, 2);
    ink.lineWidth = 1;
  }

  function drawOverview() {
    if (!overview) {
      overview = h("canvas", { width: over.width, height: over.height });
      const context = overview.getContext("2d"), dpr = window.devicePixelRatio || 1;
      context.setTransform(dpr, 0, 0, dpr, 0, 0);
      context.fillStyle = PAPER; context.fillRect(0, 0, width, OVERVIEW);
      // of each lane the row that holds most
      const held = (row) => rows[row + 1] - rows[row];
      const chosen = lanes.slice(0, 8).map(([, , first, n]) =>
        Array.from({ length: n }, (_, r) => first + r).reduce((a, b) => (held(b) > held(a) ? b : a)));
      const tallness = (OVERVIEW - 8) / chosen.length;
      chosen.forEach((row, at) => drawRow(context, row, 4 + at * tallness, Math.max(1, tallness - 1), GUTTER, 0, total, total / plot(), false));
      context.fillStyle = GREY; context.font = FONT; context.textBaseline = "middle";
      context.fillText(`${format(total * tick)} in all`, 8, OVERVIEW / 2);
    }
    small.save(); small.setTransform(1, 0, 0, 1, 0, 0); small.drawImage(overview, 0, 0); small.restore();
    const a = GUTTER + Math.max(0, view[0] / total) * plot(), b = GUTTER + Math.min(1, view[1] / total) * plot();
    small.fillStyle = "#FFFFFFB0"; small.fillRect(GUTTER, 0, a - GUTTER, OVERVIEW); small.fillRect(b, 0, width - b, OVERVIEW);
    small.strokeStyle = INK; small.lineWidth = 1.5; small.strokeRect(a + 0.5, 1, Math.max(b - a - 1, 3), OVERVIEW - 2);
  }

  // ── what is under the pointer ────────────────────────────────────────────────────────────

  function under(x, y) {
    if (x < GUTTER || y < RULER) return null;
    const row = top.findIndex((at) => at >= 0 && y >= at + RULER - scroll && y < at + RULER - scroll + ROW);
    if (row < 0) return null;
    const low = timeAt(x - 1), high = timeAt(x + 1);
    const from = firstEnding(data, rows[row], rows[row + 1], low);
    const to = firstFrom(data, from, rows[row + 1], high);
    const past = from < rows[row + 1] && start[from] < high ? Math.max(to, from + 1) : from;
    if (past === from) return null;
    return { span: longest(data, from, past), count: past - from, time: data.before[past] - data.before[from] };
  }

  function about(i) {
    const category = head.categories[data.category[i]];
    return `${paint[group[i]].name}${category && category !== paint[group[i]].name ? ` (${category})` : ""}`;
  }

  function hover(x, y) {
    hovered = under(x, y);
    tip.hidden = !hovered;
    if (hovered) {
      const i = hovered.span, shape = head.shapes[data.shape[i]];
      tip.replaceChildren(h("b", {}, names[name[i]]), h("div", {}, `${format(duration[i] * tick)} · ${about(i)}`),
        shape ? h("div", {}, `shapes ${shape}`) : "",
        hovered.count > 1 ? h("div", {}, `longest of ${hovered.count.toLocaleString("en")} spans here; zoom in to see them`) : "");
      const left = body.offsetTop + Math.min(y + 18, height - 10);
      tip.style.left = `${Math.max(4, Math.min(x + 14, width - tip.offsetWidth - 6))}px`;
      tip.style.top = `${left}px`;
      if (left + tip.offsetHeight > host.clientHeight - 4) tip.style.top = `${body.offsetTop + y - tip.offsetHeight - 10}px`;
    }
    redraw();
  }

  // ── selection ────────────────────────────────────────────────────────────────────────────

  /** Spans that lie in span i, as [from, to): a thread's one row down, a stream's in its first row. */
  function inside(i) {
    const lane = laneOf(rowOf[i]), [, , first, n, nests] = lanes[lane];
    const row = nests ? rowOf[i] + 1 : first;
    if (row >= first + n || row === rowOf[i]) return [0, 0];
    const from = firstFrom(data, rows[row], rows[row + 1], start[i]);
    return [from, firstFrom(data, from, rows[row + 1], end(i))];
  }

  /** The span that span i lies in, or the call that launched it; -1 where there is none. */
  function outer(i) {
    const [, , first, , nests] = lanes[laneOf(rowOf[i])], row = rowOf[i] - 1;
    if (!nests || row < first) return data.caller.get(i) ?? -1;
    const middle = start[i] + duration[i] / 2, at = firstEnding(data, rows[row], rows[row + 1], middle);
    return at < rows[row + 1] && start[at] <= middle ? at : -1;
  }

  function select(i, reveal = false) {
    selected = i;
    host.dataset.selected = i < 0 ? "" : names[name[i]];
    describe();
    if (i >= 0 && reveal) {
      folded.delete(laneOf(rowOf[i]));
      arrange();
      const y = top[rowOf[i]];
      if (y < scroll) scroll = Math.max(0, y - 4);
      if (y + ROW > scroll + height - RULER) scroll = y + ROW - (height - RULER) + 4;
      if (end(i) < view[0] || start[i] > view[1] || duration[i] < 2 * scale()) {
        const size = Math.min(view[1] - view[0], Math.max(duration[i] * 12, 40 / tick));
        look(start[i] + duration[i] / 2 - size / 2, start[i] + duration[i] / 2 + size / 2);
      }
      said.textContent = `${names[name[i]]}, ${about(i)}, ${format(duration[i] * tick)}`;
    }
    redraw();
  }

  function describe() {
    if (selected < 0) {
      details.replaceChildren(h("div", {}, h("h4", {}, "Nothing selected"),
        h("p", {}, `${count(head.spans, "span")} in ${count(lanes.length, "lane")}, ${count(steps.length, "step")}. Click a span to see how long it took and what is in it.`)),
      h("p", {}, ...HELP.flatMap(([keys, does]) => [h("kbd", {}, keys), ` ${does}   `])));
      return;
    }
    const i = selected, g = paint[group[i]], shape = head.shapes[data.shape[i]], [lane, laneAbout] = lanes[laneOf(rowOf[i])];
    const [from, to] = inside(i), held = Math.min(duration[i], data.before[to] - data.before[from]);
    const at = steps.find(([, low, high]) => start[i] >= low && start[i] < high);
    const caller = data.caller.get(i), work = data.launched.get(i);
    const facts = [["duration", h("big", {}, format(duration[i] * tick, 4))],
      to > from ? ["by itself", `${format((duration[i] - held) * tick)} (${Math.round((100 * (duration[i] - held)) / (duration[i] || 1))} %)`] : null,
      ["begins at", `${format(start[i] * tick, 6)}${at ? `, in step ${at[0]}` : ""}`],
      ["kind", about(i)], ["lane", `${lane} (${laneAbout})`],
      shape ? ["shapes", shape] : null,
      caller === undefined ? null : ["launched by", `${names[name[caller]]}, ${format((start[i] - start[caller]) * tick)} before it began`],
      work === undefined ? null : ["launches", `${names[name[work]]}, which begins ${format((start[work] - start[i]) * tick)} later`]];
    const left = h("div", {}, h("h4", {}, h("i", { style: `background:${g.colour}` }), h("span", {}, names[name[i]]),
        button("Zoom to it", "Zoom to the selected span", () => show(start[i], end(i), 0.1))),
      h("dl", { className: "facts" }, ...facts.filter(Boolean).flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])));
    const totals = new Map();
    for (let k = from; k < to; k++) {
      const sum = totals.get(name[k]) ?? { time: 0, calls: 0, group: group[k] };
      sum.time += duration[k]; sum.calls++; totals.set(name[k], sum);
    }
    const listed = [...totals].sort(([, a], [, b]) => b.time - a.time);
    const table = h("table", { className: "inside" }, h("caption", {}, listed.length
      ? `In it: ${count(to - from, "span")}${listed.length > 6 ? ` of ${listed.length} names, the 6 longest` : ""}` : "Nothing recorded lies in it."),
    ...listed.slice(0, 6).map(([key, sum]) => h("tr", {},
      h("td", { title: names[key] }, h("u", { style: `width:${(100 * sum.time) / (duration[i] || 1)}%;background:${paint[sum.group].colour}` }), h("span", {}, names[key])),
      h("td", {}, `${sum.calls.toLocaleString("en")} ×`), h("td", {}, format(sum.time * tick)),
      h("td", {}, `${Math.round((100 * sum.time) / (duration[i] || 1))} %`))));
    details.replaceChildren(left, table);
  }

  // ── what you do ──────────────────────────────────────────────────────────────────────────

  let drag = null, armed = false;
  const place = (event, canvas = main) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  main.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const [x, y] = place(event);
    drag = { x, y, view: [...view], scroll, moved: false };
    armed = true;
    try { main.setPointerCapture(event.pointerId); } catch { /* made by a script */ }
  });
  main.addEventListener("pointermove", (event) => {
    // a page that scrolls under a resting pointer sends moves too: those do not take the wheel
    if (`${event.screenX} ${event.screenY}` !== pointer) armed = true;
    const [x, y] = place(event);
    if (!drag) return hover(x, y);
    if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < 4) return;
    drag.moved = true;
    main.classList.add("dragging");
    scroll = Math.max(0, Math.min(drag.scroll - (y - drag.y), tall - (height - RULER)));
    const by = ((drag.x - x) * (drag.view[1] - drag.view[0])) / plot();
    look(drag.view[0] + by, drag.view[1] + by);
  });
  const release = (event) => {
    if (drag && !drag.moved && event.type === "pointerup") {
      const hit = under(drag.x, drag.y);
      const at = drag.y < 17 ? steps.findIndex(([, from, to]) => timeAt(drag.x) >= from && timeAt(drag.x) <= to) : -1;
      if (at >= 0) goTo(at); else if (drag.y > RULER) select(hit ? hit.span : -1);
    }
    drag = null;
    main.classList.remove("dragging");
  };
  main.addEventListener("pointerup", release);
  main.addEventListener("pointercancel", release);
  main.addEventListener("pointerleave", () => { armed = false; hovered = null; tip.hidden = true; redraw(); });
  main.addEventListener("dblclick", (event) => { const hit = under(...place(event)); if (hit) show(start[hit.span], end(hit.span), 0.1); });
  main.addEventListener("wheel", (event) => {
    if (!armed && !event.ctrlKey) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 18 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX * lines * scale());
    else if (event.shiftKey) pan(event.deltaY * lines * scale());
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.0022)))), timeAt(place(event)[0]));
    hover(...place(event));
  }, { passive: false });

  let brush = false;
  const recentre = (event) => {
    const middle = ((place(event, over)[0] - GUTTER) / plot()) * total, half = (view[1] - view[0]) / 2;
    look(middle - half, middle + half);
  };
  over.addEventListener("pointerdown", (event) => { brush = true; over.setPointerCapture(event.pointerId); recentre(event); });
  over.addEventListener("pointermove", (event) => { if (brush) recentre(event); });
  over.addEventListener("pointerup", () => { brush = false; });

  function along(by) {
    if (selected < 0) {
      for (let row = 0; row < top.length; row++) {
        const i = firstEnding(data, rows[row], rows[row + 1], view[0]);
        if (top[row] >= 0 && i < rows[row + 1] && start[i] < view[1]) return select(i, true);
      }
      return;
    }
    const next = selected + by, row = rowOf[selected];
    if (next >= rows[row] && next < rows[row + 1]) select(next, true);
  }
  function inner() {
    if (selected < 0) return along(1); 
    const [from, to] = inside(selected);
    const next = to > from ? longest(data, from, to) : data.launched.get(selected);
    if (next !== undefined) select(next, true);
  }
  const keys = {
    ArrowLeft: () => pan(-0.12 * (view[1] - view[0])), ArrowRight: () => pan(0.12 * (view[1] - view[0])),
    "+": () => zoom(1 / 1.4), "=": () => zoom(1 / 1.4), "-": () => zoom(1.4), _: () => zoom(1.4),
    ArrowUp: () => { scroll = Math.max(0, scroll - 2 * ROW); redraw(); },
    ArrowDown: () => { scroll = Math.max(0, Math.min(scroll + 2 * ROW, tall - (height - RULER))); redraw(); },
    0: () => show(0, total, 0.005), Home: () => show(0, total, 0.005),
    "[": () => step(-1), "]": () => step(1), PageUp: () => step(-1), PageDown: () => step(1),
    n: () => along(1), p: () => along(-1), u: () => { const i = selected < 0 ? -1 : outer(selected); if (i >= 0) select(i, true); }, d: inner,
    Enter: () => { if (selected >= 0) show(start[selected], end(selected), 0.1); }, Escape: () => select(-1),
  };
  main.addEventListener("keydown", (event) => {
    const act = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); event.stopPropagation();
    act();
  });
  stepList.addEventListener("change", () => { if (stepList.value === "") show(0, total, 0.005); else goTo(Number(stepList.value)); });
  find.addEventListener("input", () => {
    const text = find.value.trim().toLowerCase();
    found = text ? Uint8Array.from(names, (one) => one.toLowerCase().includes(text)) : null;
    let n = 0;
    if (found) for (let i = 0; i < name.length; i++) n += found[name[i]];
    hits.textContent = found ? `${n.toLocaleString("en")} found` : "";
    redraw();
  });
  find.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key !== "Enter" || !found) return;
    const after = selected >= 0 && found[name[selected]] ? selected : -1;
    let best = -1, first = -1;
    // the next in time, whatever its lane
    for (let i = 0; i < name.length; i++) {
      if (!found[name[i]]) continue;
      if (first < 0 || start[i] < start[first]) first = i;
      const later = after < 0 || start[i] > start[after] || (start[i] === start[after] && i > after);
      if (i !== after && later && (best < 0 || start[i] < start[best])) best = i;
    }
    if (first >= 0) select(best >= 0 ? best : first, true);
  });

  window.addEventListener("pointermove", seen);
  const watcher = new ResizeObserver(() => { if (Math.floor(host.clientWidth) !== width) resize(); });
  watcher.observe(host);
  describe();
  resize();
  return () => { watcher.disconnect(); window.removeEventListener("pointermove", seen); cancelAnimationFrame(waiting); };
}

// ── the two ways in ──────────────────────────────────────────────────────────────────────────

/** In a page: every element with this mark gets the timeline that is in `packed` (gzip, base64). */
export async function unpack(mark, packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = new DataView(await new Response(stream).arrayBuffer());
  for (const host of document.querySelectorAll(`[data-timeline="${mark}"]`)) {
    if (!host.shadowRoot) mount(host, decode(data)); // the same trace may be shown twice
  }
}

/** As a widget: the bytes come from the kernel as they are. */
export default {
  render({ model, el }) {
    const host = el.appendChild(document.createElement("div"));
    return mount(host, decode(model.get("data")));
  },
};
