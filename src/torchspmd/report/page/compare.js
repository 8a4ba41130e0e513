// Two results side by side, or all candidates of a search.

function buildCompare(root, data) {
  if (data.missing) return root.append(missing(data));
  if (data.candidates) return buildSearch(root, data);
  const [before, after] = data.names;
  root.append(h("p", { class: "names" }, h("span", { class: "chip" }, "before ", h("b", {}, before)), h("span", { class: "chip" }, "after ", h("b", {}, after))));
  appendPairs(root, data);
  root.view = { rows: data.modules.length };
  return {};
}

// Figures, kinds and modules of two results.
function appendPairs(root, data, heads = ["before", "after"]) {
  const pairTable = (first, rows) => pairs(first, rows, heads);
  if (data.figures.length) root.append(section("Figures", pairTable([{ key: "label", label: "figure" }], data.figures)));
  if (data.kinds) root.append(section("Communication by kind", data.kinds.length ? pairTable([
    { key: "kind", label: "kind" }, { key: "axis", label: "axis" }, { key: "phase", label: "phase" }, { key: "label", label: "figure" },
  ], data.kinds) : h("p", { class: "hint" }, "Both communicate the same.")));
  root.append(section("By module", data.modules.length ? pairTable([{ key: "module", label: "module", unit: "module" }, { key: "label", label: "figure" }], data.modules)
    : h("p", { class: "hint" }, data.no_modules || "No module differs.")));
}

// Rows of two results with their values as before and after, as _joined of views/compare.py does.
function joinRows(before, after, absent, keepSame) {
  const keyOf = (row) => JSON.stringify([row.label, row.unit, row.kind, row.axis, row.phase, row.path]);
  const [ones, others] = [before, after].map((rows) => new Map(rows.map((row) => [keyOf(row), row])));
  const same = (one, other) => (typeof one === "number" && typeof other === "number" ? Math.abs(one - other) <= 1e-9 * Math.max(Math.abs(one), Math.abs(other)) : one === other);
  return [...new Set([...ones.keys(), ...others.keys()])].map((key) => {
    const one = ones.get(key), other = others.get(key);
    return { ...(one || other), before: one ? one.value : absent, after: other ? other.value : absent };
  }).filter((row) => keepSame || !same(row.before, row.after));
}

function joinPages(before, after) {
  const a = before.comparable, b = after.comparable;
  const lacking = [before, after].filter((page) => !page.comparable.modules.length).map((page) => page.name);
  return {
    figures: joinRows(a.figures, b.figures, null, true),
    kinds: a.kinds && b.kinds && joinRows(a.kinds, b.kinds, 0, false),
    modules: lacking.length ? [] : joinRows(a.modules, b.modules, 0, false),
    no_modules: lacking.length ? `Kept without modules: ${lacking.join("; ")}.` : null,
  };
}

function pairs(first, rows, [one, other]) {
  const list = rows.map((row) => ({
    ...row, change: typeof row.before === "number" && typeof row.after === "number" ? row.after - row.before : null,
  }));
  const most = Math.max(0, ...list.map((row) => Math.abs(row.change) || 0));
  const same = new Set(list.map((row) => row.unit)).size === 1;
  const body = h("tbody", {});
  const order = { key: null, down: true };
  const columns = [...first, { key: "before", label: one, unit: "n" }, { key: "after", label: other, unit: "n" }, { key: "change", label: "change", unit: "n" }];
  const heads = columns.map((column) => sortHead(column, order, fill));
  function fill() {
    clear(body);
    for (const row of order.key === null ? list : [...list].sort(by(order))) {
      const worse = row.change ? (row.change > 0) !== Boolean(row.more_is_better) : null;
      body.append(h("tr", {}, first.map((column) => cell(column, row[column.key])),
        h("td", { class: "number", "data-value": row.before }, show(row.before, row.unit)), h("td", { class: "number", "data-value": row.after }, show(row.after, row.unit)),
        h("td", { class: `number ${worse === null ? "" : worse ? "worse" : "better"}`, "data-value": row.change },
          same && row.change ? h("i", { class: "bar", style: { width: `${Math.max(1, 100 * Math.abs(row.change) / most)}%` } }) : null,
          h("span", {}, typeof row.before === "number" && typeof row.after === "number" ? difference(row.before, row.after, row.unit) : row.before === row.after ? "=" : "changed"))));
    }
    heads.forEach((head, place) => markSorted(head, columns[place], order));
  }
  fill();
  return h("div", { class: "scroll pairs" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

// ---------------------------------------------------------------------------- a search

function buildSearch(root, data) {
  const place = h("div", { class: "scatter" });
  const drawn = data.candidates.filter((each) => typeof each.seconds === "number" && typeof each.peak_bytes === "number");
  const front = drawn.filter((each) => each.pareto).sort((a, b) => a.peak_bytes - b.peak_bytes);
  // Two candidates side by side; at first the best one and the next fastest that fits.
  const kept = data.candidates.filter((each) => each.page !== null);
  const fastest = [...kept].filter((each) => each.fits !== "no" && typeof each.seconds === "number").sort((a, b) => Number(b.best) - Number(a.best) || a.seconds - b.seconds);
  const chosen = [...fastest, ...kept.filter((each) => !fastest.includes(each))].slice(0, 2);
  const beside = h("div", { class: "beside" });

  function draw() {
    clear(place);
    if (!drawn.length) return place.append(h("p", { class: "hint" }, "No candidate has both a time and a peak."));
    const width = Math.max(320, place.clientWidth || 1200), height = 330;
    const left = 70, right = 16, top = 20, bottom = 40;
    const peaks = drawn.map((each) => each.peak_bytes);
    // A limit far away would press the candidates together.
    const near = data.device_bytes && Math.max(...peaks) > 0.3 * data.device_bytes;
    let least = Math.min(...peaks), most = Math.max(...peaks, near ? data.device_bytes : 0);
    const room = (most - least || most) * 0.05;
    least = Math.max(0, least - room);
    most += room;
    const times = drawn.map((each) => each.seconds);
    const air = (Math.max(...times) - Math.min(...times) || Math.max(...times)) * 0.08;
    const slow = Math.max(...times) + air, fast = Math.max(0, Math.min(...times) - air);
    const x = (value) => left + (value - least) / (most - least) * (width - left - right);
    const y = (value) => height - bottom - (value - fast) / (slow - fast) * (height - top - bottom);
    const image = svg("svg", { width, height, role: "group", "aria-label": `Candidates: ${data.time} over peak memory` });
    for (const value of ticks(fast, slow, 6)) {
      image.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }), svg("text", { x: left - 8, y: y(value) + 4, class: "axis end" }, seconds(value)));
    }
    for (const value of ticks(least / 2 ** 30, most / 2 ** 30, width / 110)) {
      image.append(svg("text", { x: x(value * 2 ** 30), y: height - bottom + 18, class: "axis middle" }, bytes(value * 2 ** 30)));
    }
    image.append(svg("text", { x: width - right, y: height - 4, class: "axis end" }, "peak memory →"), svg("text", { x: 4, y: 12, class: "axis" }, `↑ ${data.time}`));
    if (data.device_bytes && !near) image.append(svg("text", { x: width - right, y: 12, class: "axis end" }, `the device has ${bytes(data.device_bytes)}, far to the right`));
    if (near) {
      image.append(svg("line", { x1: x(data.device_bytes), x2: x(data.device_bytes), y1: top, y2: height - bottom, class: "limit" }),
        svg("text", { x: x(data.device_bytes) - 6, y: top + 4, class: "axis end bad" }, `device ${bytes(data.device_bytes)}`));
    }
    if (front.length > 1) image.append(svg("polyline", { points: front.map((each) => `${x(each.peak_bytes)},${y(each.seconds)}`).join(" "), class: "front" }));
    for (const each of drawn) {
      const cx = x(each.peak_bytes), cy = y(each.seconds);
      const shape = each.fits === "no"
        ? svg("path", { d: `M${cx - 5} ${cy - 5}L${cx + 5} ${cy + 5}M${cx - 5} ${cy + 5}L${cx + 5} ${cy - 5}`, class: "cross" })
        : svg("circle", { cx, cy, r: each.best ? 8 : 5.5, class: `dot ${each.pareto ? "front" : ""} ${each.fits === "at risk" ? "risk" : ""}` });
      const letter = chosen.indexOf(each);
      const mark = svg("g", { class: "candidate", tabindex: 0, role: "button", "aria-label": `${each.name}, ${data.time} ${seconds(each.seconds)}, ${bytes(each.peak_bytes)}, fits: ${each.fits}`, "data-place": each.place },
        svg("circle", { cx, cy, r: 11, class: letter < 0 ? "reach" : "reach picked" }), shape, letter < 0 ? null : svg("text", { x: cx + 13, y: cy - 7, class: "letter" }, "AB"[letter]));
      const act = (event) => (event.shiftKey && each.page !== null ? choose(1, each) : openCandidate(each));
      mark.addEventListener("click", act);
      mark.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          act(event);
        }
      });
      mark.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, [
        h("div", { class: "tip-head" }, each.name), tipRow(data.time, seconds(each.seconds)), tipRow("step", seconds(each.step_seconds)), tipRow("peak", bytes(each.peak_bytes)), tipRow("fits", each.fits),
        each.why_not && tipRow("why not", each.why_not), each.page === null ? null : h("div", { class: "tip-more" }, "click to open it, Shift+click to compare it with A"),
      ]));
      mark.addEventListener("pointerleave", hideTip);
      image.append(mark);
    }
    place.append(image);
  }

  function openCandidate(each) {
    hideTip();
    if (each.page === null) return say(`${each.name}: ${each.why_not || "no prediction of it was kept"}`);
    app.openPage(each.page);
  }

  function choose(side, each) {
    chosen[side] = each;
    draw();
    compareTwo();
    say(`${chosen[0].name} compared with ${chosen[1].name}`);
  }

  function compareTwo() {
    clear(beside);
    if (chosen.length < 2) return beside.append(h("p", { class: "hint" }, "Fewer than two candidates have a prediction to compare."));
    const pick = (side) => h("label", {}, `${"AB"[side]} `, h("select", { "aria-label": `Candidate ${"AB"[side]}`, onchange: (event) => choose(side, kept[Number(event.target.value)]) },
      kept.map((each, place) => h("option", { value: place, selected: each === chosen[side] }, each.name))));
    beside.append(h("div", { class: "bar-of-tools" }, pick(0), pick(1), h("button", { onclick: () => {
      chosen.reverse();
      choose(0, chosen[0]);
    } }, "Swap")), h("p", { class: "hint" }, "The change is from A to B. Shift+click on a candidate in the picture makes it B."));
    appendPairs(beside, joinPages(...chosen.map((each) => app.document.pages[each.page])), ["A", "B"]);
  }

  const names = [...new Set(data.candidates.flatMap((each) => Object.keys(each.values)))];
  const rows = data.candidates.map((each) => ({ ...each, ...Object.fromEntries(names.map((name) => [`argument ${name}`, each.values[name]])), mark: each.best ? "best" : each.pareto ? "front" : "" }));
  const has = (key) => rows.some((row) => typeof row[key] === "number");
  root.append(
    h("div", { class: "bar-of-tools" }, h("span", { class: "legend" },
      h("span", {}, h("i", { class: "dot front" }), "on the Pareto front: nothing is both faster and smaller"), h("span", {}, h("i", { class: "dot front best" }), "the fastest that fits"), h("span", {}, h("i", { class: "dot" }), "fits"),
      h("span", {}, h("i", { class: "dot risk" }), "at risk"), h("span", {}, h("b", { class: "bad" }, "×"), " does not fit"))),
    place,
    section("Candidates", table([
      { key: "mark", label: "", show: (value) => value }, ...names.map((name) => ({ key: `argument ${name}`, label: name, unit: rows.every((row) => typeof row[`argument ${name}`] === "number") ? "n" : "text" })),
      has("work_per_second") && { key: "seconds", label: data.time, unit: "s", bar: true },
      { key: "step_seconds", label: "step", unit: "s", bar: !has("work_per_second") }, { key: "peak_bytes", label: "peak", unit: "B", bar: true },
      has("mfu") && { key: "mfu", label: "MFU", unit: "%" }, has("exposed_seconds") && { key: "exposed_seconds", label: "exposed", unit: "s" },
      { key: "fits", label: "fits", class: "nowrap" }, { key: "why_not", label: "why not" },
    ].filter(Boolean), rows, { onrow: openCandidate })), section("Two candidates side by side", beside));
  compareTwo();
  requestAnimationFrame(draw);
  root.view = { count: data.candidates.length, drawn: drawn.length, front: front.length };
  return { resize: draw, now: draw };
}
