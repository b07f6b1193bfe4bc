"""The report in a real browser: it loads in peace, shows its figures, sorts, fits and prints.

Run by ``make test-browser``; needs Playwright from PyPI and a Chromium of the system's own
(``CHROMIUM`` names it if it is not on the path). Screenshots go to the folder that
``SCREENSHOTS`` names, or else to pytest's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bestta.reports.page import write_report
from bestta.reports.records import groups, read_records
from bestta.reports.tables import tables_of
from fakes import fake_pictures, fake_record

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
METHODS = {"source": 38.0, "bn_stats": 33.0, "alpha_bn": 41.0, "tent_reset": 40.0, "tent": 34.0}
METHODS |= {"cotta": 39.0, "bestta": 46.0}
FIGURES = {
    "over-time", "cost", "pictures", "worst", "forgetting", "traces", "correlations", "distances",
    "embeddings", "study",
}  # fmt: skip
PHONE, SCREEN = {"width": 360, "height": 740}, {"width": 1200, "height": 900}

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("the browser tests need Playwright: pip install 'bestta[browser]'")
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES)]
    chromium = next((path for path in found if path), None)
    if chromium is None:
        pytest.fail(
            f"no Chromium on the path (looked for {', '.join(NAMES)}). On Debian: "
            "apt-get install chromium. One that lies elsewhere is named by CHROMIUM=/path/to/it."
        )
    # Chromium's sandbox refuses to run for root, as in most containers.
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield running
        running.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of seven methods, one of which could not be scored, and of a study."""
    place = tmp_path_factory.mktemp("records")
    for method, level in METHODS.items():
        record = fake_record(method, level=level)
        record["cost"]["call_ms"]["median"] = {"cotta": 240.0, "tent": 30.0}.get(method, 12.0)
        if method == "cotta":
            record["blocks"][0]["score"] = None
        fake_pictures(place, record)
    for n, rho in enumerate(np.linspace(0, 1, 5).tolist()):
        study = {"name": "rho", "row": "", "marks": {"rho": rho}}
        record = fake_record(level=40.0 + n, study=study)
        record["id"] += f"-rho{n}"
        record["settings"] = {"rho": rho}
        fake_pictures(place, record)
    return place


@pytest.fixture(scope="session")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([folder], tmp_path_factory.mktemp("report"))[0]


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Open]:
    """Opens the page; whatever it complains of or asks the network for fails the test."""
    contexts, complaints = [], []

    def opened(path: Path = report, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": SCREEN} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url),
        )
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("SCREENSHOTS")
    place = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    place.mkdir(parents=True, exist_ok=True)
    print(f"screenshots: {place}")
    return place


LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": PHONE, "device_scale_factor": 2},
}


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_loads_without_complaint_or_request(visit, screenshots, look):
    page = visit(**LOOKS[look])
    assert page.title() == "Test-time adaptation, measured"
    page.screenshot(path=screenshots / f"{look}.png", full_page=True)
    assert (screenshots / f"{look}.png").stat().st_size > 50_000


@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
def test_every_figure_is_there_to_be_seen(visit, size):
    page = visit(viewport=size)
    seen = page.evaluate(
        """() => Array.from(document.querySelectorAll("figure"), figure => {
            // What is folded away, or drawn for another width, has no boxes.
            const visible = element => element.checkVisibility({contentVisibilityAuto: true});
            const boxes = Array.from(figure.querySelectorAll("svg, img")).filter(visible)
                .map(element => element.getBoundingClientRect());
            return [figure.className, boxes.length, boxes.every(b => b.width > 5 && b.height > 5)];
        })"""
    )
    assert {name for name, _, _ in seen} == FIGURES
    assert all(count > 0 for _, count, _ in seen)
    assert all(sized for _, _, sized in seen)


def test_every_picture_is_decoded(visit):
    page = visit()
    assert page.evaluate(
        """async () => {
            const images = Array.from(document.images);
            await Promise.all(images.map(image => image.decode()));
            return images.length > 20 && images.every(image => image.naturalWidth === 64);
        }"""
    )


def order(page: Any) -> list[str]:
    rows = page.locator("table.numbers").first.locator("tbody tr th")
    return [text.strip("*") for text in rows.all_inner_texts()]


def expected(folder: Path) -> dict[str, float | None]:
    """The means in the order of the table, from the table itself."""
    found = [group for group in groups(read_records([folder])) if group.study is None]
    table = tables_of(found[0])[0]
    (mean,) = [n for n, c in enumerate(table.columns) if c.title == "Mean"]
    return {row.label: row.cells[mean].value for row in table.rows}


def heading(page: Any, name: str) -> Any:
    return page.locator("table.numbers").first.locator("thead th", has_text=name).first


def test_clicks_sort_best_first_then_worst_first_then_as_it_was(visit, folder):
    page, means = visit(), expected(folder)
    scored = {label: value for label, value in means.items() if value is not None}
    best_first = sorted(scored, key=lambda label: -scored[label])
    missing = [label for label in means if label not in scored]
    assert order(page) == list(means)
    mean = heading(page, "Mean")
    assert mean.get_attribute("aria-sort") == "none"
    mean.locator("button").click()
    assert mean.get_attribute("aria-sort") == "descending"
    assert order(page) == best_first + missing
    mean.locator("button").click()
    assert mean.get_attribute("aria-sort") == "ascending"
    assert order(page) == best_first[::-1] + missing
    mean.locator("button").click()
    assert mean.get_attribute("aria-sort") == "none"
    assert order(page) == list(means)


def test_the_keyboard_sorts_as_well(visit, folder):
    page = visit()
    method = heading(page, "Method")
    method.locator("button").focus()
    for key, way, labels in (
        ("Enter", "ascending", sorted(expected(folder))),
        ("Space", "descending", sorted(expected(folder), reverse=True)),
    ):
        page.keyboard.press(key)
        assert method.get_attribute("aria-sort") == way
        assert order(page) == labels
    # The next heading is one press of Tab away, and takes the sorting over.
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert method.get_attribute("aria-sort") == "none"
    assert page.locator("[aria-sort=ascending], [aria-sort=descending]").count() == 1


def test_a_column_under_a_group_sorts_by_its_own_cells(visit):
    page = visit()
    table = page.locator("table.numbers").first
    below = table.locator("thead tr").nth(1).locator("th")
    places = table.evaluate(
        """table => Array.from(table.tHead.rows[1].cells, cell => {
            const left = cell.getBoundingClientRect().left;
            return Array.from(table.tBodies[0].rows[0].cells)
                .findIndex(other => Math.abs(other.getBoundingClientRect().left - left) < 2);
        })"""
    )
    assert below.count() == len(places) > 4
    for n in (0, below.count() - 1):
        below.nth(n).locator("button").click()
        values = table.evaluate(
            """(table, n) => Array.from(table.tBodies[0].rows, row => row.cells[n].dataset.value)
                .filter(value => value !== undefined).map(Number)""",
            places[n],
        )
        assert len(values) >= len(METHODS) - 1
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("unfolded", [False, True], ids=["folded", "unfolded"])
def test_nothing_sticks_out_on_a_phone(visit, unfolded):
    page = visit(viewport=PHONE)
    if unfolded:
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    wide = page.evaluate(
        """width => Array.from(document.querySelectorAll("body *"))
            .filter(e => e.checkVisibility() && !e.closest(".scroll > *, .hidden, svg *, pre"))
            .filter(e => e.getBoundingClientRect().right > width + 0.5)
            .map(e => e.tagName + "." + e.getAttribute("class"))""",
        PHONE["width"],
    )
    assert wide == []


def test_the_first_column_stays_when_a_table_scrolls(visit):
    page = visit(viewport=PHONE)
    before, after = page.evaluate(
        """() => {
            const box = document.querySelector(".table .scroll");
            const cell = box.querySelector("tbody th");
            const before = cell.getBoundingClientRect().left;
            box.scrollLeft = 200;
            return [before, cell.getBoundingClientRect().left];
        }"""
    )
    assert before == after


READABLE = """() => {
    const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const ground = element => {
        for (let e = element; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    document.querySelectorAll("details").forEach(d => { d.open = true; });
    for (const e of document.querySelectorAll("body *")) {
        const speaks = Array.from(e.childNodes).some(n => n.nodeType === 3 && n.textContent.trim());
        if (!speaks || !e.checkVisibility() || e.closest("script, title")) continue;
        const drawn = e instanceof SVGElement;
        const ink = parse(getComputedStyle(e)[drawn ? "fill" : "color"]);
        const [a, b] = [light(ink), light(ground(drawn ? e.ownerSVGElement : e))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.slice(0, 40),
            e.getAttribute("class")]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_that_wcag_asks_for(visit, scheme):
    page = visit(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) is (scheme == "dark")
    found = page.evaluate(READABLE)
    assert len(found) > 300
    # 4.5 : 1 is level AA for text of any size.
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_paper_is_white_unfolded_and_cuts_nothing_off(visit, screenshots):
    page = visit(color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate(
        """() => Array.from(document.querySelectorAll(".scroll"))
            .every(box => getComputedStyle(box).overflowX === "visible")"""
    )
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 5
    data = page.pdf(path=screenshots / "print.pdf", format="A4", print_background=True)
    assert data.startswith(b"%PDF")
    assert len(data) > 100_000


def test_tables_fit_on_paper(visit):
    # A4 less its margins of 14 mm, at 96 dots an inch.
    page = visit(viewport={"width": 688, "height": 1000})
    page.emulate_media(media="print")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 688


def test_without_scripts_only_sorting_and_copying_are_lost(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("button").count() == 0
    assert page.locator("table.numbers").first.locator("tbody tr").count() == len(METHODS)
    assert page.locator("a.take").first.is_visible()
    page.locator("summary", has_text="Round by round").first.click()
    assert page.locator("details[open] table.numbers").first.is_visible()


def test_a_table_can_be_downloaded_and_copied(visit, report):
    page = visit(accept_downloads=True, permissions=["clipboard-read", "clipboard-write"])
    with page.expect_download() as started:
        page.locator("a.take", has_text="Markdown").first.click()
    text = Path(started.value.path()).read_text()
    assert text == (report.parent / "tables" / started.value.suggested_filename).read_text()
    page.locator("button", has_text="copy Markdown").first.click()
    page.locator("button", has_text="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == text


def test_a_hostile_label_is_shown_and_does_nothing(visit, tmp_path):
    label = "<img src=x onerror=document.title='seized'><script>document.title='seized'</script>"
    fake_pictures(tmp_path, fake_record(label=label))
    page = visit(write_report([tmp_path], tmp_path / "out", title="safe")[0])
    assert page.title() == "safe"
    assert label in page.locator("table.numbers").first.inner_text()
