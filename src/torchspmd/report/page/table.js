// Tables that sort by a click on a column's head.

// columns: {key, label, unit, bar}; rows: objects. Returns the element.
function table(columns, rows, options = {}) {
  const body = h("tbody", {});
  const order = { key: null, down: true };
  const most = {};
  for (const column of columns) {
    if (column.bar) most[column.key] = Math.max(0, ...rows.map((row) => Math.abs(row[column.key]) || 0));
  }
  const heads = columns.map((column) => sortHead(column, order, fill));

  function fill() {
    clear(body);
    const shown = order.key === null ? rows : [...rows].sort(by(order));
    for (const row of shown) {
      const cells = columns.map((column) => cell(column, row[column.key], most[column.key], options));
      const line = h("tr", {}, cells);
      if (options.onrow) makeClickable(line, () => options.onrow(row));
      body.append(line);
    }
    heads.forEach((head, place) => markSorted(head, columns[place], order));
  }

  fill();
  const caption = options.caption && h("caption", {}, options.caption);
  return h("div", { class: "scroll" }, h("table", { class: options.class }, caption, h("thead", {}, h("tr", {}, heads)), body));
}

function makeClickable(line, act) {
  line.classList.add("clickable");
  line.tabIndex = 0;
  line.addEventListener("click", act);
  line.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      act();
    }
  });
}

function isNumeric(column) {
  return column.unit && column.unit !== "text" && column.unit !== "module";
}

function sortHead(column, order, fill) {
  if (!column.label) return h("th", { scope: "col" });
  function sort() {
    if (order.key === column.key) order.down = !order.down;
    else Object.assign(order, { key: column.key, down: isNumeric(column) });
    fill();
  }
  const button = h("button", { class: "sort", onclick: sort, title: column.title }, column.label);
  return h("th", { class: isNumeric(column) ? "number" : null, scope: "col" }, button);
}

function markSorted(head, column, order) {
  const sorted = order.key === column.key;
  head.setAttribute("aria-sort", sorted ? (order.down ? "descending" : "ascending") : "none");
}

function by(order) {
  const sign = order.down ? -1 : 1;
  return (one, other) => {
    const a = one[order.key], b = other[order.key];
    if (typeof a === "number" || typeof b === "number") return sign * ((a ?? -Infinity) - (b ?? -Infinity) || 0);
    return sign * String(a ?? "").localeCompare(String(b ?? ""), undefined, { numeric: true });
  };
}

function cell(column, value, most, options = {}) {
  if (column.unit === "module") return h("td", { class: "path" }, moduleLink(value));
  const text = column.show && value !== undefined ? column.show(value) : show(value, column.unit);
  if (!isNumeric(column)) return h("td", { class: column.class || null }, text);
  const bar = most > 0 && typeof value === "number" && value
    ? h("i", { class: "bar", style: { width: `${Math.max(1, 100 * Math.abs(value) / most)}%` } })
    : null;
  return h("td", { class: value === 0 ? "number zero" : "number", "data-value": typeof value === "number" ? value : null }, bar, h("span", {}, text));
}

// A module's name that leads to its row; from there to the timeline.
function moduleLink(path) {
  if (!path) return "–";
  if (!app.has("modules")) return breakable(path);
  return h("a", { href: "#modules", class: "module", onclick: (event) => {
    event.preventDefault();
    event.stopPropagation();
    app.selectModule(path);
    app.open("modules");
  } }, breakable(path));
}

// A path may break behind its dots.
function breakable(path) {
  const parts = String(path).split(".");
  return parts.map((part, place) => (place < parts.length - 1 ? [`${part}.`, h("wbr")] : part));
}

function missing(view) {
  return h("div", { class: "missing" }, h("p", {}, view.missing), view.command && h("p", {}, h("code", {}, view.command)));
}

function section(title, ...children) {
  return h("section", { class: "block" }, title && h("h2", {}, title), children);
}
