// The answer first, then what it is made of, then the causes.

function figure({ label, value, unit, note, tone }) {
  return h("div", { class: `figure ${tone || ""}`, "data-label": label }, h("span", { class: "label" }, label),
    h("span", { class: "value", "data-value": typeof value === "number" ? value : null }, show(value, unit)), note && h("span", { class: "note" }, note));
}

function buildVerdict(root, data) {
  if (data.missing) return root.append(missing(data));
  root.append(h("div", { class: `answer ${data.answer.tone}` }, h("strong", {}, data.answer.text), h("span", {}, data.answer.detail)));
  root.append(h("div", { class: "figures" }, data.figures.map(figure)));
  if (data.step) root.append(section("What the step is made of", stepBar(data.step)));
  if (data.causes) root.append(section(data.causes.title, causesTable(data.causes)));
  const columns = h("div", { class: "columns" });
  if (data.suggestions && data.suggestions.length) columns.append(section("What would help", h("ul", { class: "plain" }, data.suggestions.map((each) => h("li", {},
    h("b", {}, each.what), each.value ? `: ${show(each.value, each.unit)}${each.unit === "B" ? " less" : " faster"}` : "", each.how && h("div", { class: "soft" }, each.how), each.module && h("div", {}, moduleLink(each.module)))))));
  for (const each of data.tables || []) columns.append(section(each.title, table(each.columns, each.rows)));
  root.append(columns);
  for (const note of data.notes || []) root.append(h("p", { class: "hint" }, note));
  root.append(section("The command that makes this", data.command ? copyable(data.command) : h("p", { class: "hint" }, data.no_command || "The file does not say which command wrote it.")));
  root.view = { figures: data.figures.length };
  return {};
}

function copyable(command) {
  const button = h("button", { onclick: () => {
    const done = () => {
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    };
    if (navigator.clipboard && isSecureContext) navigator.clipboard.writeText(command).then(done, select);
    else select();
  } }, "Copy");
  const code = h("code", {}, command);
  // A browser that gives no clipboard to files: the text is selected for Ctrl+C.
  function select() {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected: press Ctrl+C";
  }
  return h("div", { class: "command" }, code, button);
}

function stepBar(step) {
  const parts = step.parts.filter((part) => part.seconds > 0);
  return h("div", {}, h("div", { class: "stacked", role: "img", "aria-label": parts.map((part) => `${part.name} ${seconds(part.seconds)}`).join(", ") },
    parts.map((part) => h("i", { class: part.colour, style: { "flex-grow": 1000 * part.seconds / step.total }, title: `${part.name}: ${seconds(part.seconds)}` }))),
  h("div", { class: "legend" }, parts.map((part) => h("span", {}, h("i", { class: `swatch ${part.colour}` }), `${part.name} `,
    h("b", { "data-value": part.seconds }, seconds(part.seconds)), ` ${percent(part.seconds / step.total)}`))),
  step.note && h("p", { class: "hint" }, step.note));
}

function causesTable(causes) {
  if (!causes.rows.length) return h("p", { class: "hint" }, causes.none);
  const columns = causes.columns;
  return table(columns, causes.rows, app.has("timeline") && causes.opens ? { onrow: (row) => {
    app.selectModule(row.module);
    app.open("timeline");
    app.goTo(row.module, row.kind);
  } } : {});
}

function buildAssumptions(root, data) {
  if (data.missing) return root.append(missing(data));
  if (data.rows.length) root.append(section("Figures that were used", table([
    { key: "what", label: "what" }, { key: "value", label: "value", class: "nowrap" }, { key: "source", label: "source" },
    { key: "error", label: "error", unit: "%", show: (value) => (typeof value === "number" ? `± ${percent(value)}` : value || "–") },
  ], data.rows)));
  for (const [title, list] of data.lists) {
    if (list.length) root.append(section(title, h("ul", { class: "plain" }, list.map((text) => h("li", {}, text)))));
  }
  root.view = { rows: data.rows.length };
  return {};
}
