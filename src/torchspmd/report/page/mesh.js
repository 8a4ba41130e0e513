// Nodes and GPUs as a picture: who talks with whom on an axis, over which links, and how much.

const MOST_RANKS = 4096;

function buildMesh(root, data) {
  if (data.missing) return root.append(missing(data));
  const state = { axis: data.plan_axis || (data.groups.length ? data.groups[0].axis : (data.axes[0] || {}).name), node: data.gpus_per_node || Math.min(8, data.world_size), rank: data.rank || 0 };
  const picture = h("div", { class: "picture" });
  const words = h("p", { class: "hint" });
  const links = h("div", {});
  const axes = [...new Set([...data.axes.map((axis) => axis.name), ...data.groups.map((group) => group.axis)])];

  // Ranks fill one node after the other, or are where the result says.
  const given = data.nodes && data.nodes.length ? data.nodes : null;
  const nodeOf = (rank) => given ? given[rank] : Math.floor(rank / state.node);
  const taken = {};
  const seats = given && given.map((node) => (taken[node] = (taken[node] ?? -1) + 1));
  const seatOf = (rank) => given ? seats[rank] : rank % state.node;

  // The group of a rank on an axis: as it was recorded; else from the mesh, whose last axis is the nearest.
  function groupOf(axis, rank) {
    const listed = data.groups.find((group) => group.axis === axis && group.ranks.includes(rank));
    return listed ? listed.ranks : fromMesh(axis, rank);
  }
  function fromMesh(axis, rank) {
    const place = data.axes.findIndex((each) => each.name === axis);
    const all = data.axes.reduce((product, each) => product * each.size, 1);
    if (place < 0 || all !== data.world_size) return [];
    const stride = data.axes.slice(place + 1).reduce((product, each) => product * each.size, 1);
    const size = data.axes[place].size;
    const first = rank - (Math.floor(rank / stride) % size) * stride;
    return Array.from({ length: size }, (_, step) => first + step * stride);
  }
  function groupsOf(axis) {
    const groups = [], seen = new Set();
    for (let rank = 0; rank < Math.min(data.world_size, MOST_RANKS); rank++) {
      if (seen.has(rank)) continue;
      const ranks = groupOf(axis, rank);
      if (!ranks.length) continue;
      ranks.forEach((each) => seen.add(each));
      groups.push(ranks);
    }
    return groups;
  }

  // NCCL's rings go through all ranks of a node before they leave it.
  const ringOf = (ranks) => [...ranks].sort((one, other) => nodeOf(one) - nodeOf(other) || one - other);
  function hops(ranks) {
    let inside = 0;
    const ring = ringOf(ranks);
    ring.forEach((rank, place) => {
      const next = ring[(place + 1) % ring.length];
      if (nodeOf(rank) === nodeOf(next)) inside += 1;
    });
    return { inside, between: ranks.length > 1 ? ranks.length - inside : 0 };
  }

  function draw() {
    clear(picture);
    const count = Math.min(data.world_size, MOST_RANKS);
    const nodes = given ? Math.max(...given.slice(0, count)) + 1 : Math.ceil(count / state.node);
    const big = count <= 128;
    const size = count <= 64 ? 32 : big ? 26 : count <= 1024 ? 12 : 8, gap = big ? 5 : 2;
    const perRow = Math.min(state.node, big ? 8 : 4);
    const rows = Math.ceil(state.node / perRow);
    const boxWidth = perRow * (size + gap) + gap + 8, boxHeight = rows * (size + gap) + gap + (big ? 34 : 8);
    const room = Math.max(240, (root.clientWidth || 1200) - 24);
    const across = Math.max(1, Math.min(nodes, Math.floor(room / (boxWidth + 10))));
    const down = Math.ceil(nodes / across);
    const own = new Set(groupOf(state.axis, state.rank));
    const groups = groupsOf(state.axis);
    const number = new Map();
    groups.forEach((ranks, place) => ranks.forEach((rank) => number.set(rank, place)));
    const at = (rank) => {
      const node = nodeOf(rank), inside = seatOf(rank);
      return [
        (node % across) * (boxWidth + 10) + 4 + gap + (inside % perRow) * (size + gap),
        Math.floor(node / across) * (boxHeight + 10) + (big ? 20 : 4) + gap + Math.floor(inside / perRow) * (size + gap),
      ];
    };
    const image = svg("svg", {
      width: across * (boxWidth + 10), height: down * (boxHeight + 10), role: "img",
      "aria-label": `${data.world_size} ranks on ${nodes} nodes; the ranks that rank ${state.rank} talks to over ${state.axis} are filled`,
    });
    for (let node = 0; node < nodes; node++) {
      const left = (node % across) * (boxWidth + 10), top = Math.floor(node / across) * (boxHeight + 10);
      image.append(svg("rect", { x: left + 0.5, y: top + 0.5, width: boxWidth, height: boxHeight, rx: 5, class: "node" }));
      if (big) image.append(svg("text", { x: left + 8, y: top + 15, class: "node-name" }, `node ${node}`));
    }
    drawLinks(image, at, size);
    for (let rank = 0; rank < count; rank++) {
      const [left, top] = at(rank);
      const classes = ["gpu", own.has(rank) ? "own" : "", rank === state.rank ? "self" : ""].join(" ");
      const square = svg("rect", { x: left, y: top, width: size, height: size, rx: big ? 4 : 2, class: classes, "data-rank": rank, "data-group": number.get(rank) ?? "" });
      square.append(svg("title", {}, `rank ${rank}, node ${nodeOf(rank)}${number.has(rank) ? `, group ${number.get(rank)} of ${state.axis}` : ""}`));
      square.addEventListener("click", () => {
        state.rank = rank;
        update();
      });
      image.append(square);
      if (big) image.append(svg("text", { x: left + size / 2, y: top + size / 2 + 4, class: `gpu-name ${own.has(rank) ? "own" : ""}` }, rank));
    }
    picture.append(image);
    const ranks = [...own];
    const nodesOf = new Set(ranks.map(nodeOf));
    clear(words);
    append(words, [ranks.length
      ? `Rank ${state.rank} talks to ${ranks.length - 1} other rank${ranks.length === 2 ? "" : "s"} over ${state.axis}, on ${nodesOf.size} node${nodesOf.size === 1 ? "" : "s"}: ${ranks.length <= 16 ? ranks.join(", ") : `${ranks.slice(0, 8).join(", ")}, … ${ranks.at(-1)}`}.`
      : `The groups of ${state.axis} other than the recorded ones are not known.`,
    groups.length ? ` The axis has ${groups.length} group${groups.length === 1 ? "" : "s"}${data.world_size > MOST_RANKS ? ` among the first ${MOST_RANKS} ranks, which are drawn` : ""}.` : ""]);
  }

  function drawLinks(image, at, size) {
    const ranks = ringOf(groupOf(state.axis, state.rank).filter((rank) => rank < MOST_RANKS));
    if (ranks.length < 2 || ranks.length > 64) return;
    ranks.forEach((rank, place) => {
      const next = ranks[(place + 1) % ranks.length];
      if (ranks.length === 2 && place) return;
      const [x0, y0] = at(rank), [x1, y1] = at(next);
      const between = nodeOf(rank) !== nodeOf(next);
      // Below the squares, so that it hides no number.
      const low = Math.max(y0, y1) + size + 3 + Math.min(15, Math.abs(x1 - x0) / 12);
      image.append(svg("path", { d: `M${x0 + size / 2} ${y0 + size - 2} C${x0 + size / 2} ${low} ${x1 + size / 2} ${low} ${x1 + size / 2} ${y1 + size - 2}`, class: between ? "link between" : "link inside" }));
    });
  }

  function linkRows() {
    return data.groups.map((group) => {
      const { inside, between } = hops(group.ranks);
      return {
        axis: group.axis || "–", ranks: group.ranks.length, nodes: new Set(group.ranks.map(nodeOf)).size,
        count: group.count, payload: group.payload_bytes, wire: group.wire_bytes, inside: linkText(inside, group.wire_bytes),
        between: linkText(between, group.wire_bytes), group,
      };
    });
  }

  function update() {
    which.value = state.rank;
    draw();
    clear(links);
    const rows = linkRows();
    if (!rows.length) return links.append(h("p", { class: "hint" }, data.no_groups || "No group has sent anything."));
    links.append(table([
      { key: "axis", label: "axis" }, { key: "ranks", label: "ranks", unit: "n" }, { key: "nodes", label: "nodes", unit: "n" },
      { key: "count", label: "communications", unit: "n" }, { key: "payload", label: "payload", unit: "B", bar: true },
      { key: "wire", label: "a rank sends", unit: "B", bar: true },
      { key: "inside", label: "links inside nodes" }, { key: "between", label: "links between nodes" },
    ], rows, { onrow: (row) => {
      state.axis = row.group.axis;
      state.rank = row.group.ranks.includes(state.rank) ? state.rank : row.group.ranks[0];
      select.value = state.axis;
      update();
    } }));
    if (rows.some((row) => typeof row.wire !== "number")) return;
    const sum = { inside: 0, between: 0 };
    for (const row of rows) {
      const each = hops(row.group.ranks);
      sum.inside += each.inside * row.wire;
      sum.between += each.between * row.wire;
    }
    links.append(h("p", { class: "hint" }, `Over the links of these groups: `, h("b", { "data-value": sum.inside }, bytes(sum.inside)), " inside nodes, ",
      h("b", { "data-value": sum.between }, bytes(sum.between)), " between nodes. Bytes are those of a ring that goes through one node after the other; NCCL may choose another path."));
  }

  const select = h("select", { "aria-label": "Axis", onchange: () => {
    state.axis = select.value;
    update();
  } }, axes.map((axis) => h("option", { value: axis, selected: axis === state.axis }, axis || "no axis")));
  const perNode = h("input", { type: "number", min: 1, max: data.world_size, value: state.node, "aria-label": "GPUs in a node", onchange: () => {
    state.node = Math.max(1, Number(perNode.value) || 1);
    update();
  } });
  const which = h("input", { type: "number", min: 0, max: data.world_size - 1, value: state.rank, "aria-label": "Rank", onchange: () => {
    state.rank = Math.min(Math.max(0, Math.floor(Number(which.value)) || 0), data.world_size - 1);
    update();
  } });
  root.append(h("div", { class: "bar-of-tools" },
    axes.length ? h("label", {}, "axis ", select) : null,
    h("label", {}, "rank ", which),
    given ? null : h("label", {}, "GPUs in a node ", perNode),
    data.gpus_per_node ? null : h("span", { class: "hint" }, "the result does not say how many; change it here"),
    h("span", { class: "legend" }, h("span", {}, h("i", { class: "swatch self" }), "the rank"), h("span", {}, h("i", { class: "swatch own" }), "its group"),
      h("span", {}, h("i", { class: "stroke inside" }), "link inside a node"), h("span", {}, h("i", { class: "stroke between" }), "link between nodes"))),
  picture, words);
  if (!data.parameters) root.append(section("Groups of this rank", links));
  if (data.parameters) root.append(section(`Which rank of ${data.plan_axis} holds which part`, partsOf(data)));
  update();
  root.view = { state, ranks: () => picture.querySelectorAll("rect.gpu").length, own: () => picture.querySelectorAll("rect.own").length };
  return { resize: draw };
}

function linkText(count, wire) {
  if (!count) return "–";
  return typeof wire === "number" ? `${count} × ${bytes(wire)}` : String(count);
}

// ---------------------------------------------------------------------------- a tensor in parts

function partsOf(data) {
  const place = h("div", { class: "tensor" });
  const rows = data.parameters;
  function choose(row) {
    clear(place);
    place.append(tensorPicture(row, data.plan_size));
  }
  const list = table([
    { key: "name", label: "parameter", class: "path" }, { key: "layout", label: "layout" }, { key: "shape", label: "shape", show: (value) => value.join(" × ") || "scalar" },
    { key: "on_rank", label: "on a rank", unit: "B", bar: true }, { key: "total_bytes", label: "in all", unit: "B" },
  ], rows.map((row) => ({ ...row, layout: row.layout || "not in the plan", on_rank: row.local_bytes[0] })), { onrow: choose });
  choose(rows.find((row) => row.local_shapes.length > 1 || row.layout && row.layout.includes("Shard")) || rows[0]);
  return h("div", { class: "parts" }, place, list);
}

function tensorPicture(row, ranks) {
  const width = 460, high = row.shape.length > 1 ? 220 : 60;
  const image = svg("svg", { viewBox: `-2 -2 ${width + 4} ${high + 4}`, class: "tensor-picture", role: "img", "aria-label": `${row.name}: ${row.layout || "not in the plan"}` });
  const pieces = piecesOf(row, ranks);
  for (const piece of pieces) {
    const [x, y, wide, tall] = [piece.from[1] * width, piece.from[0] * high, piece.part[1] * width, piece.part[0] * high];
    const square = svg("rect", { x, y, width: Math.max(0.5, wide), height: Math.max(0.5, tall), class: `piece p${piece.rank === null ? "all" : piece.rank % 8}` });
    square.append(svg("title", {}, piece.text));
    image.append(square);
    if (wide > 26 && tall > 13) image.append(svg("text", { x: x + wide / 2, y: y + tall / 2 + 4, class: "piece-name" }, wide > 70 ? piece.label : piece.rank ?? "all"));
  }
  const shapes = row.local_shapes.map((shape) => shape.join(" × ") || "scalar");
  return h("figure", {}, h("figcaption", {}, h("b", {}, breakable(row.name)), ` ${row.layout || "not in the plan: every rank holds all of it"}`), image,
    h("p", { class: "hint" }, `${row.shape.join(" × ") || "scalar"} ${row.dtype}; a rank holds ${[...new Set(shapes)].join(" or ")}, ${bytes(row.local_bytes[0] / row.count)}${row.count > 1 ? ` of each of ${row.count}` : ""}. Dimension 0 runs downwards.`));
}

// Rectangles of a tensor, as parts of its height and width, and the rank that holds each.
function piecesOf(row, ranks) {
  const pieces = [];
  const slabs = row.parts && row.parts.length ? row.parts.map(([size, layout]) => ({ size, layout })) : [{ size: null, layout: row.layout || "Replicate()" }];
  const whole = row.shape[0] || 1;
  let top = 0;
  for (const slab of slabs) {
    const tall = slab.size === null ? 1 : slab.size / whole;
    const found = /Shard\((?:dim=)?(\d+)\)/.exec(slab.layout);
    if (!found) {
      pieces.push({ rank: null, from: [top, 0], part: [tall, 1], label: `all ranks of the axis`, text: `every rank: ${slab.layout}` });
    } else {
      const dim = Number(found[1]) && row.shape.length > 1 ? 1 : 0;
      const down = row.shape.length > 1 ? dim === 0 : false;
      const size = slab.size === null ? row.shape[Number(found[1])] : slab.size;
      const each = Math.ceil(size / ranks);
      for (let rank = 0; rank < ranks; rank++) {
        const from = Math.min(size, rank * each), to = Math.min(size, from + each);
        if (to <= from) continue;
        const at = from / size, part = (to - from) / size;
        pieces.push({
          rank, label: `rank ${rank}`, text: `rank ${rank}: ${from} to ${to - 1} of dimension ${found[1]}`,
          from: down ? [top + at * tall, 0] : [top, at], part: down ? [part * tall, 1] : [tall, part],
        });
      }
    }
    top += tall;
  }
  return pieces;
}
