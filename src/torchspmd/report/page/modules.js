// The module tree with its figures. A module's figures include those of its children.

class TreeNode {
  constructor(name, path) {
    this.name = name;
    this.path = path;
    this.cls = "";
    this.values = null;
    this.texts = null;
    this.children = [];
    this.times = 1;
  }
}

// Of `__main__.GPT`, the last part; a shape with a dtype has no such dots.
function className(row) {
  const name = row.class || "";
  return /^[\w.]+$/.test(name) ? name.split(".").at(-1) : name;
}

function treeOf(rows, width) {
  const root = new TreeNode("", "");
  const known = new Map([["", root]]);
  const parentOf = (path) => {
    const dot = path.lastIndexOf(".");
    return dot < 0 ? "" : path.slice(0, dot);
  };
  const make = (path) => {
    if (known.has(path)) return known.get(path);
    const above = make(parentOf(path));
    const node = new TreeNode(path.slice(above.path ? above.path.length + 1 : 0), path);
    above.children.push(node);
    known.set(path, node);
    return node;
  };
  for (const row of rows) {
    const node = row.path === "" ? root : make(row.path);
    node.cls = className(row);
    node.values = row.values;
    node.texts = row.texts || null;
  }
  const sum = (node) => {
    node.children.forEach(sum);
    if (!node.values) node.values = added(node.children, width);
  };
  if (root.values) {
    root.name = root.cls || "model";
    sum(root);
    return [root];
  }
  root.children.forEach(sum);
  return root.children;
}

function added(nodes, width) {
  return Array.from({ length: width }, (_, column) => nodes.reduce((total, node) => total + (node.values[column] || 0), 0));
}

const shapeOf = (node) => `${node.cls}(${node.children.map((child) => `${child.name}:${shapeOf(child)}`).join()})`;

// Numbered children of one shape as one row, figures added.
function folded(node, width) {
  const children = node.children.map((child) => folded(child, width));
  const groups = new Map();
  const list = [];
  for (const child of children) {
    if (!/^\d+$/.test(child.name)) {
      list.push([child]);
      continue;
    }
    const shape = shapeOf(child);
    if (!groups.has(shape)) list.push(groups.set(shape, []).get(shape));
    groups.get(shape).push(child);
  }
  const result = Object.assign(new TreeNode(node.name, node.path), node);
  result.children = list.map((group) => (group.length > 1 ? joined(group, width, node.path) : group[0]));
  return result;
}

function joined(group, width, above) {
  const name = group.every((node) => node.name === group[0].name) ? group[0].name : `[${rangesOf(group.map((node) => Number(node.name)))}]`;
  const node = new TreeNode(name, above ? `${above}.${name}` : name);
  node.cls = group[0].cls;
  node.times = group.reduce((sum, each) => sum + each.times, 0);
  node.values = added(group, width);
  node.texts = group[0].texts;
  node.isFolded = true;
  node.children = group[0].children.map((child, place) => joined(group.map((each) => each.children[place]), width, node.path));
  return node;
}

function rangesOf(numbers) {
  const runs = [];
  for (const number of numbers.sort((a, b) => a - b)) {
    if (runs.length && runs.at(-1)[1] === number - 1) runs.at(-1)[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([low, high]) => (low === high ? low : `${low}-${high}`)).join();
}

// A module with nothing but one child is one row with it: mlp.up.weight.
function chained(node) {
  node.children = node.children.map(chained);
  if (node.children.length !== 1 || node.texts) return node;
  const [child] = node.children;
  child.name = `${node.name}.${child.name}`;
  return child;
}

const MOST_ROWS = 3000;

function buildModules(root, data, page) {
  if (data.missing) return root.append(missing(data));
  const width = data.columns.length;
  const plain = data.texts ? treeOf(data.rows, width).map(chained) : treeOf(data.rows, width);
  let trees = plain;
  const state = { fold: data.foldable !== false, find: "", sort: -1, down: true, open: new Set(), chosen: null };
  const most = data.columns.map((column, place) => (column.bar ? Math.max(0, ...plain.map((tree) => tree.values[place] || 0)) : 0));

  function refold() {
    trees = state.fold ? plain.map((tree) => folded(tree, width)) : plain;
    openSome();
  }

  // Open from the top as long as it fits a screen.
  function openSome() {
    state.open.clear();
    let layer = trees, count = trees.length;
    while (layer.length) {
      const next = layer.flatMap((node) => node.children);
      if (!next.length || count + next.length > 40) break;
      layer.forEach((node) => state.open.add(node.path));
      count += next.length;
      layer = next;
    }
  }

  function visible() {
    const words = state.find.toLowerCase();
    const list = [];
    const matches = (node) => node.path.toLowerCase().includes(words) || node.cls.toLowerCase().includes(words);
    const contains = (node) => matches(node) || node.children.some(contains);
    const walk = (nodes, depth, whole) => {
      const sorted = state.sort < 0 ? nodes : [...nodes].sort((a, b) => (state.down ? -1 : 1) * ((a.values[state.sort] || 0) - (b.values[state.sort] || 0)));
      for (const node of sorted) {
        if (words && !whole && !contains(node)) continue;
        list.push([node, depth]);
        const below = words && !whole && node.children.some(contains) && !matches(node);
        if (below || state.open.has(node.path)) walk(node.children, depth + 1, whole || (words !== "" && matches(node)));
      }
    };
    walk(trees, 0, false);
    return list;
  }

  const body = h("tbody", {});
  const heads = data.columns.map((column, place) => {
    const button = h("button", { class: "sort", title: column.title || `Sort by ${column.label}`, onclick: () => {
      if (state.sort === place) state.down = !state.down;
      else Object.assign(state, { sort: place, down: true });
      fill();
    } }, column.label);
    return h("th", { class: "number", scope: "col" }, button);
  });
  const texts = data.texts || [];
  const plainHead = h("button", { class: "sort", title: "In the model's order", onclick: () => {
    state.sort = -1;
    fill();
  } }, data.what || "module");
  const more = h("p", { class: "hint" });

  function fill() {
    clear(body);
    const list = visible();
    for (const [node, depth] of list.slice(0, MOST_ROWS)) body.append(line(node, depth));
    heads.forEach((head, place) => head.setAttribute("aria-sort", state.sort === place ? (state.down ? "descending" : "ascending") : "none"));
    more.textContent = list.length > MOST_ROWS ? `${MOST_ROWS} of ${list.length} rows are shown; search or fold to see the others.`
      : list.length ? "" : `No ${data.what || "module"} has “${state.find}” in its name or class.`;
    const first = body.querySelector("tr.chosen") || body.querySelector("tr");
    if (first) first.tabIndex = 0;
  }

  function line(node, depth) {
    const open = state.open.has(node.path);
    const toggle = node.children.length
      ? h("button", { class: "toggle", tabindex: -1, "aria-label": `${open ? "Close" : "Open"} ${node.path}`, onclick: (event) => {
        event.stopPropagation();
        flip(node);
      } }, open ? "▾" : "▸")
      : h("span", { class: "toggle" });
    const chosen = app.state.module !== null && app.state.module === node.path;
    const row = h("tr", {
      class: chosen ? "chosen clickable" : "clickable", tabindex: -1, "aria-level": depth + 1, "data-path": node.path,
      "aria-expanded": node.children.length ? String(open) : null,
      onclick: () => app.selectModule(chosen ? null : node.path),
      onkeydown: (event) => keys(event, node),
    }, h("td", { class: "tree" }, h("div", { style: { "padding-left": `${depth * 15}px` } }, toggle,
      h("span", { class: "name" }, node.name), node.times > 1 && node.isFolded ? h("span", { class: "times" }, `×${node.times}`) : null,
      node.cls && node.cls !== node.name ? h("span", { class: "class" }, node.cls) : null)),
    texts.map((_, place) => h("td", { class: "soft" }, node.texts ? node.texts[place] ?? "–" : "")),
    data.columns.map((column, place) => cell({ ...column, key: place }, node.values[place] || (column.unit === "text" ? "" : 0), most[place])));
    return row;
  }

  function flip(node, focus = false) {
    if (state.open.has(node.path)) state.open.delete(node.path);
    else state.open.add(node.path);
    fill();
    if (focus) focusOn(node.path);
  }

  function focusOn(path) {
    const row = [...body.children].find((each) => each.dataset.path === path);
    if (row) {
      row.tabIndex = 0;
      row.focus();
    }
  }

  function keys(event, node) {
    const row = event.currentTarget;
    const open = state.open.has(node.path);
    const acts = {
      ArrowDown: () => row.nextElementSibling && focusOn(row.nextElementSibling.dataset.path),
      ArrowUp: () => row.previousElementSibling && focusOn(row.previousElementSibling.dataset.path),
      ArrowRight: () => node.children.length && !open && flip(node, true),
      ArrowLeft: () => (node.children.length && open ? flip(node, true) : focusOn(node.path.slice(0, Math.max(0, node.path.lastIndexOf("."))))),
      Enter: () => {
        app.selectModule(app.state.module === node.path ? null : node.path);
        focusOn(node.path);
      },
    };
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
    }
  }

  // The row of a module; what is around it opens, and folding ends where it hides it.
  function reveal(path) {
    const find = (nodes, way) => {
      for (const node of nodes) {
        if (node.path === path || (node.isFolded && app.isInside(path, node.path) && path.split(".").length === node.path.split(".").length)) return [...way, node];
        const found = find(node.children, [...way, node]);
        if (found) return found;
      }
      return null;
    };
    const way = find(trees, []);
    if (!way) return null;
    way.slice(0, -1).forEach((node) => state.open.add(node.path));
    return way.at(-1);
  }

  function chosenChanged() {
    const path = app.state.module;
    const node = path === null ? null : reveal(path);
    fill();
    clear(bar);
    if (path !== null) {
      append(bar, [h("span", { class: "chip" }, "module ", h("b", {}, path), h("button", { "aria-label": "Clear the module", onclick: () => app.selectModule(null) }, "×")),
        app.has("timeline") && h("button", { onclick: () => app.open("timeline") }, "Show in the timeline")]);
    }
    if (node) {
      const row = [...body.children].find((each) => each.dataset.path === node.path);
      if (row) {
        row.classList.add("chosen");
        row.scrollIntoView({ block: "nearest" });
      }
    }
  }

  const box = h("input", { type: "search", placeholder: `Find ${data.what || "module"} or class`, "aria-label": "Find by name or class", oninput: () => {
    state.find = box.value;
    fill();
  } });
  const fold = h("input", { type: "checkbox", checked: state.fold, onchange: () => {
    state.fold = fold.checked;
    refold();
    fill();
  } });
  const bar = h("span", {});
  refold();
  const canFold = data.foldable !== false && trees.some(function some(node) {
    return node.isFolded || node.children.some(some);
  });
  root.append(
    h("div", { class: "bar-of-tools" }, box,
      canFold ? h("label", {}, fold, " fold repeated layers") : null,
      h("span", { class: "together" },
        h("button", { onclick: () => {
          const all = (nodes) => nodes.forEach((node) => {
            state.open.add(node.path);
            all(node.children);
          });
          all(trees);
          fill();
        } }, "Open all"),
        h("button", { onclick: () => {
          openSome();
          fill();
        } }, "Close")),
      bar),
    h("div", { class: "scroll tall" }, h("table", { class: "tree-table" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, plainHead),
      texts.map((text) => h("th", { scope: "col" }, text)), heads)), body)),
    more, data.note && h("p", { class: "hint" }, data.note));
  fill();
  app.onModule(page, chosenChanged);
  if (app.state.module !== null) chosenChanged();
  root.view = { state, rows: () => visible().length, trees: () => trees };
  return {};
}
