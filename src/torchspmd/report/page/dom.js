// Elements from names, attributes and children. Texts become text nodes, never HTML: a
// module may be called anything.

function h(name, attributes, ...children) {
  const element = document.createElement(name);
  apply(element, attributes);
  append(element, children);
  return element;
}

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  apply(element, attributes);
  append(element, children);
  return element;
}

function apply(element, attributes) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function clear(element) {
  while (element.firstChild) element.removeChild(element.firstChild);
  return element;
}

function say(text) {
  document.getElementById("live").textContent = text;
}

// A canvas whose pixels are those of the screen; draws again when its size changes.
function sharpCanvas(attributes, draw) {
  const canvas = h("canvas", attributes);
  const size = { width: 0, height: 0 };
  let waiting = false;
  function now() {
    waiting = false;
    const box = canvas.getBoundingClientRect();
    if (!box.width || !box.height) return;
    const scale = window.devicePixelRatio || 1;
    size.width = box.width;
    size.height = box.height;
    const width = Math.round(box.width * scale), height = Math.round(box.height * scale);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, box.width, box.height);
    draw(context, box.width, box.height);
  }
  function later() {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(now);
    }
  }
  new ResizeObserver(later).observe(canvas);
  return { canvas, size, draw: later, drawNow: now };
}

// ---------------------------------------------------------------------------- the tip

function showTip(x, y, lines) {
  const tip = document.getElementById("tip");
  clear(tip);
  append(tip, lines);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  const top = y + 16 + box.height > innerHeight ? y - 12 - box.height : y + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

function tipRow(name, value) {
  return h("div", { class: "tip-row" }, h("span", {}, name), h("b", {}, value));
}

// ---------------------------------------------------------------------------- colours

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Colours of the page as canvases need them; read again when the theme changes.
let palette = {};
function readPalette() {
  palette = {};
  for (const name of [
    "back", "panel", "text", "soft", "line", "accent", "bad", "warn", "good", "compute", "backward", "optimizer",
    "host", "comm", "copy", "exposed", "hostwait", "bubble",
    "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9",
  ]) palette[name] = colour(name);
}

// Colours that colour-blind people can tell apart; the same category has the same everywhere.
const CATEGORY_COLOURS = {
  parameter: "c0", gradient: "c1", "optimizer state": "c2", activation: "c3", temporary: "c4", "gathered parameter": "c9",
  communication: "c6", input: "c5", buffer: "c8", "made before training": "c8", workspace: "c7",
};
const CATEGORIES = Object.keys(CATEGORY_COLOURS);
function categoryColour(name, place) {
  return palette[CATEGORY_COLOURS[name] || `c${place % 10}`];
}
