// Curves over time, in SVG: axes with units, marks of faults, and a crosshair that all charts share.

const HEIGHT = 124, LEFT = 64, RIGHT = 6, TOP = 16, BOTTOM = 18; // pixels, around and with the axes
const GAP_S = 40; // without a snapshot, after which a curve begins anew
const TICK_STEPS_S = [30, 60, 300]; // between the times on the axis
const TICKS = 4; // times on the axis at most, which fit on a phone

let hovered = null; // the time under the pointer, in all charts
const charts = [];

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function box(className, ...children) {
  const made = document.createElement("span");
  made.className = className;
  made.append(...children);
  return made;
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= value * (1 - 1e-9));
}

/** A linear scale from 0: its ticks, which are at least `least` apart, and where a value lies between 0 (bottom) and 1. */
export function linear(values, top = null, least = 0) {
  const max = top ?? (Math.max(0, ...values) || 1), step = top ? top / 2 : Math.max(least, roundUp(max / 3));
  const end = Math.ceil(max / step - 1e-9) * step;
  return { ticks: Array.from({ length: Math.round(end / step) + 1 }, (_, i) => i * step), place: (value) => value / end };
}

/** A logarithmic scale of whole decades, for latencies: a median and its tail differ by powers of ten. */
function logarithmic(values) {
  const positive = values.filter((value) => value > 0);
  if (!positive.length) positive.push(0.001, 1);
  const low = Math.floor(Math.log10(Math.min(...positive)) + 1e-9);
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...positive)) - 1e-9));
  const ticks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  return { ticks, place: (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) };
}

/** A chart in `element`. `update` gives it data and draws it; so does the pointer, or an arrow key in it, with the crosshair. */
export class Chart {
  /** `format` makes text of a value, `tick` of one at the axis; `top` fixes the upper end of a linear scale. */
  constructor(title, format, { tick = format, top = null, least = 0, isLogarithmic = false } = {}) {
    Object.assign(this, { title, tick, top, least, isLogarithmic, data: null });
    this.format = (value) => (value === null || value === undefined ? "–" : format(value));
    this.svg = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
    this.tip = box("tip");
    this.element = box("plot", this.svg, this.tip);
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "img");
    this.element.addEventListener("pointermove", (event) => hover(this.timeAt(event.offsetX)));
    this.element.addEventListener("pointerleave", () => hover(null));
    this.element.addEventListener("blur", () => hover(null));
    this.element.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.data) return;
      event.preventDefault();
      const { times, end } = this.data;
      hover(times[Math.min(times.length - 1, Math.max(0, this.nearest(hovered ?? end) + step))]);
    });
    charts.push(this);
  }

  /**
   * Draws the time from `start` to `end`, in seconds since 1970.
   * Each series is { name, color, values, isFilled }, with a value or null for each of `times`; `limit` is { name, value } of a
   * line across, or null; `marks` are { time, text } of faults.
   */
  update(data) {
    this.data = data;
    this.draw();
  }

  timeAt(x) {
    const { start, end } = this.data, width = this.element.clientWidth - LEFT - RIGHT;
    return start + (end - start) * Math.min(1, Math.max(0, (x - LEFT) / width));
  }

  nearest(time) {
    const distances = this.data.times.map((one) => Math.abs(one - time));
    return distances.indexOf(Math.min(...distances));
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.data || width <= LEFT) return;
    const { start, end, limit, marks } = this.data, bottom = HEIGHT - BOTTOM, first = Math.max(0, this.data.times.findIndex((time) => time >= start));
    const times = this.data.times.slice(first), series = this.data.series.map((one) => ({ ...one, values: one.values.slice(first) }));
    const values = [...series.flatMap((one) => one.values), limit?.value].filter((value) => Number.isFinite(value));
    const { ticks, place } = this.isLogarithmic ? logarithmic(values) : linear(values, this.top, this.least);
    const x = (time) => LEFT + ((time - start) / (end - start)) * (width - LEFT - RIGHT);
    const y = (value) => bottom - place(value) * (bottom - TOP);
    const line = (name, x1, y1, x2, y2) => svg("line", { class: name, x1, y1, x2, y2 });
    const text = (name, at, y, label) => svg("text", { class: name, x: at, y }, label);
    const parts = ticks.flatMap((tick) => [line("grid", LEFT, y(tick), width - RIGHT, y(tick)), text("tick", LEFT - 6, y(tick) + 4, this.tick(tick))]);
    for (const time of timeTicks(start, end)) parts.push(text("time", x(time), HEIGHT - 3, clock(time).slice(0, end - start > 60 ? 5 : 8)));
    for (const mark of marks) parts.push(line("fault", x(mark.time), TOP, x(mark.time), bottom));
    for (const { color, values, isFilled } of series) {
      const { lines, areas } = paths(times, values, x, y, bottom);
      if (isFilled) parts.push(svg("path", { class: `area c-${color}`, d: areas }));
      parts.push(svg("path", { class: `curve c-${color}`, d: lines }));
    }
    if (limit) parts.push(line("limit", LEFT, y(limit.value), width - RIGHT, y(limit.value)), text("name", width - RIGHT, TOP - 6, `${limit.name} ${this.tick(limit.value)}`));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, ...this.crosshair(x, y, bottom));
    const latest = series.map((one) => `${one.name} ${this.format(one.values[one.values.length - 1])}`).join(", ");
    this.element.setAttribute("aria-label", `${this.title}: ${latest}${limit ? `, ${limit.name} ${this.tick(limit.value)}` : ""}`);
  }

  /** The elements of the crosshair, if there is one; fills the box beside it. */
  crosshair(x, y, bottom) {
    this.tip.replaceChildren();
    const { start, end, times, series, marks } = this.data;
    if (hovered === null || hovered < start || !times.length) return [];
    const i = this.nearest(hovered), at = x(times[i]), near = (end - start) / 60;
    const faults = marks.filter((mark) => Math.abs(mark.time - hovered) < near);
    const lines = series.map(({ name, color, values }) => box("line", box(`key c-${color}`), `${name} `, box("value", this.format(values[i]))));
    this.tip.append(box("line", clock(times[i])), ...lines, ...faults.slice(0, 3).map((mark) => box("line fault", mark.text)));
    this.tip.className = at > this.element.clientWidth / 2 ? "tip left" : "tip";
    this.tip.style.left = `${at}px`;
    const dots = series.filter(({ values }) => values[i] !== null).map(({ color, values }) => svg("circle", { class: `c-${color}`, cx: at, cy: y(values[i]), r: 3 }));
    return [svg("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: bottom }), ...dots];
  }
}

/** Full minutes, or quarters of them, of which the axis has room for the labels. */
function timeTicks(start, end) {
  const step = TICK_STEPS_S.find((seconds) => (end - start) / seconds <= (seconds < 60 ? 2 : TICKS)) ?? TICK_STEPS_S.at(-1);
  const first = Math.ceil((start + (end - start) * 0.06) / step) * step, ticks = [];
  for (let time = first; time <= end - (end - start) * 0.06; time += step) ticks.push(time);
  return ticks;
}

/** The paths of the runs of values that are not interrupted, as lines and as areas. */
function paths(times, values, x, y, bottom) {
  const runs = [];
  values.forEach((value, i) => {
    if (value === null || !Number.isFinite(value)) return;
    const follows = i > 0 && values[i - 1] !== null && times[i] - times[i - 1] < GAP_S;
    if (!follows || !runs.length) runs.push([]);
    runs[runs.length - 1].push([x(times[i]).toFixed(1), y(value).toFixed(1)]);
  });
  const lines = runs.map((run) => "M" + run.map((point) => point.join(" ")).join("L"));
  const areas = runs.map((run, i) => `${lines[i]}L${run[run.length - 1][0]} ${bottom}L${run[0][0]} ${bottom}Z`);
  return { lines: lines.join(""), areas: areas.join("") };
}

function hover(time) {
  if (hovered === time) return;
  hovered = time;
  for (const chart of charts) if (chart.element.isConnected) chart.draw();
}
