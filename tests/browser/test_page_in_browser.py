"""The page in a real browser: it shows what the data says, and does what is asked."""

import json
from collections.abc import Iterator

import pytest
from browser import Browser, Tab, find_chromium
from ledger_strategies import make_event, make_ledger
from prediction_documents import HOSTILE, prediction, search

from torchspmd.comm import Phase, ledger_to_dict
from torchspmd.report import compare_results, write_page
from torchspmd.report.views import build_page

VIEWS = ["verdict", "timeline", "memory", "modules", "mesh", "compare", "assumptions"]
_CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.skipif(
        _CHROMIUM is None,
        reason="there is no chromium here: apt-get install chromium",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert _CHROMIUM is not None
    browser = Browser(_CHROMIUM)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def document():
    return prediction(layers=6)


@pytest.fixture(scope="module")
def pages(document, tmp_path_factory):
    """A file for each kind of result."""
    folder = tmp_path_factory.mktemp("pages")
    ledger = make_ledger(
        *(
            make_event(phase=Phase.BACKWARD, module=f"Net.layers.{layer}.up")
            for layer in range(4)
        )
    )
    documents = {
        "prediction": document,
        "large": prediction(layers=32, micro_batches=4, glue=14),
        "hostile": prediction(layers=2, hostile=True, fits="no"),
        "ledger": ledger_to_dict(ledger),
        "search": search(12, layers=2),
        "comparison": compare_results(document, prediction(layers=5), ("a", "b")),
        "plan": PLAN,
    }
    for name, each in documents.items():
        write_page(each, folder / f"{name}.html")
    return folder


@pytest.fixture
def tab(browser, pages):
    """The page of the prediction."""
    with browser.open(pages / "prediction.html") as tab:
        yield tab


PLAN = {
    "format": "torchspmd/plan",
    "version": 1,
    "model": "MLP",
    "mesh": {"dp": 2, "tp": 4},
    "axis": "tp",
    "total_bytes": 640,
    "replicated_bytes": 0,
    "bytes_on_rank_0": 160,
    "parameters": [
        {
            "name": f"layers.[0-1].{name}.weight",
            "count": 2,
            "style": "ColwiseParallel()",
            "layout": layout,
            "shape": shape,
            "dtype": "float32",
            "local_shapes": [[2, 8]],
            "local_bytes": [80],
            "total_bytes": 320,
            "parts": parts,
        }
        for name, layout, shape, parts in (
            ("up", "Shard(0)", [8, 8], []),
            (
                "qkv",
                "Shard(0), Replicate()",
                [12, 8],
                [[8, "Shard(0)"], [4, "Replicate()"]],
            ),
        )
    ],
    "communication": None,
    "notes": [],
}


def open_view(tab: Tab, name: str) -> None:
    tab.view(name)
    assert tab.js(f"document.querySelector('#view-{name}').hidden") is False


def values(tab: Tab, selector: str) -> list[float]:
    """Numbers behind what is shown."""
    found = tab.js(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.dataset.value)"
    )
    return [float(each) for each in found if each is not None]


def press(tab: Tab, text: str) -> None:
    """Click a button by what is written on it."""
    tab.js(
        "[...document.querySelectorAll('.view:not([hidden]) button')]"
        f".find(b => b.textContent === {json.dumps(text)}).click()"
    )
    tab.settle()


def canvas_box(tab: Tab, name: str) -> tuple[float, float, float, float]:
    x, y, width, height = tab.js(
        f"(() => {{ const b = document.querySelector('canvas.{name}')"
        ".getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )
    return x, y, width, height


def state(tab: Tab, view: str, expression: str):
    return tab.js(
        f"(view => {expression})(document.querySelector('#view-{view}').view)"
    )


def pixel(tab: Tab, selector: str, x: float, y: float) -> list[int]:
    """The colour of a canvas at a place."""
    return tab.js(
        f"[...document.querySelector('{selector}').getContext('2d')"
        f".getImageData({x}, {y}, 1, 1).data]"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "name", ["prediction", "ledger", "search", "comparison", "plan", "hostile"]
)
def test_no_view_complains_or_overflows(browser, pages, name, dark):
    with browser.open(pages / f"{name}.html", dark=dark) as tab:
        for width, height in ((1366, 768),) if dark else ((1366, 768), (480, 800)):
            tab.resize(width, height)
            for view in VIEWS:
                open_view(tab, view)
                assert tab.js("document.documentElement.scrollWidth <= innerWidth"), (
                    view
                )
                assert len(tab.text(f"#view-{view}")) > 20
        assert tab.problems() == []


def test_the_verdict_shows_the_documents_figures(tab, document):
    assert tab.text(".answer strong") == "Fits"
    shown = values(tab, "#view-verdict .figure .value")
    assert shown == pytest.approx(
        [
            document["step_seconds"],
            document["mfu"],
            document["exposed_seconds"],
            document["memory"]["allocated_peak_bytes"],
            document["memory"]["reserved_peak_bytes"],
            sum(group["wire_bytes"] for group in document["mesh"]["groups"]),
        ]
    )
    parts = values(tab, "#view-verdict .legend b")
    assert sum(parts) == pytest.approx(document["step_seconds"])
    assert tab.text(".command code") == document["command"]


def test_a_cause_leads_to_its_wait_in_the_timeline(tab):
    tab.click("#view-verdict tr.clickable td")
    assert tab.js("location.hash") == "#timeline"
    assert state(tab, "timeline", "view.state.chosen") >= 0
    assert tab.text(".details h3").startswith("wait for")
    assert "self_attn.o_proj" in tab.text("#view-timeline .chip")


def test_the_timeline_has_every_slice(tab, document):
    timeline = document["timeline"]
    open_view(tab, "timeline")
    assert state(tab, "timeline", "view.count") == len(timeline["start"])
    exposed = sum(kind > 0 for kind in timeline["exposed"])
    assert state(tab, "timeline", "view.exposed") == exposed
    rows = state(tab, "timeline", "view.slices.rows.map(row => row.places.length)")
    counts = [timeline["lane"].count(lane) for lane in range(len(timeline["lanes"]))]
    assert rows == counts


def test_slices_before_the_step_are_reached_by_moving(browser, tmp_path):
    document = prediction(layers=2)
    timeline = document["timeline"]
    ahead = 3 * max(timeline["start"])
    timeline["start"] = [
        start - ahead if lane == 0 else start
        for start, lane in zip(timeline["start"], timeline["lane"], strict=True)
    ]
    write_page(document, tmp_path / "page.html")
    with browser.open(tmp_path / "page.html") as tab:
        open_view(tab, "timeline")
        assert state(tab, "timeline", "view.range.low") == 0
        tab.js("document.querySelector('canvas.timeline').focus()")
        for _ in range(30):
            tab.key("ArrowLeft")
        assert state(tab, "timeline", "view.range.low") == pytest.approx(-ahead)
        tab.key("0")
        assert state(tab, "timeline", "view.range.low") == 0


def test_layers_are_marked_and_highlight_their_module(tab):
    open_view(tab, "timeline")
    paths = state(tab, "timeline", "view.spans.map(span => span.path)")
    forward = [f"Llama.model.layers.{layer}" for layer in range(6)]
    # The last one of forward is the first of backward, without a gap.
    assert paths == [*forward, *forward[-2::-1]]
    x, y, width, _ = canvas_box(tab, "timeline")
    tab.click_at(x + width * 0.5, y + 46)
    assert "Llama.model.layers." in tab.text("#view-timeline .chip")


def test_an_exposed_wait_is_drawn_in_its_colour(tab):
    open_view(tab, "timeline")
    tab.js(
        "(view => { const p = view.slices.exposed[0]; "
        "view.range.show(view.slices.start[p], view.slices.end[p]); })"
        "(document.querySelector('#view-timeline').view)"
    )
    tab.settle()
    x, y = state(tab, "timeline", "view.pixel(view.slices.exposed[0])")
    orange = [213, 94, 0, 255]
    assert pixel(tab, "canvas.timeline", round(x), round(y) + 8) == orange


def test_wheel_drag_keys_and_buttons_move_the_timeline(tab):
    span = "view.range.high - view.range.low"
    open_view(tab, "timeline")
    x, y, width, height = canvas_box(tab, "timeline")
    middle = (x + width / 2, y + height / 2)
    whole = state(tab, "timeline", span)
    tab.wheel(*middle, -300)
    near = state(tab, "timeline", span)
    assert near < 0.7 * whole
    low = state(tab, "timeline", "view.range.low")
    tab.drag(middle, (middle[0] - 100, middle[1]))
    moved = state(tab, "timeline", "view.range.low")
    assert moved > low
    assert state(tab, "timeline", span) == pytest.approx(near)
    tab.js("document.querySelector('canvas.timeline').focus()")
    tab.key("ArrowLeft")
    assert state(tab, "timeline", "view.range.low") < moved
    tab.key("+")
    assert state(tab, "timeline", span) < near
    tab.key("0")
    assert state(tab, "timeline", span) == pytest.approx(whole)
    tab.click("#view-timeline button[aria-label='Zoom in']")
    assert state(tab, "timeline", span) == pytest.approx(whole / 2)


def test_keys_step_through_waits_and_slices(tab, document):
    timeline = document["timeline"]
    open_view(tab, "timeline")
    tab.js("document.querySelector('canvas.timeline').focus()")
    tab.key("n")
    first = state(tab, "timeline", "view.state.chosen")
    assert timeline["exposed"][first] == 1
    sent = timeline["waits_for"][first]
    assert timeline["strings"][timeline["name"][sent]] in tab.text(".details")
    tab.key("n")
    second = state(tab, "timeline", "view.state.chosen")
    assert timeline["start"][second] > timeline["start"][first]
    tab.key("p")
    assert state(tab, "timeline", "view.state.chosen") == first
    tab.key(".")
    assert state(tab, "timeline", "view.state.chosen") not in (first, second)
    tab.key("Escape")
    assert state(tab, "timeline", "view.state.chosen") == -1


def test_hovering_and_clicking_tell_what_a_slice_is(tab, document):
    open_view(tab, "timeline")
    tab.js(
        "(view => { const p = view.slices.exposed[1]; "
        "view.range.show(view.slices.start[p], view.slices.end[p]); })"
        "(document.querySelector('#view-timeline').view)"
    )
    tab.settle()
    x, y, *_ = canvas_box(tab, "timeline")
    dx, dy = state(tab, "timeline", "view.pixel(view.slices.exposed[1])")
    tab.mouse("mouseMoved", x + dx, y + dy)
    tab.settle()
    tip = tab.text("#tip")
    for word in ("module", "phase", "takes", "waits for", "because", "Llama.model"):
        assert word in tip
    tab.click_at(x + dx, y + dy)
    assert "Go to the collective" in tab.text(".details")
    press(tab, "Go to the collective")
    chosen = state(tab, "timeline", "view.state.chosen")
    lane = document["timeline"]["lanes"][document["timeline"]["lane"][chosen]]
    assert lane["kind"] == "communicator"


def test_many_slices_are_drawn_together(browser, pages):
    with browser.open(pages / "large.html") as tab:
        open_view(tab, "timeline")
        assert state(tab, "timeline", "view.count") > 50_000
        # Slices below a pixel are drawn together: no more rectangles than pixels.
        width = canvas_box(tab, "timeline")[2]
        assert state(tab, "timeline", "view.state.drawn") < 7 * width


def test_the_memory_curve_adds_up_and_its_peak_is_one_click_away(tab, document):
    curve = document["memory"]["curve"]
    open_view(tab, "memory")
    count = len(curve["event"])
    assert state(tab, "memory", "view.count") == count
    sums = state(
        tab, "memory", f"Array.from({{length: {count}}}, (_, p) => view.sum(p))"
    )
    assert sums == curve["allocated"]
    tab.click("#view-memory button.main")
    assert state(tab, "memory", "view.state.pinned") == state(
        tab, "memory", "view.peak"
    )
    assert tab.text(".held h3") == "At the peak"
    assert values(tab, ".held dd")[0] == document["memory"]["allocated_peak_bytes"]
    assert len(
        tab.js("[...document.querySelectorAll('.holders li')].map(e => 1)")
    ) == len(curve["holders"][0]["holders"])
    x, y, width, height = canvas_box(tab, "memory")
    tab.mouse("mouseMoved", x + width * 0.4, y + height * 0.6)
    tab.settle()
    point = state(tab, "memory", "view.state.point")
    assert values(tab, ".held dd")[0] == curve["allocated"][point]


def test_modules_fold_open_sort_and_are_found(tab, document):
    rows = "document.querySelectorAll('.tree-table tbody tr')"
    open_view(tab, "modules")
    first = values(tab, ".tree-table tbody tr:first-child .number")
    root = document["modules"][0]
    assert first[0] == root["parameters"]
    assert first[6] == pytest.approx(root["seconds"])
    assert "[0-5]" in tab.text(".tree-table")
    tab.click("#view-modules input[type=checkbox]")
    press(tab, "Open all")
    assert tab.js(f"{rows}.length") == len(document["modules"])
    tab.type("#view-modules input[type=search]", "layers.3.mlp.up")
    found = tab.js(f"[...{rows}].map(e => e.dataset.path)")
    assert found[-1] == "Llama.model.layers.3.mlp.up_proj"
    assert len(found) < 12
    tab.type("#view-modules input[type=search]", "nothing")
    assert "No module has" in tab.text("#view-modules")


def test_columns_sort_inside_of_their_parents(tab):
    open_view(tab, "modules")
    tab.click(".tree-table th:nth-child(2) button")
    names = tab.js(
        "[...document.querySelectorAll('.tree .name')].map(e => e.textContent)"
    )
    assert names.index("mlp") < names.index("self_attn")
    assert tab.js("document.querySelector('th[aria-sort=descending]') !== null")


def test_a_module_is_highlighted_everywhere(tab, document):
    timeline = document["timeline"]
    path = "Llama.model.layers.[0-5].mlp.up_proj"
    open_view(tab, "modules")
    tab.click(f"tr[data-path='{path}']")
    open_view(tab, "timeline")
    lit = state(tab, "timeline", "view.state.lit.reduce((a, b) => a + b, 0)")
    inside = [text.endswith("mlp.up_proj") for text in timeline["strings"]]
    assert lit == sum(inside[module] for module in timeline["module"])


def test_the_tree_is_reached_by_keys(tab):
    focused = "document.activeElement.dataset.path"
    open_view(tab, "modules")
    tab.js("document.querySelector('.tree-table tbody tr').focus()")
    tab.key("ArrowDown")
    assert tab.js(focused) == "Llama.model"
    before = tab.js("document.querySelectorAll('.tree-table tbody tr').length")
    tab.key("ArrowLeft")
    assert tab.js("document.querySelectorAll('.tree-table tbody tr').length") < before
    tab.key("ArrowRight")
    assert tab.js("document.querySelectorAll('.tree-table tbody tr').length") == before
    tab.key("Enter")
    assert "Llama.model" in tab.text("#view-modules .chip")


def test_tabs_are_reached_by_keys(tab):
    tab.js("document.querySelector('#tab-verdict').focus()")
    tab.key("ArrowRight")
    assert tab.js("location.hash") == "#timeline"
    tab.key("End")
    assert tab.js("document.activeElement.id") == "tab-assumptions"
    tab.key("Home")
    assert tab.js("location.hash") == "#verdict"


def test_the_mesh_shows_groups_and_links(tab, document):
    open_view(tab, "mesh")
    assert state(tab, "mesh", "view.ranks()") == document["world_size"]
    assert state(tab, "mesh", "view.own()") == 8
    sums = values(tab, "#view-mesh .hint b")
    tp, dp = document["mesh"]["groups"]
    assert sums == [8 * tp["wire_bytes"], 8 * dp["wire_bytes"]]
    tab.js("(s => { s.value = 'dp'; s.dispatchEvent(new Event('change')); })"
           "(document.querySelector('#view-mesh select'))")  # fmt: skip
    own = "[...document.querySelectorAll('rect.own')].map(e => Number(e.dataset.rank))"
    assert tab.js(own) == dp["ranks"]
    tab.js("document.querySelector(\"rect[data-rank='3']\")"
           ".dispatchEvent(new MouseEvent('click'))")  # fmt: skip
    assert tab.js(own) == [rank + 3 for rank in dp["ranks"]]
    assert tab.js("document.querySelector(\"[aria-label='Rank']\").value") == "3"
    tab.js("(i => { i.value = 5; i.dispatchEvent(new Event('change')); })"
           "(document.querySelector(\"[aria-label='Rank']\"))")  # fmt: skip
    assert tab.js(own) == [rank + 5 for rank in dp["ranks"]]


def test_ranks_are_drawn_on_the_nodes_that_they_are_on(browser, tmp_path):
    """Cyclic: the eight ranks of tp, one after the other, are on all eight nodes."""
    spread = prediction()
    spread["nodes"] = [rank % 8 for rank in range(spread["world_size"])]
    write_page(spread, tmp_path / "page.html")
    with browser.open(tmp_path / "page.html") as tab:
        open_view(tab, "mesh")
        assert state(tab, "mesh", "view.own()") == 8
        count = "document.querySelectorAll('#view-mesh path.{}').length"
        assert tab.js(count.format("between")) == 8
        assert tab.js(count.format("inside")) == 0
        titles = "document.querySelector(\"rect[data-rank='9'] title\").textContent"
        assert tab.js(titles).startswith("rank 9, node 1")
        assert not tab.js("document.querySelector(\"[aria-label='GPUs in a node']\")")


def test_a_plan_shows_who_holds_what(browser, pages):
    pieces = "[...document.querySelectorAll('.piece')].map(e => e.textContent)"
    with browser.open(pages / "plan.html") as tab:
        open_view(tab, "mesh")
        assert tab.js(pieces) == [
            f"rank {rank}: {2 * rank} to {2 * rank + 1} of dimension 0"
            for rank in range(4)
        ]
        tab.click(".parts tbody tr:nth-child(2)")
        assert len(tab.js(pieces)) == 5
        assert tab.js(pieces)[-1].startswith("every rank")


def test_a_comparison_has_both_results(browser, pages, document):
    with browser.open(pages / "comparison.html") as tab:
        assert tab.js("location.hash") == "#compare"
        step = values(tab, "#view-compare table tbody tr:first-child .number")
        assert step[0] == document["step_seconds"]
        assert step[2] == pytest.approx(step[1] - step[0])
        tab.js("(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })"
               "(document.querySelector('header select'))")  # fmt: skip
        open_view(tab, "timeline")
        assert state(tab, "timeline", "view.count") < len(document["timeline"]["start"])


def test_a_candidate_of_a_search_opens(browser, pages):
    with browser.open(pages / "search.html") as tab:
        marks = "document.querySelectorAll('.candidate')"
        assert tab.js(f"{marks}.length") == 12
        assert (
            tab.js("document.querySelectorAll('#view-compare tr.clickable').length")
            == 13
        )
        assert tab.js("document.querySelectorAll('circle.dot.front').length") == state(
            tab, "compare", "view.front"
        )
        tab.click(".candidate[data-place='2']")
        assert tab.js("location.hash") == "#verdict"
        assert tab.js("document.querySelector('header select').value") == "2"
        open_view(tab, "memory")
        open_view(tab, "compare")
        assert tab.js(f"{marks}.length") == 12


def test_two_candidates_of_a_search_side_by_side(browser, tmp_path):
    """What the page joins is what a comparison of the two predictions shows."""
    document = search(4, layers=1)
    candidates = document["candidates"][:2]
    one, other = candidates[1]["prediction"], candidates[0]["prediction"]
    one["modules"][0]["gradient_bytes"] += 4096
    one["ledger"]["totals"][0]["count"] += 3
    write_page(document, tmp_path / "search.html")
    wanted = build_page(compare_results(one, other, ("A", "B")))["views"]["compare"]
    rows = (
        "[...document.querySelectorAll('.beside tbody tr')].map(row => "
        "[...row.querySelectorAll('[data-value]')].slice(0, 2)"
        ".map(cell => Number(cell.dataset.value)))"
    )
    pick = (
        "(s => {{ s.value = '{0}'; s.dispatchEvent(new Event('change')); }})"
        "(document.querySelector(\"[aria-label='Candidate {1}']\"))"
    )
    with browser.open(tmp_path / "search.html") as tab:
        tab.js(pick.format(1, "A"))
        tab.js(pick.format(0, "B"))
        assert tab.js("document.querySelectorAll('.reach.picked').length") == 2
        joined = [*wanted["figures"], *wanted["kinds"], *wanted["modules"]]
        assert wanted["kinds"]
        assert wanted["modules"]
        assert tab.js(rows) == [
            [value for value in (row["before"], row["after"]) if value is not None]
            for row in joined
        ]
        # Modules are of one candidate; without one there is no row to lead to.
        assert tab.js("document.querySelectorAll('a.module').length") == 0
        before = tab.text(".beside")
        press(tab, "Swap")
        assert tab.text(".beside") != before
        press(tab, "Swap")
        assert tab.text(".beside") == before
        assert tab.problems() == []


def test_what_is_missing_says_why_and_how(browser, pages):
    with browser.open(pages / "ledger.html") as tab:
        open_view(tab, "timeline")
        assert "A ledger has no times" in tab.text("#view-timeline")
        assert "torchspmd predict" in tab.text("#view-timeline code")


def test_hostile_names_stay_text(browser, pages):
    with browser.open(pages / "hostile.html") as tab:
        assert HOSTILE in tab.text("h1")
        for view in VIEWS:
            open_view(tab, view)
        assert HOSTILE in tab.text("#view-modules")
        assert tab.js("document.querySelectorAll('script').length") == 2
        assert tab.problems() == []  # an alert would be one


_CONTRAST = """(() => {
    const light = text => {
        const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (!/, 0\\)$/.test(colour)) return colour;
        }
        return getComputedStyle(document.documentElement).backgroundColor;
    };
    const low = [];
    for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.checkVisibility() || e.closest('svg, noscript, script')) continue;
        const a = light(getComputedStyle(e).color), b = light(behind(e));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push(`${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
    }
    return low;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_have_contrast(browser, pages, dark):
    for name in ("prediction", "comparison", "hostile"):
        with browser.open(pages / f"{name}.html", dark=dark) as tab:
            for view in VIEWS:
                open_view(tab, view)
                assert tab.js(_CONTRAST) == [], view


def test_the_theme_switches_and_canvases_follow(tab):
    open_view(tab, "timeline")
    back = "getComputedStyle(document.documentElement).backgroundColor"
    before = tab.js(back), pixel(tab, "canvas.timeline", 300, 300)
    tab.click("#theme")
    after = tab.js(back), pixel(tab, "canvas.timeline", 300, 300)
    assert before != after
    tab.click("#theme")
    assert tab.js(back) == before[0]


def test_every_control_has_a_name(tab):
    for view in VIEWS:
        open_view(tab, view)
    nameless = tab.js(
        "[...document.querySelectorAll('button, input, select, canvas, a')]"
        ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.closest('label') "
        "|| e.ariaHidden)).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_it_prints_every_view(browser, pages):
    with browser.open(pages / "prediction.html", dark=True) as tab:
        pdf = tab.pdf()
        assert pdf.startswith(b"%PDF")
        assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 3
        assert tab.js("document.documentElement.dataset.theme ?? null") is None
        assert tab.problems() == []
