"""Write pictures of the page for README and documentation: ``make screenshots``.

The prediction is a made-up one of a Llama on 64 GPUs, so that the pictures change only when
the page does.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from browser import Browser, Tab, find_chromium
from prediction_documents import prediction, search

from torchspmd.report import write_page

_SIZE = {"width": 1200, "height": 620}
_MOST = 200_000  # bytes of a picture


def main(folder: Path) -> None:
    program = find_chromium()
    if program is None:
        sys.exit("there is no chromium here: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    browser = Browser(program)
    try:
        with tempfile.TemporaryDirectory() as pages:
            _take(browser, Path(pages), folder)
    finally:
        browser.close()


def _take(browser: Browser, pages: Path, folder: Path) -> None:
    write_page(prediction(micro_batches=2), pages / "prediction.html")
    write_page(search(), pages / "search.html")
    with browser.open(pages / "prediction.html", **_SIZE) as tab:
        for view in ("verdict", "timeline", "memory", "modules", "mesh"):
            tab.view(view)
            if view == "timeline":
                _choose_a_wait(tab)
            _save(tab, folder / f"page-{view}.png")
    with browser.open(pages / "prediction.html", dark=True, **_SIZE) as tab:
        tab.view("timeline")
        _choose_a_wait(tab)
        _save(tab, folder / "page-timeline-dark.png")
    with browser.open(pages / "search.html", **_SIZE) as tab:
        tab.view("compare")
        _save(tab, folder / "page-search.png")


def _choose_a_wait(tab: Tab) -> None:
    """Zoomed in around an exposed wait, so that there is something to see."""
    tab.js(
        "(view => { const place = view.slices.exposed[20]; view.choose(place); "
        "view.range.show(view.slices.start[place], view.slices.end[place], 9); })"
        "(document.querySelector('#view-timeline').view)"
    )
    tab.settle()


def _save(tab: Tab, path: Path) -> None:
    tab.mouse("mouseMoved", 2, 2)
    tab.settle()
    tab.picture(path)
    size = path.stat().st_size
    if size > _MOST:
        sys.exit(f"{path} has {size} bytes; keep it below {_MOST}")
    print(f"{path} {size // 1024} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
