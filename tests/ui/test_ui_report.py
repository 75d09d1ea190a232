"""The report in a real headless browser: drawn, silent, sealed, walked by keyboard, and free of serious findings of axe-core.

axe-core is no part of the project: `make test-ui` fetches it into .ui/; without it that test is skipped. Screenshots go to
$EVALQ_SCREENSHOTS where that is set, else to pytest's temporary folder.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import study_builder

from evalq.report.page.compose import study_page
from evalq.report.page.draw import can_draw
from evalq.report.page.html import page_html
from evalq.study.build import build_study
from evalq.study.gather import record_folders

pytestmark = pytest.mark.ui
REPOSITORY = Path(__file__).parents[2]
AXE = REPOSITORY / ".ui" / "node_modules" / "axe-core" / "axe.min.js"
STUDY = REPOSITORY / "reports" / "smollm2-h200" / "records"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-dev-shm-usage",
)
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three reports as files: one made up with everything in it, one hostile, one of the checked-in H200 records."""
    if not can_draw():
        pytest.skip("vl-convert-python is not installed: pip install 'evalq[report]'")
    folder = tmp_path_factory.mktemp("pages")
    studies = {"whole": study_builder.write_study(folder / "records")}
    studies["hostile"] = study_builder.write_study(folder / "hostile-records", study_builder.HOSTILE)
    studies["h200"] = STUDY
    files = {}
    for name, records in studies.items():
        files[name] = folder / f"{name}.html"
        files[name].write_text(page_html(study_page(build_study(record_folders(records)))), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed; Debian: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("EVALQ_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show(browser: Any, page: Path, scheme: str = "light", width: int = 1280, media: str = "screen") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what came before is of another page
    browser.get(page.as_uri())


def requested(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("name", ["whole", "hostile", "h200"])
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
def test_every_chart_is_drawn_and_the_page_keeps_silent(
    browser: Any, pages: dict[str, Path], screenshots: Path, name: str, scheme: str, width: int
) -> None:
    show(browser, pages[name], scheme, width)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(figure => {"
        " const seen = [...figure.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width > 0);"
        " const marks = seen.length ? seen[0].querySelectorAll('.role-mark path, .role-mark line, .role-mark text').length : 0;"
        " const box = seen.length ? seen[0].getBoundingClientRect() : {width: 0, height: 0};"
        " return [seen.length, marks, box.width, box.height] })"
    )
    assert len(drawn) >= 7
    for seen, marks, wide, high in drawn:
        assert seen == 1, "one picture of each chart is seen at a time"
        assert marks >= 3
        assert wide > 200
        assert high > 60
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    away = [url for url in requested(browser) if not url.startswith(("file:", "data:"))]
    assert away == []
    if name != "hostile":
        picture(browser, screenshots / f"report-{name}-{scheme}-{width}.png", width)


def picture(browser: Any, file: Path, width: int) -> None:
    height = min(browser.execute_script("return document.documentElement.scrollHeight"), 12_000)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    file.write_bytes(base64.b64decode(shot["data"]))


def test_text_of_records_runs_nothing(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["hostile"])
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.execute_script("return document.images.length") == 0
    assert "alert(1)" in browser.find_element("tag name", "body").text
    found = browser.execute_script(
        "return [...document.querySelectorAll('*')].filter(e => [...e.attributes].some(a => a.name.startsWith('on'))).length"
    )
    assert found == 0


def test_a_chart_is_no_smaller_for_its_long_names(browser: Any, pages: dict[str, Path]) -> None:
    """Names of many characters are cut with an ellipsis, never at the edge."""
    show(browser, pages["hostile"], width=390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def tab(browser: Any) -> dict[str, Any]:
    """Press Tab; what has the focus now, and whether it can be seen that it has."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(Keys.TAB).perform()
    found: dict[str, Any] = browser.execute_script(
        "const e = document.activeElement, s = getComputedStyle(e), r = e.getBoundingClientRect();"
        "return {tag: e.tagName, text: (e.innerText || '').slice(0, 80), label: e.getAttribute('aria-label'),"
        " outline: s.outlineStyle, width: parseFloat(s.outlineWidth), top: r.top, left: r.left}"
    )
    return found


def test_keyboard_walk(browser: Any, pages: dict[str, Path]) -> None:
    """Skip link first, every stop visible, folds open with Enter, tables scroll with arrows, and Tab gets to the end."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(browser, pages["whole"], width=390)
    first = tab(browser)
    assert (first["tag"], first["text"]) == ("A", "To the results")
    assert first["left"] >= 0, "the skip link is seen once it has the focus"
    total = browser.execute_script(
        "return [...document.querySelectorAll('a, summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility()).length"
    )
    stops = [first]
    while len(stops) < total:
        stops.append(tab(browser))
        assert stops[-1]["tag"] in ("A", "SUMMARY", "DIV"), stops[-1]
        assert stops[-1]["outline"] != "none", stops[-1]
        assert stops[-1]["width"] >= 2
    assert {stop["tag"] for stop in stops} == {"A", "SUMMARY", "DIV"}
    assert all(stop["label"] for stop in stops if stop["tag"] == "DIV"), "a region that takes the focus has a name"
    browser.execute_script("document.querySelector('details > summary').focus()")
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert browser.execute_script("return document.querySelector('details').open")
    browser.execute_script("document.querySelector('.scroll').focus()")
    before = browser.execute_script("return document.activeElement.scrollLeft")
    for _ in range(5):
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert (
        browser.execute_async_script(
            "const done = arguments[0]; setTimeout(() => done(document.activeElement.scrollLeft), 500)"
        )
        > before
    )


@pytest.mark.parametrize("name", ["whole", "h200"])
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
def test_axe_has_no_serious_finding(browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int) -> None:
    if not AXE.is_file():
        pytest.skip(f"axe-core is not at {AXE}; `make test-ui` fetches it where npm is installed")
    show(browser, pages[name], scheme, width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    result = browser.execute_async_script(
        "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then(done, e => done({error: String(e)}))"
    )
    assert "error" not in result, result
    assert result["testEngine"]["name"] == "axe-core"
    found = [(v["id"], v["impact"], v["nodes"][0]["html"][:200]) for v in result["violations"]]
    assert [one for one in found if one[1] in ("serious", "critical")] == []
    assert len(result["passes"]) > 10, "axe looked at the page"


def test_print_shows_what_is_folded(browser: Any, pages: dict[str, Path], screenshots: Path) -> None:
    show(browser, pages["whole"], media="print")
    folded = browser.execute_script(
        "return [...document.querySelectorAll('details table')]"
        ".filter(t => !t.checkVisibility({contentVisibilityAuto: true})).length"
    )
    assert folded == 0
    assert not browser.find_element("tag name", "nav").is_displayed()
    printed = browser.execute_cdp_cmd(
        "Page.printToPDF", {"printBackground": False, "paperWidth": 8.27, "paperHeight": 11.69}
    )
    data = base64.b64decode(printed["data"])
    assert data.startswith(b"%PDF")
    (screenshots / "report-print.pdf").write_bytes(data)
