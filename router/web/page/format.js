// Elements, and text of numbers with their units.

export function h(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const integer = (number) => Math.round(number).toLocaleString("en");
export const count = (number, noun) => `${integer(number)} ${noun}${Math.round(number) === 1 ? "" : "s"}`;
export const percent = (share) => `${(share * 100).toFixed(share > 0.9 && share < 1 ? 1 : 0)} %`;

/** Returns [number, unit], like the next two. */
export function duration(seconds) {
  if (seconds === null || !isFinite(seconds)) return ["–", ""];
  const ms = seconds * 1000;
  if (ms < 10) return [ms.toFixed(1), "ms"];
  if (ms < 1000) return [ms.toFixed(0), "ms"];
  return [seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(seconds < 100 ? 1 : 0), "s"];
}

export function bandwidth(bytes) {
  if (bytes === null) return ["–", ""];
  for (const [size, unit] of [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]]) {
    if (bytes >= size) return [(bytes / size).toFixed(bytes < 10 * size ? 2 : bytes < 100 * size ? 1 : 0), unit];
  }
  return [bytes.toFixed(0), "B/s"];
}

export function perSecond(rate, unit) {
  return rate === null ? ["–", ""] : [rate < 10 ? rate.toFixed(1) : integer(rate), unit];
}

export const format = ([number, unit]) => (unit ? `${number} ${unit}` : number);

export const short = (value) => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
export const latencyTick = (seconds) => (seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`);
