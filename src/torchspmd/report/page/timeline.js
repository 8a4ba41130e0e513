// The slices of a step on their lanes. Slices below a pixel are drawn together: a frame costs
// one pass over what is seen, and as many rectangles as there are pixels.

const EXPOSED = ["", "waits for communication", "waits for the host", "waits for another stage"];
const EXPOSED_COLOURS = ["", "exposed", "hostwait", "bubble"];
const GAP = 8, RULER = 22, PHASES = 18, LAYERS = 17;
const TOGETHER = 0.01; // microseconds: slices that overlap by less were rounded

class Slices {
  constructor(data) {
    this.data = data;
    this.count = data.start.length;
    this.start = Float64Array.from(data.start);
    this.end = Float64Array.from(data.start, (start, place) => start + data.duration[place]);
    this.last = this.end.reduce((most, end) => Math.max(most, end), 0);
    this.last = data.phases.reduce((most, phase) => Math.max(most, phase.start + phase.duration), this.last);
    this.rows = [];
    this.rowOf = new Int32Array(this.count).fill(-1);
    this.lanes = data.lanes.map((lane, place) => ({ ...lane, place, rows: [] }));
    this.waiters = new Map();
    data.waits_for.forEach((other, place) => {
      if (other >= 0) this.waiters.set(other, [...(this.waiters.get(other) || []), place]);
    });
    this.exposed = [];
    for (let place = 0; place < this.count; place++) if (data.exposed[place]) this.exposed.push(place);
    this.exposed.sort((a, b) => this.start[a] - this.start[b]);
    for (const lane of this.lanes) this.pack(lane);
  }

  // Rows of a lane in which no two slices overlap: a slice inside another goes one row below.
  pack(lane) {
    const places = [];
    for (let place = 0; place < this.count; place++) if (this.data.lane[place] === lane.place) places.push(place);
    places.sort((a, b) => this.start[a] - this.start[b] || this.end[b] - this.end[a]);
    const rows = [], ends = [];
    for (const place of places) {
      let row = ends.findIndex((end) => end <= this.start[place] + TOGETHER);
      if (row < 0) row = ends.push(0) - 1;
      ends[row] = this.end[place];
      (rows[row] = rows[row] || []).push(place);
    }
    for (const list of rows.length ? rows : [[]]) {
      const row = { lane, places: Int32Array.from(list), index: this.rows.length };
      for (const place of list) this.rowOf[place] = row.index;
      lane.rows.push(row);
      this.rows.push(row);
    }
  }

  text(column, place) {
    return this.data.strings[this.data[column][place]] ?? "";
  }

  // The first slice of a row that ends behind a time.
  from(row, time) {
    let low = 0, high = row.places.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[row.places[middle]] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Stretches of the computation by layer: the module down to its first number.
  layers() {
    const of = this.data.strings.map((text) => {
      const parts = text.split(".");
      const number = parts.findIndex((part) => /^\d+$/.test(part));
      return number < 0 ? "" : parts.slice(0, number + 1).join(".");
    });
    const rows = this.lanes.filter((lane) => lane.kind === "compute").map((lane) => lane.rows[0]);
    const main = rows.reduce((best, row) => (best && best.places.length >= row.places.length ? best : row), null);
    const spans = [];
    for (const place of main ? main.places : []) {
      const path = of[this.data.module[place]] ?? "";
      const last = spans.at(-1);
      if (last && last.path === path) last.end = this.end[place];
      else spans.push({ path, start: this.start[place], end: this.end[place] });
    }
    return spans.filter((span) => span.path);
  }

  colourName(place) {
    const exposed = this.data.exposed[place];
    if (exposed) return EXPOSED_COLOURS[exposed] || "exposed";
    const kind = this.data.lanes[this.data.lane[place]].kind;
    if (kind === "host") return "host";
    if (kind === "communicator") return "comm";
    if (kind === "copy") return "copy";
    const phase = this.text("phase", place);
    return phase === "backward" || phase === "recompute" ? "backward" : phase === "optimizer" ? "optimizer" : "compute";
  }
}

function buildTimeline(root, data, page) {
  if (data.missing) return root.append(missing(data));
  const slices = new Slices(data);
  const names = Array.from({ length: slices.count }, (_, place) => slices.colourName(place));
  const causes = new Map((data.causes || []).map((each) => [`${each.kind}\n${each.module}`, each.cause]));
  const state = { chosen: -1, hover: -1, find: "", lit: null, drawn: 0 };
  // Few rows are drawn high, many low.
  const ROW = Math.max(20, Math.min(30, Math.floor(300 / slices.rows.length)));
  const spans = slices.layers();
  let y = RULER + PHASES + (spans.length ? LAYERS : 0) + 6;
  for (const lane of slices.lanes) {
    lane.y = y;
    for (const row of lane.rows) {
      row.y = y;
      y += ROW;
    }
    y += GAP;
  }
  const height = y + 4;
  let left = 110;

  const panel = h("div", { class: "details", "aria-live": "polite" });
  const main = sharpCanvas({
    class: "timeline", tabindex: 0, role: "application",
    "aria-label": "Timeline. Arrow keys move, plus and minus zoom, n and p go to the next and previous exposed wait, comma and full stop to the previous and next slice.",
    style: { height: `${height}px` },
  }, draw);
  const overview = sharpCanvas({ class: "overview", "aria-hidden": "true" }, drawOverview);
  const range = new Range(0, slices.last, () => {
    main.draw();
    overview.draw();
  });
  range.least = Math.min(1, slices.last / 100);
  // The host may run ahead by more than a step: that can be reached, but is not shown at first.
  range.first = slices.start.reduce((least, start) => Math.min(least, start), 0);
  range.home = 0;
  const x = (time) => left + (time - range.low) / range.span * (main.size.width - left - 8);

  function light() {
    const words = state.find.toLowerCase();
    const module = app.state.module;
    if (!words && !module) {
      state.lit = null;
    } else {
      const hits = data.strings.map((text) => (!words || text.toLowerCase().includes(words)));
      const inside = data.strings.map((text) => (!module || app.isInside(text, module)));
      state.lit = new Uint8Array(slices.count);
      let count = 0, time = 0;
      for (let place = 0; place < slices.count; place++) {
        const hit = (hits[data.name[place]] || hits[data.module[place]]) && inside[data.module[place]];
        state.lit[place] = hit ? 1 : 0;
        if (hit) {
          count += 1;
          time += data.duration[place];
        }
      }
      found.textContent = `${count.toLocaleString("en-US")} slices, ${seconds(time * 1e-6)} in all`;
    }
    found.hidden = state.lit === null;
    clear(chip);
    if (module) append(chip, [h("span", { class: "chip" }, "module ", h("b", {}, module), h("button", {
      "aria-label": "Clear the module", onclick: () => app.selectModule(null),
    }, "×"))]);
    main.draw();
    overview.draw();
  }

  function draw(context, width) {
    context.font = "11px " + FONT;
    const widest = Math.max(...slices.lanes.map((lane) => context.measureText(lane.name).width));
    left = Math.ceil(Math.max(72, Math.min(widest + 22, width / 4)));
    context.textBaseline = "middle";
    drawRuler(context, width);
    drawPhases(context, width);
    drawLayers(context, width);
    state.drawn = 0;
    for (const lane of slices.lanes) {
      context.fillStyle = palette.soft;
      context.textAlign = "right";
      context.fillText(fit(context, lane.name, left - 12), left - 8, lane.y + ROW / 2);
      context.textAlign = "left";
      for (const row of lane.rows) {
        context.fillStyle = palette.panel;
        context.fillRect(left, row.y, width - left - 8, ROW - 2);
        const text = elsewhere(row);
        if (text) {
          context.fillStyle = palette.soft;
          context.fillText(fit(context, text, width - left - 20), left + 6, row.y + ROW / 2 - 1);
        }
      }
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left - 8, height);
    context.clip();
    for (const row of slices.rows) drawRow(context, row, width);
    drawJoins(context);
    for (const place of [state.hover, state.chosen]) outline(context, place);
    context.restore();
  }

  // What a row without a slice in sight says.
  function elsewhere(row) {
    const count = row.places.length;
    if (!count) return "nothing in this step";
    const last = slices.end[row.places[count - 1]], first = slices.start[row.places[0]];
    if (last <= range.low) return `← ${count.toLocaleString("en-US")} slices, the last ${seconds((range.low - last) * 1e-6)} before`;
    if (first >= range.high) return `→ ${count.toLocaleString("en-US")} slices, the first ${seconds((first - range.high) * 1e-6)} later`;
    return "";
  }

  function drawRuler(context, width) {
    context.fillStyle = palette.soft;
    context.strokeStyle = palette.line;
    context.lineWidth = 1;
    const places = ticks(range.low, range.high, (width - left) / 110);
    const step = places.length > 1 ? places[1] - places[0] : range.span;
    const unit = range.high >= 1e4 && step >= 10 ? [1e3, "ms"] : [1, "µs"];
    const decimals = Math.max(0, Math.ceil(-Math.log10(step / unit[0]) - 1e-9));
    context.textAlign = "left";
    for (const time of places) {
      const at = Math.round(x(time)) + 0.5;
      context.beginPath();
      context.moveTo(at, 4);
      context.lineTo(at, height - 6);
      context.stroke();
      const label = `${(time / unit[0]).toFixed(decimals)} ${unit[1]}`;
      if (at + 4 + context.measureText(label).width < width) context.fillText(label, at + 4, 10);
    }
  }

  function drawPhases(context, width) {
    for (const phase of data.phases) {
      const from = Math.max(x(phase.start), left), to = Math.min(x(phase.start + phase.duration), width - 8);
      if (to - from < 0.5) continue;
      const name = { backward: "backward", recompute: "backward", optimizer: "optimizer" }[phase.name] || "compute";
      context.globalAlpha = 0.28;
      context.fillStyle = palette[name];
      context.fillRect(from, RULER, Math.max(1, to - from - 1), PHASES - 3);
      context.globalAlpha = 1;
      context.fillStyle = palette.text;
      const text = fit(context, phase.name, to - from - 10);
      if (text.length > 2) context.fillText(text, from + 5, RULER + PHASES / 2 - 1);
    }
  }

  function drawLayers(context, width) {
    if (!spans.length) return;
    const top = RULER + PHASES;
    context.fillStyle = palette.soft;
    context.textAlign = "right";
    context.fillText("layer", left - 8, top + LAYERS / 2 - 2);
    context.textAlign = "left";
    spans.forEach((span, place) => {
      const from = Math.max(x(span.start), left), to = Math.min(x(span.end), width - 8);
      if (to - from < 1) return;
      const chosen = app.state.module && app.isInside(span.path, app.state.module);
      context.fillStyle = chosen ? palette.accent : palette.line;
      context.globalAlpha = chosen ? 0.5 : place % 2 ? 0.55 : 1;
      context.fillRect(from, top, Math.max(1, to - from - 1), LAYERS - 4);
      context.globalAlpha = 1;
      context.fillStyle = palette.text;
      const parts = span.path.split(".");
      const text = [parts.slice(-2).join("."), parts.at(-1)].find((each) => context.measureText(each).width < to - from - 6);
      if (text) context.fillText(text, from + 4, top + LAYERS / 2 - 2);
    });
  }

  function drawRow(context, row, width) {
    const scale = (width - left - 8) / range.span;
    const places = row.places;
    // What is narrower than a pixel: one column, in the colour of what takes most of it.
    let column = -1, covered = 0, best = 0, bestPlace = -1;
    const flush = () => {
      if (column < 0) return;
      context.globalAlpha = Math.min(1, 0.45 + covered * 0.55) * dim(bestPlace);
      context.fillStyle = palette[names[bestPlace]];
      context.fillRect(column, row.y, 1, ROW - 2);
      state.drawn += 1;
      column = -1;
    };
    for (let place, at = slices.from(row, range.low); at < places.length; at++) {
      place = places[at];
      if (slices.start[place] > range.high) break;
      const from = left + (slices.start[place] - range.low) * scale;
      const wide = (slices.end[place] - slices.start[place]) * scale;
      if (wide < 1.5) {
        const here = Math.floor(from);
        if (here !== column) {
          flush();
          column = here;
          covered = best = 0;
          bestPlace = place;
        }
        covered += wide;
        const weight = wide * (data.exposed[place] ? 4 : 1) * (state.lit && state.lit[place] ? 1e6 : 1);
        if (weight > best) {
          best = weight;
          bestPlace = place;
        }
        continue;
      }
      flush();
      state.drawn += 1;
      const begin = Math.max(from, left - 2), end = Math.min(from + wide, width);
      context.globalAlpha = dim(place);
      context.fillStyle = palette[names[place]];
      context.fillRect(begin, row.y, Math.max(1, end - begin - (wide > 4 ? 1 : 0)), ROW - 2);
      if (end - begin > 34) {
        context.fillStyle = inkOn(palette[names[place]]);
        const text = fit(context, shortName(slices.text("name", place)), end - begin - 8);
        if (text.length > 2) context.fillText(text, Math.max(begin, left) + 4, row.y + ROW / 2 - 1);
      }
    }
    flush();
    context.globalAlpha = 1;
  }

  function dim(place) {
    return state.lit === null || state.lit[place] ? 1 : 0.16;
  }

  // Lines from a collective to the wait for it: of the chosen slice, and of all when few are seen.
  function drawJoins(context) {
    const pairs = new Set();
    for (const place of [state.chosen, state.hover]) for (const pair of joins(place)) pairs.add(pair.join());
    const seen = slices.exposed.filter((each) => slices.end[each] > range.low && slices.start[each] < range.high);
    if (seen.length <= 40) for (const place of seen) for (const pair of joins(place)) pairs.add(pair.join());
    context.lineWidth = 1.4;
    context.strokeStyle = palette.exposed;
    for (const text of pairs) {
      const [sent, wait] = text.split(",").map(Number);
      const from = slices.rows[slices.rowOf[sent]], to = slices.rows[slices.rowOf[wait]];
      const strong = [sent, wait].some((each) => each === state.chosen || each === state.hover);
      const bottom = from.y > to.y;
      const y0 = bottom ? from.y : from.y + ROW - 2, y1 = bottom ? to.y + ROW - 2 : to.y;
      const x0 = x(Math.min(slices.end[sent], slices.end[wait])), x1 = x(slices.end[wait]);
      context.globalAlpha = strong ? 1 : 0.5;
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  function joins(place) {
    if (place < 0) return [];
    const other = data.waits_for[place];
    if (other >= 0) return [[other, place]];
    return (slices.waiters.get(place) || []).map((wait) => [place, wait]);
  }

  function outline(context, place) {
    if (place < 0) return;
    const row = slices.rows[slices.rowOf[place]];
    context.strokeStyle = palette.text;
    context.lineWidth = place === state.chosen ? 2 : 1;
    const from = x(slices.start[place]);
    context.strokeRect(from, row.y - 0.5, Math.max(2, x(slices.end[place]) - from), ROW - 1);
  }

  function drawOverview(context, width, high) {
    const scale = (width - left - 8) / slices.last;
    context.fillStyle = palette.panel;
    context.fillRect(left, 0, width - left - 8, high);
    const columns = Math.max(1, Math.floor(width - left - 8));
    const busy = new Float64Array(columns), waits = new Float64Array(columns);
    for (const lane of slices.lanes) {
      if (lane.kind !== "compute") continue;
      for (const row of lane.rows) for (const place of row.places) {
        const target = data.exposed[place] ? waits : busy;
        if (state.lit && !state.lit[place]) continue;
        let from = slices.start[place] * scale;
        const to = slices.end[place] * scale;
        while (from < to) {
          const column = Math.floor(from), next = Math.min(to, column + 1);
          if (column < columns) target[column] += next - from;
          from = next > from ? next : from + 1;
        }
      }
    }
    for (let column = 0; column < columns; column++) {
      const all = Math.min(1, busy[column] + waits[column]), wait = Math.min(all, waits[column]);
      context.fillStyle = palette.compute;
      context.fillRect(left + column, high - all * high, 1, all * high);
      context.fillStyle = palette.exposed;
      context.fillRect(left + column, high - wait * high, 1, wait * high);
    }
    context.strokeStyle = palette.accent;
    context.lineWidth = 2;
    const from = left + Math.max(0, range.low) * scale, to = left + Math.max(0, range.high) * scale;
    context.strokeRect(from + 1, 1, Math.max(3, to - from - 2), high - 2);
    context.fillStyle = palette.soft;
    context.font = "11px " + FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText(fit(context, "whole step", left - 12), left - 8, high / 2);
    context.textAlign = "left";
  }

  function at(event, time) {
    const row = slices.rows.find((each) => event.offsetY >= each.y && event.offsetY < each.y + ROW);
    if (!row || event.offsetX < left) return [-1, 0];
    const pixel = range.span / (main.size.width - left - 8);
    let best = -1, count = 0;
    for (let index = slices.from(row, time - pixel); index < row.places.length; index++) {
      const place = row.places[index];
      if (slices.start[place] > time + pixel) break;
      count += 1;
      if (best < 0 || data.duration[place] > data.duration[best]) best = place;
    }
    return [best, count];
  }

  function facts(place) {
    const exposed = data.exposed[place];
    const detail = slices.text("detail", place);
    const length = data.duration[place] * 1e-6;
    const sent = data.waits_for[place];
    const kind = sent >= 0 ? slices.text("name", sent) : "";
    const plain = kind.split(" ")[0]; // "all_gather tp" is an all_gather
    const cause = causes.get(`${plain}\n${slices.text("module", place)}`);
    return [
      ["module", slices.text("module", place)],
      ["phase", slices.text("phase", place)],
      ["lane", data.lanes[data.lane[place]].name],
      ["starts at", seconds(data.start[place] * 1e-6)],
      ["takes", seconds(length)],
      detail && ["shapes", detail],
      data.bytes[place] ? ["bytes", `${bytes(data.bytes[place])}${length && !exposed ? `, ${bytes(data.bytes[place] / length)}/s` : ""}`] : null,
      data.flops[place] ? ["FLOPs", `${show(data.flops[place], "flop")}${length ? `, ${show(data.flops[place] / length, "flop")}/s` : ""}`] : null,
      exposed ? ["exposed", EXPOSED[exposed]] : null,
      sent >= 0 ? ["waits for", `${kind} on ${data.lanes[data.lane[sent]].name}`] : null,
      exposed && cause ? ["because", cause] : null,
    ].filter(Boolean);
  }

  function hover(event, time) {
    const span = layerAt(event, time);
    if (span) {
      return showTip(event.clientX, event.clientY, [h("div", { class: "tip-head" }, span.path),
        tipRow("takes", seconds((span.end - span.start) * 1e-6)), h("div", { class: "tip-more" }, "click to highlight it")]);
    }
    const [place, count] = at(event, time);
    if (place !== state.hover) {
      state.hover = place;
      main.draw();
    }
    if (place < 0) return hideTip();
    showTip(event.clientX, event.clientY, [
      h("div", { class: "tip-head" }, slices.text("name", place)),
      facts(place).map(([name, value]) => tipRow(name, value || "–")),
      count > 1 && h("div", { class: "tip-more" }, `the longest of ${count} slices at this pixel; zoom in to see them`),
    ]);
  }

  function choose(place, move = false) {
    state.chosen = place;
    clear(panel);
    if (place < 0) {
      append(panel, [h("p", { class: "hint" }, "Click a slice, or press n for the next exposed wait, to see what it is. Wheel or + and − zoom, drag or arrow keys move, 0 shows everything.")]);
    } else {
      const module = slices.text("module", place);
      append(panel, [
        h("h3", {}, slices.text("name", place)),
        h("dl", {}, facts(place).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, name === "module" ? moduleLink(value) : value)))),
        h("div", { class: "acts" },
          h("button", { onclick: () => range.show(slices.start[place], slices.end[place]) }, "Zoom to it"),
          module && h("button", { onclick: () => app.selectModule(module) }, "Highlight its module"),
          joins(place).map(([sent, wait]) => {
            const other = sent === place ? wait : sent;
            return h("button", { onclick: () => choose(other, true) }, other === sent ? "Go to the collective" : "Go to its wait");
          })),
      ]);
      if (move) {
        const room = Math.max(range.span, (slices.end[place] - slices.start[place]) * 3);
        if (slices.start[place] < range.low || slices.end[place] > range.high || (slices.end[place] - slices.start[place]) < range.span / 400) {
          const width = Math.min(room, Math.max((slices.end[place] - slices.start[place]) * 12, range.least * 50));
          const middle = (slices.start[place] + slices.end[place]) / 2;
          range.set(middle - width / 2, middle + width / 2);
        }
        say(`${slices.text("name", place)}, ${facts(place).map((pair) => pair.join(" ")).join(", ")}`);
      }
    }
    main.draw();
  }

  function nextExposed(way) {
    const list = slices.exposed.filter((each) => !state.lit || state.lit[each]);
    if (!list.length) return say("There is no exposed wait.");
    const now = state.chosen >= 0 ? slices.start[state.chosen] : way > 0 ? -1 : Infinity;
    const found = way > 0 ? list.find((each) => slices.start[each] > now) ?? list[0]
      : list.findLast((each) => slices.start[each] < now) ?? list.at(-1);
    choose(found, true);
  }

  function neighbour(way) {
    if (state.chosen < 0) return choose(slices.rows[0].places[0] ?? -1, true);
    const row = slices.rows[slices.rowOf[state.chosen]];
    const next = row.places[row.places.indexOf(state.chosen) + way];
    if (next !== undefined) choose(next, true);
  }

  function otherLane(way) {
    const now = state.chosen < 0 ? -1 : slices.rowOf[state.chosen];
    for (let index = now + way; index >= 0 && index < slices.rows.length; index += way) {
      const row = slices.rows[index];
      if (!row.places.length) continue;
      const time = now < 0 ? range.low : slices.start[state.chosen];
      return choose(row.places[Math.min(slices.from(row, time), row.places.length - 1)], true);
    }
  }

  function layerAt(event, time) {
    const top = RULER + PHASES;
    if (event.offsetX < left || event.offsetY < top || event.offsetY >= top + LAYERS) return null;
    return spans.find((span) => span.start <= time && time < span.end) || null;
  }

  function click(event, time) {
    const span = layerAt(event, time);
    if (span) app.selectModule(app.state.module === span.path ? null : span.path);
    else choose(at(event, time)[0]);
  }

  steer(main.canvas, range, () => left, () => main.size.width - left - 8, {
    hover,
    leave: () => {
      state.hover = -1;
      hideTip();
      main.draw();
    },
    click,
    keys: {
      n: () => nextExposed(1), p: () => nextExposed(-1), ",": () => neighbour(-1), ".": () => neighbour(1),
      ArrowUp: () => otherLane(-1), ArrowDown: () => otherLane(1), Escape: () => choose(-1),
      f: () => state.chosen >= 0 && range.show(slices.start[state.chosen], slices.end[state.chosen]),
    },
  });
  main.canvas.addEventListener("dblclick", (event) => {
    const [place] = at(event, range.low + (event.offsetX - left) / (main.size.width - left - 8) * range.span);
    if (place >= 0) range.show(slices.start[place], slices.end[place]);
  });
  const jump = (event) => {
    if (!event.buttons) return;
    const middle = (event.offsetX - left) / (overview.size.width - left - 8) * slices.last;
    range.set(middle - range.span / 2, middle + range.span / 2);
  };
  overview.canvas.addEventListener("pointerdown", jump);
  overview.canvas.addEventListener("pointermove", jump);

  const found = h("span", { class: "found", hidden: true });
  const chip = h("span", {});
  const box = h("input", { type: "search", placeholder: "Find operator or module", "aria-label": "Find operator or module", oninput: () => {
    state.find = box.value;
    light();
  } });
  const middle = () => (range.low + range.high) / 2;
  root.append(
    h("div", { class: "bar-of-tools" },
      h("span", { class: "together" },
        h("button", { "aria-label": "Zoom in", title: "Zoom in (+)", onclick: () => range.zoom(middle(), 0.5) }, "+"),
        h("button", { "aria-label": "Zoom out", title: "Zoom out (−)", onclick: () => range.zoom(middle(), 2) }, "−"),
        h("button", { title: "Show the whole step (0)", onclick: () => range.whole() }, "Whole step")),
      slices.exposed.length ? h("span", { class: "together" },
        h("button", { title: "Previous exposed wait (p)", onclick: () => nextExposed(-1) }, "‹ Exposed"),
        h("button", { title: "Next exposed wait (n)", onclick: () => nextExposed(1) }, "Exposed ›")) : null,
      box, chip, found,
      h("span", { class: "legend" }, legendOf(slices, names).map(([text, name]) => h("span", {}, h("i", { class: `swatch ${name}` }), text)))),
    overview.canvas, main.canvas, panel);
  choose(-1);
  light();
  app.onModule(page, light);
  // For scripts that look at the page: what is drawn, and where.
  root.view = {
    count: slices.count, exposed: slices.exposed.length, range, state, slices, spans, choose, draw: main.drawNow,
    pixel: (place) => [x((slices.start[place] + slices.end[place]) / 2), slices.rows[slices.rowOf[place]].y + ROW / 2],
  };
  return {
    resize: () => {
      main.draw();
      overview.draw();
    },
    now: () => {
      main.drawNow();
      overview.drawNow();
    },
    // From the verdict: the longest wait of a module, of a kind.
    goTo: (module, kind) => {
      let best = -1;
      for (const place of slices.exposed) {
        if (!app.isInside(slices.text("module", place), module)) continue;
        const sent = data.waits_for[place];
        if (kind && sent >= 0 && slices.text("name", sent).split(" ")[0] !== kind) continue;
        if (best < 0 || data.duration[place] > data.duration[best]) best = place;
      }
      if (best >= 0) choose(best, true);
    },
  };
}

// On a slice: mm of aten.mm.default.
function shortName(name) {
  return name.replace(/^aten\./, "").replace(/\.default$/, "");
}

function legendOf(slices, names) {
  const used = new Set(names);
  return [
    ["compute, forward", "compute"], ["compute, backward", "backward"], ["optimizer", "optimizer"], ["host", "host"],
    ["communication", "comm"], ["copies", "copy"], ["exposed communication", "exposed"], ["waits for host", "hostwait"],
    ["pipeline bubble", "bubble"],
  ].filter(([, name]) => used.has(name));
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

// As much of a text as there is room for.
function fit(context, text, room) {
  if (room < 8) return "";
  if (context.measureText(text).width <= room) return text;
  const letters = Math.floor(room / 6.2) - 1;
  return letters < 3 ? "" : `${text.slice(0, letters)}…`;
}

function inkOn(fill) {
  const number = Number.parseInt(fill.slice(1), 16);
  const light = 0.299 * (number >> 16) + 0.587 * ((number >> 8) & 255) + 0.114 * (number & 255);
  return light > 140 ? "#111417" : "#ffffff";
}
