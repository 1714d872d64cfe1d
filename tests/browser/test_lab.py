"""Notebook 01 as a learner meets it: ``make lab``, a browser, Run All, Stop, a slider.

nbval ignores what widgets say to the kernel, so only this test sees them work.
Screenshots are left in ``build/screenshots``.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from companion import device

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "browser" / "work"
SCREENSHOTS = ROOT / "build" / "screenshots"
NOTEBOOK = WORK / "01_baseline.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
RUN_ALL_SECONDS = 900

pytestmark = pytest.mark.browser


def cannot(reason: str) -> None:
    """Skip with the one thing to do; where tests must not be passed over, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Course:
    """A running ``make lab``."""

    address: str
    log: Path


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    folder = tmp_path_factory.mktemp("lab")
    shutil.rmtree(WORK, ignore_errors=True)
    # the settings of whoever runs the test must not enter, nor be changed
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "RUNTIME")}
    own |= {"JUPYTER_DATA_DIR": str(folder / "data"), "IPYTHONDIR": str(folder / "ipython")}
    command = ["make", "lab", "NO_BROWSER=1", f"PORT={device.free_port()}"]
    command += [f"WORK={WORK.relative_to(ROOT)}"]
    log = folder / "lab.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Course(address(server, log), log)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def address(server: subprocess.Popen, log: Path) -> str:
    """The address that ``make lab`` prints, once the server answers."""
    until = time.monotonic() + 300
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", log.read_text()):
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"`make lab` did not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def page(course: Course, request: pytest.FixtureRequest) -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        cannot("Playwright is not installed: run `make setup`.")
    browser = next(filter(None, map(shutil.which, (*BROWSERS, MAC))), None)
    if browser is None:
        cannot("No Chromium or Chrome was found: install one (Debian: apt install chromium).")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=ARGUMENTS)
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.goto(re.sub(r"/lab/tree/[^?]*\?", notebook_path() + "?reset&", course.address))
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        wait_for_idle(page)
        failed = request.session.testsfailed
        yield page
        if request.session.testsfailed > failed:
            shoot(page, "0-at-the-end-of-a-failed-run")
        chromium.close()


def notebook_path() -> str:
    return f"/lab/tree/{NOTEBOOK.relative_to(ROOT).as_posix()}"


def wait_for_idle(page: Any, seconds: float = 60) -> None:
    """Until the kernel is connected and has nothing to do; what is clicked earlier is lost."""
    page.wait_for_function(
        r"/\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText || '')",
        timeout=seconds * 1000,
    )


def shoot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def saved(page: Any) -> dict:
    """The notebook as JupyterLab saves it now."""
    before = NOTEBOOK.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        page.wait_for_timeout(300)
        try:
            if NOTEBOOK.stat().st_mtime_ns != before:
                return json.loads(NOTEBOOK.read_text())
        except ValueError:
            continue  # half written
    raise AssertionError("JupyterLab did not save the notebook within a minute")


def cell_with(page: Any, text: str) -> Any:
    """The first code cell with ``text`` in its source, scrolled into view."""
    cell = page.locator(".jp-CodeCell", has=page.locator(".jp-InputArea-editor", has_text=text))
    cell.first.scroll_into_view_if_needed()
    return cell.first


def test_it_opens_on_the_course_without_a_pop_up(page: Any, course: Course) -> None:
    assert "01_baseline" in page.title()
    page.wait_for_timeout(2000)
    assert page.locator(".Toastify__toast").count() == 0
    shoot(page, "1-opened")
    assert "/lab/tree/build/browser/work/01_baseline.ipynb" in course.address


def test_run_all_reaches_the_end_without_an_error(page: Any) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()
    page.wait_for_selector(".companion-live", timeout=RUN_ALL_SECONDS * 1000)
    shoot(page, "2-training")
    page.wait_for_function(
        """() => {
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
            return prompts.every(p => !p.innerText.includes('*'));
        }""",
        timeout=RUN_ALL_SECONDS * 1000,
    )
    wait_for_idle(page)
    shoot(page, "3-end")
    code = [c for c in saved(page)["cells"] if c["cell_type"] == "code" and c["source"]]
    errors = [
        f"{output['ename']}: {output['evalue']}"
        for cell in code
        for output in cell["outputs"]
        if output["output_type"] == "error"
        and "raises-exception" not in cell["metadata"].get("tags", [])
    ]
    assert errors == []
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]


def test_a_slider_changes_its_picture(page: Any) -> None:
    explorer = page.locator(".companion-explorer").first
    explorer.scroll_into_view_if_needed()
    picture = explorer.locator("img").first
    before = picture.get_attribute("src")
    handle = explorer.locator(".noUi-handle").first
    handle.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('.companion-explorer img').src !== before", arg=before
    )
    # four rates up from 0.003: the picture must arrive where the slider stands
    page.wait_for_function(
        "() => document.querySelector('.companion-explorer').innerText.includes('rises to 0.05 in')"
    )
    shoot(page, "4-explorer")


def test_the_stop_button_ends_training_half_way(page: Any) -> None:
    """The kernel is busy while it trains; the button must reach it all the same."""
    cell = cell_with(page, "watch(")
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    button = cell.locator(".companion-stop")
    button.wait_for()
    cell.locator(".companion-live progress:not([value='0'])").wait_for()
    shoot(page, "5-before-stop")
    button.click()
    ended = cell.locator(".jp-OutputArea", has_text=re.compile(r"stopped: step \d+ of \d+"))
    ended.first.wait_for()
    wait_for_idle(page)
    shoot(page, "6-stopped")
    step, steps = re.search(r"stopped: step (\d+) of (\d+)", ended.first.inner_text()).groups()
    assert 0 < int(step) < int(steps)
