// The page: its head, its views, and what they share.

const VIEWS = [
  ["verdict", "Verdict", buildVerdict], ["timeline", "Timeline", buildTimeline], ["memory", "Memory", buildMemory], ["modules", "Modules", buildModules],
  ["mesh", "Mesh", buildMesh], ["compare", "Compare", buildCompare], ["assumptions", "Assumptions", buildAssumptions],
];

const app = {
  state: { view: "verdict", module: null, page: null },
  document: null,
  built: new Map(),
  listeners: { module: [], theme: [] },

  start(document_) {
    this.document = document_;
    readPalette();
    this.head();
    this.tabs();
    const wanted = location.hash.slice(1);
    this.open(VIEWS.some(([name]) => name === wanted) ? wanted : this.document.opens || "verdict");
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    let last = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== last) this.built.forEach((each) => each.acts.resize && !each.element.hidden && each.acts.resize());
      last = innerWidth;
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
    document.documentElement.dataset.ready = "yes";
  },

  // The data that a view shows: of the opened result, else of the whole document.
  data(view) {
    const page = this.state.page === null || view === "compare" ? this.document : this.document.pages[this.state.page];
    return page.views[view];
  },

  has(view) {
    const data = this.data(view);
    return Boolean(data && !data.missing);
  },

  head() {
    const page = this.state.page === null ? this.document : this.document.pages[this.state.page];
    const head = clear(document.getElementById("head"));
    const pages = this.document.pages || [];
    const select = pages.length ? h("select", { "aria-label": "Which result", onchange: () => this.openPage(select.value === "" ? null : Number(select.value)) },
      h("option", { value: "" }, this.document.whole || "everything"), pages.map((each, place) => h("option", { value: place, selected: place === this.state.page }, each.name))) : null;
    const theme = h("button", { id: "theme", title: "Light or dark", "aria-label": "Switch between light and dark", onclick: () => this.switchTheme() }, "◐");
    append(head, [h("div", { class: "titles" }, h("h1", {}, page.title), h("p", {}, page.subtitle)), h("div", { class: "tools" }, select, theme)]);
  },

  tabs() {
    const list = clear(document.getElementById("tabs"));
    for (const [name, title] of VIEWS) {
      list.append(h("button", {
        role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, class: this.has(name) ? "" : "empty", title: this.has(name) ? null : "no data in this result",
        onclick: () => this.open(name), onkeydown: (event) => {
          const place = VIEWS.findIndex((view) => view[0] === name);
          const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: VIEWS.length - 1 }[event.key];
          if (next === undefined) return;
          event.preventDefault();
          const view = VIEWS[(next + VIEWS.length) % VIEWS.length][0];
          this.open(view);
          document.getElementById(`tab-${view}`).focus();
        },
      }, title));
    }
  },

  open(name) {
    if (!VIEWS.some(([view]) => view === name)) return;
    hideTip();
    this.state.view = name;
    this.build(name);
    for (const [view] of VIEWS) {
      const tab = document.getElementById(`tab-${view}`);
      tab.setAttribute("aria-selected", String(view === name));
      tab.tabIndex = view === name ? 0 : -1;
      const built = this.built.get(view);
      if (built) built.element.hidden = view !== name;
    }
    if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
    const { acts } = this.built.get(name);
    if (acts.resize) acts.resize();
  },

  build(name) {
    if (this.built.has(name)) return;
    const [, title, builder] = VIEWS.find(([view]) => view === name);
    const element = h("div", { role: "tabpanel", id: `view-${name}`, class: "view", "aria-labelledby": `tab-${name}` }, h("h2", { class: "printed" }, title));
    document.getElementById("main").append(element);
    const acts = builder(element, this.data(name), this.state.page) || {};
    this.built.set(name, { element, acts });
  },

  goTo(module, kind) {
    const { acts } = this.built.get(this.state.view);
    if (acts.goTo) acts.goTo(module, kind);
  },

  openPage(place) {
    this.state.page = place;
    this.state.module = null;
    this.rebuild();
    if (place !== null && this.state.view === "compare") this.open("verdict");
    else if (place === null) this.open("compare");
    else this.open(this.state.view);
    scrollTo(0, 0);
  },

  rebuild() {
    this.listeners = { module: [], theme: [] };
    this.built.forEach((each) => each.element.remove());
    this.built.clear();
    this.head();
    this.tabs();
  },

  onModule(page, act) {
    this.listeners.module.push(act);
  },

  onTheme(page, act) {
    this.listeners.theme.push(act);
  },

  selectModule(path) {
    this.state.module = path;
    this.listeners.module.forEach((act) => act());
    say(path === null ? "No module is selected" : `${path} is selected`);
  },

  // Whether a module is another one or lies inside it; [0-31] stands for numbers.
  isInside(path, parent) {
    const outer = parent.split("."), inner = path.split(".");
    return outer.every((part, place) => inner[place] === part || (inner[place] !== undefined && inFold(part, inner[place])));
  },

  switchTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.retheme();
  },

  retheme() {
    readPalette();
    this.built.forEach((each) => each.acts.resize && each.acts.resize());
    this.listeners.theme.forEach((act) => act());
  },

  // On paper: every view that has data, one below the other, in light colours.
  print(begins) {
    const root = document.documentElement;
    if (begins) {
      this.screenTheme = root.dataset.theme;
      root.dataset.theme = "light";
      readPalette();
      for (const [name] of VIEWS) if (this.has(name)) this.build(name);
      this.built.forEach((each, name) => {
        each.element.hidden = !this.has(name);
        if (!each.element.hidden && each.acts.now) each.acts.now();
      });
    } else {
      if (this.screenTheme) root.dataset.theme = this.screenTheme;
      else delete root.dataset.theme;
      this.retheme();
      this.open(this.state.view);
    }
  },
};

function inFold(part, name) {
  if (!part.startsWith("[") || !part.endsWith("]") || !/^\d+$/.test(name)) return false;
  return part.slice(1, -1).split(",").some((run) => {
    const [low, high] = run.split("-").map(Number);
    return Number(name) >= low && Number(name) <= (high ?? low);
  });
}

async function read() {
  const source = document.getElementById("data");
  if (source.dataset.encoding !== "gzip+base64") return JSON.parse(source.textContent);
  const packed = Uint8Array.from(atob(source.textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

read().then((data) => app.start(data)).catch((error) => {
  document.getElementById("main").append(h("p", { class: "missing" }, `The page cannot read its data in this browser: ${error.message}. Any browser since 2023 can.`));
  throw error;
});
