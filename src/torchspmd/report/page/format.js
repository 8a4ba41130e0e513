// Figures as text.

// Numbers keep their units on one line.
const SPACE = "\u00a0";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function digits(value) {
  const size = Math.abs(value);
  return size >= 100 || size === 0 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  let size = Math.abs(value), unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${value < 0 ? "−" : ""}${unit ? digits(size) : Math.round(size)}${SPACE}${UNITS[unit]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (size === 0) return `0${SPACE}s`;
  if (size < 1e-6) return `${sign}${digits(size * 1e9)}${SPACE}ns`;
  if (size < 1e-3) return `${sign}${digits(size * 1e6)}${SPACE}µs`;
  if (size < 1) return `${sign}${digits(size * 1e3)}${SPACE}ms`;
  return `${sign}${digits(size)}${SPACE}s`;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [limit, letter] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${digits(value / (letter === "k" ? 1e3 : limit))}${SPACE}${letter}`;
  }
  return Number.isInteger(value) ? String(value) : digits(value);
}

function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(Math.abs(value) < 0.0995 || (value > 0.995 && value < 1) ? 1 : 0)}${SPACE}%`;
}

// What a table or a figure shows, by the unit that the data names.
function show(value, unit) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "string") return value;
  if (unit === "B") return bytes(value);
  if (unit === "s") return seconds(value);
  if (unit === "flop") return `${short(value)}${value >= 1e4 ? "" : SPACE}FLOP`;
  if (unit === "%") return percent(value);
  if (unit === "short") return short(value).replace(SPACE, "");
  if (typeof value === "number") {
    if (Math.abs(value) >= 1e7 && unit !== "n") return short(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return Math.abs(value) < 0.01 ? value.toPrecision(2) : digits(value);
  }
  return String(value);
}

function difference(before, after, unit) {
  if (typeof before !== "number" || typeof after !== "number") return "";
  const change = after - before;
  if (!change) return "=";
  const sign = change > 0 ? "+" : "−";
  const part = before ? ` (${sign}${Math.abs(100 * change / before).toFixed(1)} %)` : "";
  const size = unit === "%" ? `${Math.abs(100 * change).toFixed(1)} points` : show(Math.abs(change), unit);
  return `${sign}${size}${part}`;
}
