"""A browser, and the reports of some runs."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from cauce.report.html import write_report
from tests.report.run_folder import make_run

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@dataclass
class Opened:
    """A page in the browser, with everything it complained about or asked the network for."""

    page: Page
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@dataclass
class Reader:
    """Opens reports; one browser serves all tests, and pages are opened sparingly."""

    browser: Browser
    opened: list[Opened] = field(default_factory=list)

    def open(self, path: Path, *, is_phone: bool = False, is_dark: bool = False) -> Opened:
        context = self.browser.new_context(
            viewport=PHONE if is_phone else DESKTOP,  # type: ignore[arg-type]  # a plain dict is what it takes
            has_touch=is_phone,
            color_scheme="dark" if is_dark else "light",
        )
        result = Opened(context.new_page())
        result.page.on("console", lambda message: result.troubles.append(f"{message.type}: {message.text}"))
        result.page.on("pageerror", lambda error: result.troubles.append(str(error)))
        result.page.on("request", lambda request: result.requests.append(request.url))
        result.page.goto(path.as_uri())
        self.opened.append(result)
        return result

    def close(self) -> None:
        for opened in self.opened:
            opened.page.context.close()


@pytest.fixture(
    scope="module"
)  # Playwright keeps an event loop running in this thread, which would disturb other tests
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        reason = "no Chromium on the PATH: the report is not opened in a browser (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reader(chromium: Browser) -> Iterator[Reader]:
    reader = Reader(chromium)
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of 12 plans that went to its end."""
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "quickstart-1", num_plans=12))


@pytest.fixture(scope="module")
def opened_once(reader: Reader, report: Path) -> Opened:
    opened = reader.open(report)
    opened.page.wait_for_selector("#plot-rewards .point")
    return opened


@pytest.fixture
def desktop(opened_once: Opened) -> Opened:
    """The report on a desktop, its viewers at their first item."""
    for select in opened_once.page.locator("select").all():
        select.select_option(index=0)
        select.dispatch_event("change")
    return opened_once
