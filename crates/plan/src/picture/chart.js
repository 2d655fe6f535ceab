"use strict";
// The timeline on a canvas. Only what is in view is drawn, and of spans below a pixel one for each pixel, so the cost
// follows the window and not the plan.

const LANE = 18, GAP = 24, RULER = 26, GUTTER = 128, MOST_ARROWS = 1500;
const KINDS = [
  ["move", "move data", /^(copy|cpkt|upkt|put|pws|pwsf|ppkt|rppkt|get|gstore|gstorepkt)$/],
  ["reduce", "reduce", /^(re|res|rre|rres|repkt|respkt|recpkt|recspkt|glre|glres)$/],
  ["wait", "wait", /^(wait|rlxwait|flush|barrier|sem_acquire)$/],
  ["signal", "signal", /^(signal|rlxsignal|sem_release)$/],
  ["sync", "sync", /^nop$/],
  ["transfer", "engine's transfer", /./],
];

function time(ns, digits = 2) {
  const size = Math.abs(ns);
  if (size < 1000) return `${+ns.toFixed(size < 10 ? 1 : 0)} ns`;
  return size < 1e6 ? `${+(ns / 1e3).toFixed(digits)} µs` : `${+(ns / 1e6).toFixed(digits)} ms`;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${+count.toFixed(1)} ${units[unit]}`;
}

class Chart {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.data = data;
    const { spans, arrows, lanes } = data;
    this.start = Float64Array.from(spans.start);
    this.end = Float64Array.from(spans.end);
    this.sent = Float64Array.from(arrows.sent);
    this.arrived = Float64Array.from(arrows.arrived);
    const kinds = data.texts.map((text) => KINDS.findIndex(([, , of]) => of.test(text)));
    this.kind = Uint8Array.from(spans.name, (name) => kinds[name]);
    this.rows = lanes.map(() => []);
    spans.lane.forEach((lane, span) => this.rows[lane].push(span));
    this.layOut(lanes);
    this.last = this.end.reduce((most, end) => Math.max(most, end), 1);
    this.show = { path: true, signals: true, data: true };
    this.hovered = this.selected = -1;
    this.marks = this.placeMarks();
    this.onHint = () => {};
    this.top = 0;
    this.fit();
  }

  /// Where lanes stand: a heading for each rank above its own.
  layOut(lanes) {
    this.headings = [];
    this.y = [];
    let y = 4;
    lanes.forEach((lane, at) => {
      if (at === 0 || lanes[at - 1].rank !== lane.rank) {
        this.headings.push([lane.rank, y]);
        y += GAP;
      }
      this.y.push(y);
      y += LANE;
    });
    this.height = y + 8;
  }

  /// For each finding that has a place in the picture: its first span, and how bad it is.
  placeMarks() {
    const { spans, marks } = this.data;
    return marks.map((mark) => {
      const row = mark.lane === null ? [] : this.rows[mark.lane];
      const span = row.find((id) => spans.op[id] === mark.op && (mark.inner < 0 || spans.inner[id] === mark.inner));
      return { span: span ?? -1, severity: mark.severity };
    });
  }

  fit() {
    const margin = this.last * 0.02;
    this.from = -margin;
    this.until = this.last + margin;
  }

  x(at) { return GUTTER + (at - this.from) / (this.until - this.from) * this.plotWidth; }
  at(x) { return this.from + (x - GUTTER) / this.plotWidth * (this.until - this.from); }
  get plotWidth() { return Math.max(1, this.width - GUTTER); }

  zoom(factor, x = GUTTER + this.plotWidth / 2) {
    const at = this.at(x);
    const span = Math.min(Math.max((this.until - this.from) * factor, 20), this.last * 1.5);
    const share = (x - GUTTER) / this.plotWidth;
    this.from = at - share * span;
    this.until = this.from + span;
    this.keepInside();
  }

  pan(dx, dy) {
    const shift = dx / this.plotWidth * (this.until - this.from);
    this.from += shift;
    this.until += shift;
    this.top += dy;
    this.keepInside();
  }

  keepInside() {
    const span = this.until - this.from;
    const middle = Math.min(Math.max((this.from + this.until) / 2, 0), this.last);
    this.from = middle - span / 2;
    this.until = middle + span / 2;
    this.top = Math.min(Math.max(this.top, 0), Math.max(0, this.height - (this.pixels - RULER)));
  }

  /// Brings a span into view.
  reveal(id) {
    const length = Math.max(this.end[id] - this.start[id], this.last / 2000);
    const middle = (this.start[id] + this.end[id]) / 2;
    const span = Math.min(Math.max(length * 8, 20), this.last * 1.04);
    this.from = middle - span / 2;
    this.until = middle + span / 2;
    this.top = this.y[this.data.spans.lane[id]] - (this.pixels - RULER) / 2;
    this.keepInside();
  }

  /// The span at a point of the canvas, or -1.
  hit(x, y) {
    if (x < GUTTER || y < RULER) return -1;
    const lane = this.laneAt(y - RULER + this.top);
    if (lane < 0) return -1;
    const row = this.rows[lane];
    const near = this.search(row, this.end, this.at(x - 2));
    return near < row.length && this.start[row[near]] <= this.at(x + 2) ? row[near] : -1;
  }

  laneAt(y) {
    let low = 0, high = this.y.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.y[middle] + LANE <= y) low = middle + 1; else high = middle;
    }
    return low < this.y.length && this.y[low] <= y ? low : -1;
  }

  /// The first place in a row whose time is not below `at`. A lane's spans follow each other.
  search(row, times, at) {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[row[middle]] < at) low = middle + 1; else high = middle;
    }
    return low;
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.pixels = this.canvas.clientHeight;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.pixels * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.keepInside();
    }
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const c = this.context;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.fillStyle = colour("paper");
    c.fillRect(0, 0, this.width, this.pixels);
    c.save();
    c.beginPath();
    c.rect(0, RULER, this.width, this.pixels - RULER);
    c.clip();
    c.translate(0, RULER - this.top);
    this.drawGrid(c, colour);
    c.save();
    c.beginPath();
    c.rect(GUTTER, this.top, this.plotWidth, this.pixels);
    c.clip();
    this.drawSpans(c, colour);
    this.drawArrows(c, colour);
    if (this.show.path) this.drawPath(c, colour);
    this.drawMarks(c, colour);
    c.restore();
    this.drawLabels(c, colour);
    c.restore();
    this.drawRuler(c, colour);
  }

  lanesInView() {
    const lanes = [];
    for (let lane = 0; lane < this.y.length; lane += 1) {
      if (this.y[lane] + LANE >= this.top && this.y[lane] <= this.top + this.pixels) lanes.push(lane);
    }
    return lanes;
  }

  ticks() {
    const rough = (this.until - this.from) / (this.plotWidth / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
    const ticks = [];
    for (let at = Math.ceil(this.from / step) * step; at <= this.until; at += step) ticks.push(at);
    return ticks;
  }

  drawGrid(c, colour) {
    c.fillStyle = colour("band");
    for (const lane of this.lanesInView()) c.fillRect(GUTTER, this.y[lane] + 1, this.plotWidth, LANE - 2);
    c.fillStyle = colour("grid");
    for (const at of this.ticks()) c.fillRect(this.x(at), this.top, 1, this.pixels);
  }

  drawSpans(c, colour) {
    const colours = KINDS.map(([name]) => colour(name));
    const [onBar, ink] = [colour("on-bar"), colour("ink")];
    for (const lane of this.lanesInView()) {
      const row = this.rows[lane], y = this.y[lane] + 2;
      let at = this.search(row, this.end, this.from);
      while (at < row.length && this.start[row[at]] <= this.until) {
        const id = row[at];
        const left = Math.max(this.x(this.start[id]), GUTTER - 2);
        const width = Math.min(this.x(this.end[id]), this.width + 2) - left;
        c.fillStyle = colours[this.kind[id]];
        c.fillRect(left, y, Math.max(width - (width > 3 ? 0.75 : 0), 1), LANE - 4);
        const name = this.data.texts[this.data.spans.name[id]];
        if (width > name.length * 6.4 + 8) {
          c.fillStyle = KINDS[this.kind[id]][0] === "wait" ? ink : onBar;
          c.fillText(name, left + 5, y + LANE / 2 - 1.5);
        }
        if (id === this.selected || id === this.hovered) {
          c.strokeStyle = ink;
          c.lineWidth = id === this.selected ? 2 : 1;
          c.strokeRect(left - 0.5, y - 0.5, Math.max(width, 2) + 0.5, LANE - 3);
        }
        // One of all spans that begin in a pixel is enough.
        at = width >= 1 ? at + 1 : Math.max(at + 1, this.search(row, this.end, this.at(left + 1)));
      }
    }
  }

  drawArrows(c, colour) {
    const { kind, from, to, lane } = this.data.arrows, spans = this.data.spans;
    const bottom = this.top + this.pixels;
    const chosen = this.selected >= 0 ? this.selected : this.hovered;
    let all = [], own = [];
    for (let at = 0; at < this.sent.length; at += 1) {
      if (!(kind[at] === 3 ? this.show.data : this.show.signals)) continue;
      if (this.arrived[at] < this.from || this.sent[at] > this.until) continue;
      const y0 = this.y[spans.lane[from[at]]], y1 = to[at] < 0 ? this.y[lane[at]] - LANE : this.y[spans.lane[to[at]]];
      if (Math.max(y0, y1) + LANE < this.top || Math.min(y0, y1) > bottom) continue;
      if (from[at] === chosen || to[at] === chosen) own.push(at);
      else if (all.length <= MOST_ARROWS) all.push(at);
    }
    const many = all.length > MOST_ARROWS;
    this.onHint(many ? "zoom in to see all arrows" : "");
    if (many) all = [];
    const colours = [colour("arrow-signal"), colour("arrow-signal"), colour("arrow-data"), colour("arrow-data")];
    for (const [list, alpha, width] of [[all, Math.min(0.55, 6 / Math.sqrt(all.length)), 1], [own, 1, 1.75]]) {
      c.globalAlpha = chosen >= 0 && list === all ? alpha * 0.5 : alpha;
      c.lineWidth = width;
      for (const at of list) {
        c.strokeStyle = c.fillStyle = colours[kind[at]];
        const target = to[at] < 0 ? this.y[lane[at]] - LANE / 2 : this.y[spans.lane[to[at]]] + LANE / 2;
        const source = kind[at] === 3 ? this.start[from[at]] : this.end[from[at]];
        const lane0 = this.y[spans.lane[from[at]]];
        this.arrow(c, this.x(source), target > lane0 ? lane0 + LANE - 2 : lane0 + 2, this.x(this.arrived[at]), target);
      }
    }
    c.globalAlpha = 1;
  }

  arrow(c, x0, y0, x1, y1) {
    const bend = Math.max((x1 - x0) / 2, 6);
    c.beginPath();
    c.moveTo(x0, y0);
    c.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    c.stroke();
    c.beginPath();
    c.moveTo(x1 + 0.5, y1);
    c.lineTo(x1 - 5, y1 - 3);
    c.lineTo(x1 - 5, y1 + 3);
    c.fill();
  }

  /// One line through time: along the lane of what all waited for, and from lane to lane where that changes.
  drawPath(c, colour) {
    c.strokeStyle = colour("path");
    c.lineWidth = 2;
    c.lineJoin = "round";
    c.beginPath();
    let before = null;
    for (const [id, from, until] of this.data.path) {
      if (until < this.from) continue;
      if (from > this.until) break;
      const y = this.y[this.data.spans.lane[id]] + LANE - 2;
      if (before === null) c.moveTo(this.x(from), y);
      else if (before !== y) { c.lineTo(this.x(from), before); c.lineTo(this.x(from), y); }
      c.lineTo(this.x(until), y);
      before = y;
    }
    c.stroke();
  }

  drawMarks(c, colour) {
    for (const { span, severity } of this.marks) {
      if (span < 0) continue;
      const x = Math.max(this.x(this.start[span]), GUTTER + 6), y = this.y[this.data.spans.lane[span]] + 3;
      c.fillStyle = colour(severity);
      c.strokeStyle = colour("paper");
      c.lineWidth = 1.5;
      c.beginPath();
      c.moveTo(x, y + 7);
      c.lineTo(x - 6, y - 4);
      c.lineTo(x + 6, y - 4);
      c.closePath();
      c.fill();
      c.stroke();
    }
  }

  drawLabels(c, colour) {
    c.fillStyle = colour("paper");
    c.fillRect(0, this.top, GUTTER, this.pixels);
    for (const [rank, y] of this.headings) {
      c.fillStyle = colour("ink");
      c.font = "600 12px system-ui, sans-serif";
      c.fillText(`rank ${rank}`, 14, y + GAP / 2 + 2);
      c.fillStyle = colour("line");
      c.fillRect(GUTTER, y + GAP / 2 + 2, this.plotWidth, 1);
    }
    c.font = "11px system-ui, sans-serif";
    c.fillStyle = colour("quiet");
    for (const lane of this.lanesInView()) c.fillText(this.data.lanes[lane].name, 24, this.y[lane] + LANE / 2);
  }

  drawRuler(c, colour) {
    c.fillStyle = colour("panel");
    c.fillRect(0, 0, this.width, RULER);
    c.fillStyle = colour("line");
    c.fillRect(0, RULER - 1, this.width, 1);
    c.fillStyle = colour("quiet");
    c.textAlign = "center";
    const digits = this.until - this.from < 5000 ? 3 : 2;
    for (const at of this.ticks()) if (this.x(at) > GUTTER) c.fillText(time(at, digits), this.x(at), RULER / 2);
    c.textAlign = "left";
  }
}
