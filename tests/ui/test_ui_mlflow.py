"""MLflow's pages in a real headless browser: select runs, press Compare, see accuracy against memory.

Screenshots go to $EVALQ_SCREENSHOTS where that is set, else to pytest's temporary folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tracking"))
import tracked_records as build

from evalq.config import PathsConfig, TrackingConfig
from evalq.tracking import log_study, open_tracker

pytestmark = pytest.mark.ui
REPOSITORY = Path(__file__).parents[2]
X, Y = "memory/weight_gib", "quality/wikitext_word_perplexity"
EXPECTED = sorted(
    [(round(269_000_000 / 2**30, 3), 32.2)]
    + [(round(weights / 2**30, 3), perplexity) for perplexity, weights, *_ in build.SCHEMES.values()]
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1600,1100",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a parent run and four cells."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("root")
    config = TrackingConfig(study="three schemes", finish_limit_seconds=300.0)
    outcome = log_study(
        open_tracker(config, PathsConfig(root=str(folder))),
        "smollm2-135m",
        "cpu",
        build.write_study(folder / "records"),
    )
    assert outcome.uploaded == 4
    return folder


class Pages:
    """A running `evalq ui`."""

    def __init__(self, root: Path, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evalq", "ui", "--root", str(root), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )
        self.text = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if "Ctrl-C" in line:
                return
        raise AssertionError(self.text)

    def address(self, pattern: str) -> str:
        found = re.search(rf"http://\S*{pattern}\S*", self.text)
        assert found, self.text
        return found[0]

    def tree(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]


@pytest.fixture(scope="module")
def pages(root: Path) -> Iterator[Pages]:
    """On the next port, because the first one is taken."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port: int = other.getsockname()[1]
        made = Pages(root, port)
    yield made
    tree = made.tree()
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(60) == 0
    gone, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == [], "Ctrl-C leaves no process"
    assert len(gone) > 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed; Debian: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
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


def wait_for(found: Callable[[], Any], what: str, limit_seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        try:
            value = found()
            if value:
                return value
        except Exception as error:
            if "selenium" not in type(error).__module__:
                raise
        time.sleep(0.3)
    raise AssertionError(f"{what} did not appear within {limit_seconds:g} s")


def press(browser: Any, path: str, what: str) -> None:
    """Click the first visible element of an XPath."""

    def clicked() -> bool:
        for element in browser.find_elements("xpath", path):
            if element.is_displayed():
                element.click()
                return True
        return False

    wait_for(clicked, what)


def test_only_this_machine_can_open_it(pages: Pages) -> None:
    port = urllib.parse.urlsplit(pages.address("")).port
    held = [
        one.laddr.ip for process in pages.tree() for one in process.net_connections("tcp") if one.laddr.port == port
    ]
    assert set(held) == {"127.0.0.1"}
    assert f"port {(port or 0) - 1} is taken; using {port}" in pages.text


def test_select_runs_and_compare(pages: Pages, browser: Any, screenshots: Path) -> None:
    browser.get(pages.address("experiments/"))
    press(browser, "//div[@role='row' and @row-id][.//a[contains(., 'three schemes')]]//button", "the + of the study")
    for name in ("baseline", "fp8-kv", "int8-w8a8", "mixed-4-8"):
        tick(browser, name)
    browser.save_screenshot(str(screenshots / "mlflow-runs.png"))
    press(browser, "//button[normalize-space(.)='Compare']", "the button Compare")
    wait_for(lambda: "Comparing 4 Runs" in browser.page_source, "the comparison")
    show_scatter(browser)
    assert points(browser) == EXPECTED
    browser.save_screenshot(str(screenshots / "mlflow-compare.png"))


def tick(browser: Any, name: str) -> None:
    """Tick the row of a run. The grid draws one row in several parts that share a row-id."""
    link = f"//div[@role='row' and @row-id][.//a[normalize-space(.)='{name}']]"

    def ticked() -> bool:
        number = browser.find_element("xpath", link).get_attribute("row-id")
        box = f"//div[@role='row' and @row-id='{number}']//input[contains(@class, 'ag-checkbox-input')]"
        element = browser.find_element("xpath", box)
        if not element.is_selected():
            browser.execute_script("arguments[0].click()", element)
        return bool(browser.find_element("xpath", box).is_selected())

    wait_for(ticked, f"the checkbox of {name}")


def show_scatter(browser: Any) -> None:
    press(browser, "//*[@role='tab'][contains(., 'Scatter')]", "the tab Scatter Plot")
    for axis, metric in (("x", X), ("y", Y)):
        press(browser, f"//button[@id='{axis}-axis-selector']", f"the {axis} axis")
        press(browser, f"//*[@role='option'][normalize-space(.)='{metric}']", metric)
    wait_for(lambda: points(browser), "the points")


def points(browser: Any) -> list[tuple[float, float]]:
    """What the page's chart draws, as (GiB, perplexity); empty while the axes are others."""
    found = browser.execute_script(
        "const chart = [...document.querySelectorAll('.js-plotly-plot')].find(c => c.offsetParent !== null);"
        "return chart ? [chart.layout.xaxis.title.text, chart.layout.yaxis.title.text,"
        " chart.data.flatMap(trace => Array.from(trace.x).map((x, i) => [x, trace.y[i]]))] : null"
    )
    if not found or (found[0], found[1]) != (X, Y):
        return []
    return sorted((round(float(x), 3), round(float(y), 3)) for x, y in found[2])


def test_the_printed_address_compares_the_latest_study(pages: Pages, browser: Any, screenshots: Path) -> None:
    browser.get(pages.address("compare-runs"))
    wait_for(lambda: "Comparing 4 Runs" in browser.page_source, "the comparison")
    show_scatter(browser)
    assert points(browser) == EXPECTED
    names = [
        cell.text for cell in browser.find_elements("xpath", "//tr[contains(., 'Run Name')]//*[self::td or self::th]")
    ]
    shown = [name for name in names if name in ("baseline", "fp8-kv", "int8-w8a8", "mixed-4-8")]
    assert shown == ["baseline", "fp8-kv", "int8-w8a8", "mixed-4-8"]
    browser.save_screenshot(str(screenshots / "mlflow-compare-link.png"))


def test_the_study_has_its_summary(pages: Pages, browser: Any, screenshots: Path) -> None:
    port = urllib.parse.urlsplit(pages.address("")).port
    parent = ask(port, "runs/search", {"experiment_ids": ["1"], "filter": "tags.`evalq.kind` = 'study'"})["runs"][0]
    browser.get(f"http://127.0.0.1:{port}/#/experiments/1/runs/{parent['info']['run_id']}")
    wait_for(lambda: "int8-w8a8" in browser.find_element("tag name", "main").text, "the summary")
    browser.save_screenshot(str(screenshots / "mlflow-study.png"))
    browser.get(f"http://127.0.0.1:{port}/#/experiments/1/runs/{parent['info']['run_id']}/artifacts")
    press(browser, "//*[normalize-space(text())='study']", "the folder study")
    press(browser, "//*[normalize-space(text())='accuracy_against_memory.png']", "the plot")
    wait_for(
        lambda: browser.find_elements("css selector", "img[src^='blob:'], .image-container, canvas, img"), "the plot"
    )
    time.sleep(2)
    browser.save_screenshot(str(screenshots / "mlflow-plot.png"))


def ask(port: int | None, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/2.0/mlflow/{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        data: dict[str, Any] = json.load(answer)
    return data


def test_a_server_gets_the_same_runs(pages: Pages, tmp_path: Path) -> None:
    """Over HTTP, as to any MLflow server; a second upload of the same study adds nothing."""
    port = urllib.parse.urlsplit(pages.address("")).port
    config = TrackingConfig(
        uri=f"http://127.0.0.1:{port}", study="over http", experiment="http", finish_limit_seconds=300
    )
    folders = build.write_study(tmp_path / "records")
    for _ in range(2):
        outcome = log_study(open_tracker(config, PathsConfig(root=str(tmp_path))), "smollm2-135m", "cpu", folders)
        assert (outcome.uploaded, outcome.messages) == (4, [])
    runs = ask(port, "runs/search", {"experiment_ids": [outcome.experiment_id]})["runs"]
    assert len(runs) == 5
    assert all(run["info"]["status"] == "FINISHED" for run in runs)
