// Bytes over the run: categories stacked, what is reserved, what the device has.

function buildMemory(root, data, page) {
  if (data.missing) return root.append(missing(data));
  const curve = data.curve;
  const top = h("div", { class: "figures small" }, [
    ["peak, allocated", data.allocated_peak_bytes], ["peak, reserved", data.reserved_peak_bytes],
    ["in use on the device", data.device_peak_bytes], ["device", data.device_bytes], ["margin", data.margin_bytes],
  ].filter((pair) => typeof pair[1] === "number").map(([label, value]) => figure({ label, value, unit: "B" })));
  root.append(top);
  let parts = {};
  if (curve && curve.allocated && curve.allocated.length) parts = memoryChart(root, data, curve, page);
  else root.append(missing({ missing: data.no_curve }));
  root.append(memoryTables(data));
  return parts;
}

function memoryChart(root, data, curve, page) {
  const count = curve.allocated.length;
  // What stays is at the bottom.
  const place = (name) => (CATEGORIES.indexOf(name) + CATEGORIES.length) % CATEGORIES.length;
  const names = Object.keys(curve.categories || {}).filter((name) => curve.categories[name].some((value) => value))
    .sort((one, other) => place(one) - place(other));
  const timed = Array.isArray(curve.seconds) && curve.seconds.every((value) => typeof value === "number");
  const state = { axis: "event", point: -1, pinned: -1 };
  const places = () => (state.axis === "seconds" ? curve.seconds : curve.event || curve.allocated.map((_, place) => place));
  const peak = curve.allocated.reduce((best, value, place, all) => (value > all[best] ? place : best), 0);
  const limit = data.device_bytes;
  const outside = Math.max(0, (data.device_peak_bytes ?? data.reserved_peak_bytes ?? 0) - (data.reserved_peak_bytes ?? 0));
  let left = 74;
  const chart = sharpCanvas({
    class: "memory", tabindex: 0, role: "application",
    "aria-label": "Memory over the run. Arrow keys move, plus and minus zoom, comma and full stop step through points, Enter goes to the peak.",
  }, draw);
  const range = new Range(places()[0], places()[count - 1], () => chart.draw());
  range.least = (range.last - range.first) / Math.max(4, count);
  const side = h("aside", { class: "held", "aria-live": "polite" });
  const x = (place) => left + (places()[place] - range.low) / range.span * (chart.size.width - left - 10);
  // A limit far above would press the curve flat.
  const withLimit = { on: Boolean(limit) && Math.max(...curve.allocated, ...curve.reserved || [0]) > 0.3 * limit };

  function scale(height) {
    let most = Math.max(...curve.allocated, ...curve.reserved || [0]);
    if (withLimit.on) most = Math.max(most, limit - outside);
    const bottom = height - 26, high = 18;
    return { most: most * 1.04, bottom, y: (value) => bottom - value / (most * 1.04) * (bottom - high) };
  }

  function draw(context, width, height) {
    left = width < 600 ? 60 : 74;
    const { most, bottom, y } = scale(height);
    context.font = "11px " + FONT;
    context.textBaseline = "middle";
    context.strokeStyle = palette.line;
    context.lineWidth = 1;
    for (const value of byteTicks(most)) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(left, at);
      context.lineTo(width - 10, at);
      context.stroke();
      context.textAlign = "right";
      context.fillStyle = palette.soft;
      context.fillText(bytes(value), left - 8, at);
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left - 10, bottom + 1);
    context.clip();
    const low = new Float64Array(count);
    names.forEach((name, order) => {
      const column = curve.categories[name];
      context.fillStyle = categoryColour(name, order);
      context.beginPath();
      step(context, (place) => y(low[place] + column[place]), false);
      step(context, (place) => y(low[place]), true);
      context.closePath();
      context.fill();
      for (let place = 0; place < count; place++) low[place] += column[place];
    });
    context.lineWidth = 1.5;
    if (curve.reserved) line(context, (place) => y(curve.reserved[place]), palette.text, [5, 3]);
    line(context, (place) => y(curve.allocated[place]), palette.text, []);
    context.restore();
    drawMarks(context, width, bottom, height);
    if (limit) drawLimit(context, width, y, most);
    drawPoint(context, y, bottom, peak, palette.bad, "peak");
    if (state.pinned >= 0) drawPoint(context, y, bottom, state.pinned, palette.accent, "");
    if (state.point >= 0) drawPoint(context, y, bottom, state.point, palette.accent, "");
  }

  function drawLimit(context, width, y, most) {
    const room = limit - outside;
    if (room > most) return;
    const at = Math.round(y(room)) + 0.5;
    context.strokeStyle = palette.bad;
    context.setLineDash([8, 4]);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(width - 10, at);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = palette.bad;
    context.textAlign = "right";
    const text = outside ? `device, ${bytes(limit)} less ${bytes(outside)} of libraries` : `device, ${bytes(limit)}`;
    context.fillStyle = palette.back;
    context.fillRect(width - 17 - context.measureText(text).width, at - 17, context.measureText(text).width + 6, 15);
    context.fillStyle = palette.bad;
    context.fillText(text, width - 14, at - 9);
    context.textAlign = "left";
  }

  // A value holds until the next point.
  function step(context, value, back) {
    const at = (place) => x(Math.min(place, count - 1));
    if (!back) {
      for (let place = 0; place < count; place++) {
        place ? context.lineTo(at(place), value(place - 1)) : context.moveTo(at(0), value(0));
        context.lineTo(at(place), value(place));
      }
    } else {
      for (let place = count - 1; place >= 0; place--) {
        context.lineTo(at(place), value(place));
        if (place) context.lineTo(at(place), value(place - 1));
      }
    }
  }

  function line(context, value, style, dash) {
    context.strokeStyle = style;
    context.setLineDash(dash);
    context.beginPath();
    step(context, value, false);
    context.stroke();
    context.setLineDash([]);
  }

  function drawMarks(context, width, bottom, height) {
    context.strokeStyle = palette.soft;
    context.fillStyle = palette.soft;
    context.lineWidth = 1;
    context.textAlign = "left";
    let free = left;
    for (const mark of curve.marks || []) {
      const at = Math.round(x(mark.point)) + 0.5;
      if (at < left - 1 || at > width - 9) continue;
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(at, 14);
      context.lineTo(at, bottom + 4);
      context.stroke();
      context.setLineDash([]);
      const room = context.measureText(mark.name).width;
      const from = Math.min(at + 3, width - 10 - room);
      if (from >= free) {
        context.fillText(mark.name, from, bottom + 14);
        free = from + room + 12;
      }
    }
  }

  function drawPoint(context, y, bottom, place, style, label) {
    const at = x(place);
    if (at < left || at > chart.size.width - 9) return;
    context.strokeStyle = style;
    context.fillStyle = style;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at, y(curve.allocated[place]));
    context.lineTo(at, bottom);
    context.stroke();
    context.beginPath();
    context.arc(at, y(curve.allocated[place]), 4, 0, 7);
    context.fill();
    if (label) {
      context.textAlign = at > chart.size.width - 90 ? "right" : "left";
      const text = `${label} ${bytes(curve.allocated[place])}`, to = y(curve.allocated[place]) - 12;
      const from = at + (context.textAlign === "right" ? -8 : 8), wide = context.measureText(text).width;
      context.fillStyle = palette.back;
      context.fillRect(context.textAlign === "right" ? from - wide - 3 : from - 3, to - 8, wide + 6, 16);
      context.fillStyle = style;
      context.fillText(text, from, to);
      context.textAlign = "left";
    }
  }

  function nearest(value) {
    const list = places();
    let low = 0, high = count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (list[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function tell(place) {
    clear(side);
    const listed = curve.holders || [];
    const best = listed.reduce((one, each) => (one === null || Math.abs(each.point - place) < Math.abs(one.point - place) ? each : one), null);
    const where = places()[place];
    append(side, [
      h("h3", {}, place === peak ? "At the peak" : state.axis === "seconds" ? `At ${seconds(where)}` : `At event ${where.toLocaleString("en-US")}`),
      h("dl", {},
        h("div", {}, h("dt", {}, "allocated"), h("dd", { "data-value": curve.allocated[place] }, bytes(curve.allocated[place]))),
        curve.reserved && h("div", {}, h("dt", {}, "reserved"), h("dd", {}, bytes(curve.reserved[place]))),
        names.toReversed().map((name) => h("div", { class: "category" }, h("dt", {}, h("i", { class: "swatch", style: { background: categoryColour(name, names.indexOf(name)) } }), name),
          h("dd", {}, bytes(curve.categories[name][place]))))),
      best && h("h4", {}, best.point === place ? "Largest holders" : `Largest holders at ${bytes(curve.allocated[best.point])}, the nearest point that lists them`),
      best && h("ol", { class: "holders" }, best.holders.map((holder) => h("li", {},
        h("b", {}, bytes(holder.nbytes)), " ", holder.category, holder.storages > 1 ? `, ${holder.storages} tensors` : "",
        h("div", {}, holder.module ? moduleLink(holder.module) : holder.name || "", holder.line && h("div", { class: "soft" }, holder.line))))),
    ]);
  }

  function pin(place) {
    state.pinned = place;
    tell(place);
    chart.draw();
  }

  function toPeak() {
    const list = places();
    const width = (range.last - range.first) / 8;
    range.set(list[peak] - width / 2, list[peak] + width / 2);
    pin(peak);
    say(`The peak: ${bytes(curve.allocated[peak])} allocated`);
  }

  function move(way) {
    const place = Math.min(count - 1, Math.max(0, (state.pinned < 0 ? peak : state.pinned) + way));
    pin(place);
    const at = places()[place];
    if (at < range.low || at > range.high) range.set(at - range.span / 2, at + range.span / 2);
    say(`${bytes(curve.allocated[place])} allocated`);
  }

  steer(chart.canvas, range, () => left, () => chart.size.width - left - 10, {
    hover: (event, value) => {
      state.point = event.offsetX < left ? -1 : nearest(value);
      if (state.point >= 0) tell(state.point);
      chart.draw();
    },
    leave: () => {
      state.point = -1;
      tell(state.pinned >= 0 ? state.pinned : peak);
      chart.draw();
    },
    click: (event, value) => pin(nearest(value)),
    keys: { ",": () => move(-1), ".": () => move(1), Enter: toPeak },
  });

  const stretches = periodsOf(curve, count);
  const box = h("input", { type: "checkbox", checked: withLimit.on, onchange: () => {
    withLimit.on = box.checked;
    chart.draw();
  } });
  const select = timed && h("select", { "aria-label": "Horizontal axis", onchange: () => {
    state.axis = select.value;
    Object.assign(range, new Range(places()[0], places()[count - 1], range.changed));
    range.least = (range.last - range.first) / Math.max(4, count);
    chart.draw();
  } }, h("option", { value: "event" }, "in the order of events"), h("option", { value: "seconds" }, "over predicted time"));
  const tools = h("div", { class: "bar-of-tools" },
    h("button", { class: "main", onclick: toPeak }, "Go to the peak"),
    h("span", { class: "together" },
      h("button", { onclick: () => range.whole() }, "Whole run"),
      stretches.map((each) => h("button", { onclick: () => range.set(places()[each.from], places()[each.to]) }, each.name))),
    select || null,
    limit ? h("label", {}, box, " show the device's limit") : null,
    h("span", { class: "legend" },
      names.map((name, order) => h("span", {}, h("i", { class: "swatch", style: { background: categoryColour(name, order) } }), name)),
      h("span", {}, h("i", { class: "stroke" }), "allocated"),
      curve.reserved && h("span", {}, h("i", { class: "stroke dashed" }), "reserved")));
  root.append(tools, h("div", { class: "chart-and-side" }, chart.canvas, side));
  tell(peak);
  root.view = { count, peak, range, state, names, pixel: (place) => [x(place), 60], sum: (place) => names.reduce((sum, name) => sum + curve.categories[name][place], 0) };
  app.onTheme(page, () => tell(state.pinned >= 0 ? state.pinned : peak));
  return { resize: () => chart.draw(), now: () => chart.drawNow() };
}

function byteTicks(most) {
  const rough = most / 6;
  let step = 1;
  while (step * 2 <= rough) step *= 2;
  const list = [];
  for (let value = 0; value <= most; value += step * (rough / step > 1.5 ? 2 : 1)) list.push(value);
  return list;
}

// Initialisation and steps, from the marks.
function periodsOf(curve, count) {
  const list = [];
  let open = null;
  for (const mark of curve.marks || []) {
    if (/initiali[sz]ation/.test(mark.name)) list.push({ name: "Initialisation", from: 0, to: mark.point });
    else if (/begin/.test(mark.name)) open = mark;
    else if (/end/.test(mark.name) && open) {
      list.push({ name: open.name.replace(/ ?begin(s|ning)?( of)? ?/, "").replace(/^s/, "S"), from: open.point, to: Math.min(mark.point, count - 1) });
      open = null;
    }
  }
  return list.filter((each) => each.to > each.from).slice(0, 4);
}

function memoryTables(data) {
  const periods = Object.entries(data.periods || {}).map(([name, each]) => ({
    name, allocated: each.allocated_peak_bytes, reserved: each.reserved_peak_bytes, module: each.at && each.at.module, phase: each.at && each.at.phase,
  }));
  const categories = Object.entries(data.by_category || {}).map(([name, value]) => ({ name, value }));
  const fixed = data.fixed || [];
  return h("div", { class: "columns" },
    categories.length ? section("Held at the peak", table([
      { key: "name", label: "category" }, { key: "value", label: "bytes", unit: "B", bar: true },
    ], categories)) : null,
    periods.length ? section("Peaks by period", table([
      { key: "name", label: "period" }, { key: "allocated", label: "allocated", unit: "B" }, { key: "reserved", label: "reserved", unit: "B" },
      { key: "module", label: "peak in", unit: "module" }, { key: "phase", label: "phase" },
    ], periods)) : null,
    fixed.length ? section("Outside of the allocator", table([
      { key: "name", label: "what" }, { key: "bytes", label: "bytes", unit: "B" }, { key: "source", label: "source" },
    ], fixed)) : null);
}
