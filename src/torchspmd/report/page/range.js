// A stretch of an axis that is seen, moved and enlarged; shared by the timeline and memory.

class Range {
  constructor(first, last, changed) {
    this.first = first;
    this.last = last > first ? last : first + 1;
    this.low = this.first;
    this.high = this.last;
    this.home = this.first; // where the whole begins to be told
    this.least = (this.last - this.first) / 1e6;
    this.changed = changed;
  }

  get span() {
    return this.high - this.low;
  }

  get isWhole() {
    return this.low <= this.first && this.high >= this.last;
  }

  set(low, high) {
    let span = Math.min(Math.max(high - low, this.least), this.last - this.first);
    let start = low;
    if (start < this.first) start = this.first;
    if (start + span > this.last) start = this.last - span;
    this.low = start;
    this.high = start + span;
    this.changed();
  }

  zoom(at, factor) {
    this.set(at - (at - this.low) * factor, at + (this.high - at) * factor);
  }

  pan(part) {
    this.set(this.low + part * this.span, this.high + part * this.span);
  }

  whole() {
    this.set(this.home, this.last);
  }

  // Show a stretch with some room around it.
  show(low, high, room = 1) {
    const width = Math.max(high - low, this.least * 10);
    this.set(low - room * width, high + room * width);
  }
}

// Wheel, drag and keys on a canvas. place(x) gives the value below a pixel.
function steer(canvas, range, left, width, acts = {}) {
  const value = (x) => range.low + (x - left()) / width() * range.span;
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!sideways && event.deltaY > 0 && range.isWhole) return;  // nothing to show more of: the page scrolls
    event.preventDefault();
    if (sideways) range.pan((event.deltaX || event.deltaY) / width());
    else range.zoom(value(event.offsetX), Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * 0.0022));
  }, { passive: false });

  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    grabbed = { x: event.offsetX, low: range.low, high: range.high, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!grabbed) return acts.hover && acts.hover(event, value(event.offsetX));
    const shift = (grabbed.x - event.offsetX) / width() * (grabbed.high - grabbed.low);
    if (Math.abs(grabbed.x - event.offsetX) > 3) grabbed.moved = true;
    if (grabbed.moved) {
      canvas.classList.add("grabbed");
      range.set(grabbed.low + shift, grabbed.high + shift);
    }
  });
  const drop = (event) => {
    if (grabbed && !grabbed.moved && acts.click && event.type === "pointerup") acts.click(event, value(event.offsetX));
    grabbed = null;
    canvas.classList.remove("grabbed");
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("pointerleave", () => acts.leave && acts.leave());
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const middle = (range.low + range.high) / 2;
    const keys = {
      ArrowLeft: () => range.pan(-0.15), ArrowRight: () => range.pan(0.15), a: () => range.pan(-0.15), d: () => range.pan(0.15),
      "+": () => range.zoom(middle, 0.7), "=": () => range.zoom(middle, 0.7), w: () => range.zoom(middle, 0.7),
      "-": () => range.zoom(middle, 1 / 0.7), s: () => range.zoom(middle, 1 / 0.7), Home: () => range.whole(), 0: () => range.whole(),
      ...acts.keys,
    };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });
}

// Round places for marks on an axis.
function ticks(low, high, most, base = 10) {
  const rough = (high - low) / Math.max(1, most);
  if (!(rough > 0)) return [low];
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const steps = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * (steps.find((each) => each * power >= rough) || steps.at(-1));
  const places = [];
  for (let place = Math.ceil(low / step) * step; place <= high; place += step) places.push(place);
  return places;
}
