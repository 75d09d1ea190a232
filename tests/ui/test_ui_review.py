"""The review form in a real headless browser, from a file, with no network: filled in by keyboard, kept, downloaded, read."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalq.judge.blind import Key, Pairs, blind, read_answers
from evalq.judge.review import analyse
from evalq.report.review_form import review_form

pytestmark = pytest.mark.ui
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)
MARKUP = "<img src=x onerror=\"document.title='broken'\"> and a long word " + "x" * 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pairs, Key]:
    prompts = [f"Prompt number {i}" for i in range(4)]
    first, second = [f"plain text {i}" for i in range(4)], [f"{MARKUP} {i}" for i in range(4)]
    pairs, key = blind("review-ui", ("base", "cand"), prompts, first, second, 7)
    file = tmp_path_factory.mktemp("review") / "form.html"
    file.write_text(review_form("review-ui", pairs.pairs), encoding="utf-8")
    return file, pairs, key


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed; Debian: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(chromedriver))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    yield driver
    driver.quit()


def choose(browser: Any, item: str, question: str, value: str) -> None:
    """By keyboard: the focus on the radio button, then space."""
    box = browser.find_element("css selector", f"input[name='{item}:{question}'][value='{value}']")
    browser.execute_script("arguments[0].focus()", box)
    box.send_keys(" ")
    assert box.is_selected()


def test_filled_in_offline_and_read_back(browser: Any, made: tuple[Path, Pairs, Key], downloads: Path) -> None:
    file, pairs, key = made
    browser.get(file.as_uri())
    assert browser.title == "Review of paired outputs"
    browser.find_element("id", "download").click()
    assert "Give your name" in browser.find_element("id", "progress").text
    browser.find_element("id", "reviewer").send_keys("Ann B.")
    for pair in pairs.pairs:
        letter = key.candidate_is[pair.item]
        other = "ab".replace(letter, "")
        choose(browser, pair.item, "preference", letter)
        choose(browser, pair.item, f"coherence_{letter}", "5")
        choose(browser, pair.item, f"coherence_{other}", "3")
    assert browser.find_element("id", "progress").text == "4 of 4 prompts answered"
    browser.refresh()
    assert browser.find_element("id", "progress").text == "4 of 4 prompts answered", "a closed tab loses nothing"
    browser.find_element("id", "download").click()
    deadline = time.monotonic() + 30
    while not (found := list(downloads.glob("answers-Ann-B-*.json"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers = read_answers(found[0], key)
    result = analyse(answers, (key.review_id, "base", "cand"), 4, 0)
    assert result.estimates[0].value == 1.0
    assert result.estimates[1].value == 2.0
    assert result.reviewers == ["Ann B."]


def test_nothing_was_asked_of_any_network_and_nothing_broke(browser: Any, made: tuple[Path, Pairs, Key]) -> None:
    browser.get(made[0].as_uri())
    time.sleep(1)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {address.split(":")[0] for address in asked} <= {"file", "blob", "data", "chrome"}  # chrome: its own new tab
    assert browser.title == "Review of paired outputs", "outputs are text, never markup"
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_its_window(
    browser: Any, made: tuple[Path, Pairs, Key], width: int, scheme: str, tmp_path: Path
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.get(made[0].as_uri())
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width, "no sideways scrolling"
    folder = Path(os.environ.get("EVALQ_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(folder / f"review-{scheme}-{width}.png"))


def test_every_question_has_a_name(browser: Any, made: tuple[Path, Pairs, Key]) -> None:
    """Groups have legends, inputs have labels: what a screen reader says."""
    browser.get(made[0].as_uri())
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('fieldset')].filter(f => !f.querySelector('legend')?.textContent.trim()).length"
        " + [...document.querySelectorAll('input')].filter(i => !i.labels.length || !i.labels[0].textContent.trim()).length"
    )
    assert unnamed == 0
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
