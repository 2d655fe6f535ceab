"use strict";
// Everything around the timeline. All text of the plan goes in as text, never as markup.

const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = event.message; });

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const chart = new Chart($("canvas"), data);
const MOST_ROWS = 400;

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; chart.draw(); });
}

function placeOf(id) {
  const { spans, lanes } = data, lane = lanes[spans.lane[id]];
  const inner = spans.inner[id] < 0 ? "" : `.${spans.inner[id]}, turn ${spans.turn[id]}`;
  return `rank ${lane.rank}, ${lane.name}, op ${spans.op[id]}${inner}`;
}

function nameOf(id) { return data.texts[data.spans.name[id]]; }

/// What there is to say about a span.
function describe(into, id) {
  const { spans, texts } = data, length = spans.end[id] - spans.start[id];
  into.replaceChildren(element("b", nameOf(id)), element("span", `  ${placeOf(id)}\n`, "quiet"));
  into.append(`${time(spans.start[id])} to ${time(spans.end[id])}: ${time(length)}`);
  if (spans.bytes[id] > 0) {
    into.append(`\n${bytes(spans.bytes[id])}`);
    if (length > 0) into.append(`, ${(spans.bytes[id] / length).toFixed(1)} GB/s`);
  }
  const text = texts[spans.text[id]];
  if (text) into.append(element("span", `\n${text}`, "quiet"));
  chart.marks.forEach((mark, at) => {
    if (mark.span === id) into.append(element("span", `\n${data.marks[at].severity}: ${data.marks[at].text}`));
  });
}

function select(id, reveal) {
  chart.selected = id;
  $("selected").hidden = id < 0;
  if (id >= 0) {
    describe($("details"), id);
    if (reveal) chart.reveal(id);
  }
  history.replaceState(null, "", id < 0 ? location.pathname : `#span=${id}`);
  redraw();
}

function row(list, text, number, id) {
  const item = element("li");
  item.append(element("span", text), element("span", number, "number"));
  if (id >= 0) {
    item.tabIndex = 0;
    item.addEventListener("click", () => select(id, true));
    item.addEventListener("keydown", (event) => { if (event.key === "Enter") select(id, true); });
  }
  list.append(item);
  return item;
}

function fillHeader() {
  $("name").textContent = data.name;
  const facts = [
    data.collective, `${data.ranks} ranks on ${data.cluster}`, bytes(data.message),
    `${time(data.time)}, launch of ${time(data.launch)} included`, `bus bandwidth ${data.bus.toFixed(1)} GB/s`,
  ];
  $("facts").textContent = facts.join(" · ");
  const used = new Set(chart.kind);
  KINDS.forEach(([name, label], kind) => {
    if (!used.has(kind)) return;
    const entry = element("span", label);
    entry.style.setProperty("--of", `var(--${name})`);
    $("legend").append(entry);
  });
}

function fillPanels() {
  const list = (id) => $(id).querySelector("ol"), note = (id, text) => { $(id).querySelector("small").textContent = text; };
  $("findings").hidden = data.marks.length === 0;
  note("findings", `${data.marks.length}`);
  data.marks.slice(0, MOST_ROWS).forEach((mark, at) => {
    const item = row(list("findings"), mark.text, "", chart.marks[at].span);
    item.classList.add(mark.severity);
    item.append(element("span", mark.place, "more"));
  });
  note("path", `${data.path.length} steps, ${time(chart.last)}`);
  const steps = data.path.slice(0, MOST_ROWS);
  steps.forEach(([id, from, until]) => {
    row(list("path"), nameOf(id), time(until - from), id).append(element("span", placeOf(id), "more"));
  });
  if (steps.length < data.path.length) row(list("path"), `and ${data.path.length - steps.length} more`, "", -1);
  const links = data.links.filter(([, count]) => count > 0).sort((a, b) => b[3] - a[3]);
  links.slice(0, MOST_ROWS).forEach(([name, count, capacity, busy]) => {
    const item = row(list("links"), name, `${(busy * 100).toFixed(1)} %`, -1);
    item.title = `${bytes(count)} at up to ${capacity} GB/s`;
    const bar = element("span", undefined, "bar"), part = element("i");
    part.style.width = `${Math.min(busy, 1) * 100}%`;
    bar.append(part);
    item.append(bar);
  });
}

function hover(event) {
  const box = $("canvas").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const id = chart.hit(x, y), tip = $("tip");
  tip.hidden = id < 0;
  if (id >= 0) {
    describe(tip, id);
    tip.style.left = `${Math.max(4, Math.min(x + 14, box.width - tip.offsetWidth - 6))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > box.height ? Math.max(4, y - tip.offsetHeight - 10) : y + 18}px`;
  }
  if (id !== chart.hovered) {
    chart.hovered = id;
    redraw();
  }
}

function listen() {
  const canvas = $("canvas");
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const [dx, dy] = [drag.x - event.clientX, drag.y - event.clientY];
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    Object.assign(drag, { x: event.clientX, y: event.clientY, moved: true });
    $("tip").hidden = true;
    chart.pan(dx, dy);
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    const box = canvas.getBoundingClientRect();
    if (drag && !drag.moved) select(chart.hit(event.clientX - box.left, event.clientY - box.top), false);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; chart.hovered = -1; redraw(); });
  canvas.addEventListener("dblclick", () => { if (chart.selected >= 0) select(chart.selected, true); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const x = event.clientX - canvas.getBoundingClientRect().left;
    const scrolls = chart.height > chart.pixels - RULER;
    if (event.ctrlKey || event.metaKey || (!scrolls && !event.shiftKey && Math.abs(event.deltaY) > Math.abs(event.deltaX))) {
      chart.zoom(Math.exp(event.deltaY * 0.0025), x);
    } else if (event.shiftKey) chart.pan(event.deltaY + event.deltaX, 0);
    else chart.pan(event.deltaX, event.deltaY);
    redraw();
  }, { passive: false });
  const keys = {
    "+": () => chart.zoom(0.7), "=": () => chart.zoom(0.7), "-": () => chart.zoom(1.4), "0": () => chart.fit(),
    ArrowLeft: () => chart.pan(-60, 0), ArrowRight: () => chart.pan(60, 0),
    ArrowUp: () => chart.pan(0, -60), ArrowDown: () => chart.pan(0, 60), Escape: () => select(-1),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
    redraw();
  });
  $("zoom-in").addEventListener("click", () => { chart.zoom(0.6); redraw(); });
  $("zoom-out").addEventListener("click", () => { chart.zoom(1.6); redraw(); });
  $("fit").addEventListener("click", () => { chart.fit(); chart.top = 0; redraw(); });
  for (const what of ["path", "signals", "data"]) {
    $(`show-${what}`).addEventListener("change", (event) => { chart.show[what] = event.target.checked; redraw(); });
  }
  chart.onHint = (text) => { $("hint").hidden = !text; $("hint").textContent = text; };
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

fillHeader();
fillPanels();
listen();
chart.draw();
const asked = /^#span=(\d+)$/.exec(location.hash);
if (asked && Number(asked[1]) < data.spans.lane.length) {
  select(Number(asked[1]), true);
  chart.draw();
}
// For whoever drives the page: what has been drawn.
root.dataset.drawn = JSON.stringify({ lanes: data.lanes.length, spans: data.spans.lane.length, arrows: data.arrows.from.length, marks: chart.marks.filter((mark) => mark.span >= 0).length });
