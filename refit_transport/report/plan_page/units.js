"use strict";
// Sizes and times as people read them; the same rules as the terminal table.
const digits = (value) => value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);

function size(bytes) {
  for (const [scale, unit] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= scale) return `${digits(bytes / scale)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function seconds(value) {
  if (value >= 1) return `${digits(value)} s`;
  if (value >= 1e-3) return `${digits(value * 1e3)} ms`;
  return value ? `${digits(value * 1e6)} us` : "0 s";
}

const count = (value) => value.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// Round steps for an axis from 0 to `top` with about `wanted` ticks.
function ticks(top, wanted) {
  const raw = top / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = 0; i * step <= top * 1.0001; i++) found.push(i * step);
  return found;
}

// One unit for a whole time axis.
function timeScale(top) {
  if (top >= 1) return { unit: "s", factor: 1 };
  return top >= 1e-3 ? { unit: "ms", factor: 1e3 } : { unit: "us", factor: 1e6 };
}
