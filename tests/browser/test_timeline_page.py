"""The timeline as a learner meets it: a page from disk, an exported notebook, JupyterLab.

Nothing here may go out to the network. Screenshots are left in ``build/screenshots``.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from companion import device, trace
from companion.classroom.timeline import Timeline
from companion.trace.diagnose import Diagnosis

ROOT = Path(__file__).resolve().parent.parent.parent
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
HOST = ".companion-timeline"

pytestmark = pytest.mark.browser


def span(name: str, start: float, end: float, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    where = {"pid": 0, "tid": 7} if cat == "kernel" else {"pid": 1, "tid": 1}
    event = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, **where}
    return {**event, "args": more}


# µs: two steps of 1,000, the work of the first one launched at 300
EVENTS = [
    span("ProfilerStep#4", 0, 1000, "user_annotation"),
    span("aten::linear", 100, 600, **{"Input Dims": [[2, 3], [4, 3]]}),
    span("aten::mm", 150, 350),
    span("aten::add", 400, 450),
    span("aten::add", 500, 550),
    span("cudaLaunchKernel", 300, 310, "cuda_runtime", correlation=9),
    span("ProfilerStep#5", 1000, 2000, "user_annotation"),
    span("aten::relu", 1200, 1700),
    span("aten::clamp_min", 1200, 1600),
    span("gemm", 320, 800, "kernel", correlation=9),
]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def many(spans: int) -> list[dict[str, Any]]:
    """Of changing lengths, so that they do not zip into nothing."""
    return [
        span(f"aten::op_{i * i % 97}", 20 * i, 20 * i + 1 + (i * 7919 % 18_000) / 1000)
        for i in range(spans)
    ]


def cannot(reason: str) -> None:
    """Skip with the one thing to do; where tests must not be passed over, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        cannot("Playwright is not installed: run `make setup`.")
    browser = next(filter(None, map(shutil.which, (*BROWSERS, MAC))), None)
    if browser is None:
        cannot("No Chromium or Chrome was found: install one (Debian: apt install chromium).")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    page = chromium.new_page(viewport={"width": 1100, "height": 900})
    page.set_default_timeout(30_000)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    assert page.errors == []
    page.close()


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Any:
    """The small trace's own page, the verdict's place marked."""
    t = trace.read(write(tmp_path / "t.json", EVENTS))
    mark = Diagnosis("cpu", [], "", at=(1200.0, 1700.0))
    page.goto(Timeline(t, verdict=mark).save_html(tmp_path / "t.html").as_uri())
    page.wait_for_selector(f"{HOST}[data-view]")
    return page


def view(page: Any) -> list[float]:
    """µs at the left and the right edge, once what was asked for is drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")
    return [float(edge) for edge in page.locator(HOST).get_attribute("data-view").split()]


def point(page: Any, time_us: float, row: int) -> tuple[float, float]:
    """Where on the page a time in a row of the first lane is."""
    box, (low, high) = page.locator("canvas.main").bounding_box(), view(page)
    gutter, ruler, height = 150, 38, 18
    x = gutter + (time_us - low) / (high - low) * (box["width"] - gutter)
    return box["x"] + x, box["y"] + ruler + 4 + (row + 0.5) * height


def colour(page: Any, time_us: float, row: int) -> str:
    """What is drawn there: ``blue`` for anything bluish, ``none`` for the background."""
    box, (x, y) = page.locator("canvas.main").bounding_box(), point(page, time_us, row)
    red, green, blue = page.locator("canvas.main").evaluate(
        "(canvas, [x, y]) => { const k = window.devicePixelRatio; return "
        "[...canvas.getContext('2d').getImageData(x * k, y * k, 1, 1).data].slice(0, 3); }",
        [x - box["x"], y - box["y"] + 6],  # below the letters
    )
    if min(red, green, blue) > 240:
        return "none"
    return "blue" if blue > red + 25 else "red" if red > blue + 25 else "grey"


def selected(page: Any) -> str | None:
    return page.locator(HOST).get_attribute("data-selected")


def shoot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


# ── a page of its own ────────────────────────────────────────────────────────────────────────


def test_it_opens_from_disk_and_asks_for_nothing_else(page: Any, tmp_path: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    t = trace.read(write(tmp_path / "t.json", EVENTS))
    address = Timeline(t).save_html(tmp_path / "t.html").as_uri()
    page.goto(address)
    page.wait_for_selector(f"{HOST}[data-view]")
    assert view(page) == pytest.approx([-10, 2010])
    assert [url for url in asked if not url.startswith(("blob:", "data:"))] == [address]
    shoot(page, "timeline-page")


def test_each_span_is_drawn_where_it_is(opened: Any) -> None:
    for time_us, row, expected in (
        (700, 0, "grey"),
        (110, 1, "blue"),
        (590, 1, "blue"),
        (610, 1, "none"),
        (340, 2, "blue"),
        (375, 2, "none"),
        (425, 2, "blue"),
        (305, 3, "red"),
        (1300, 1, "blue"),
        (1690, 2, "red"),  # the mark's band, beside aten::clamp_min
    ):
        assert colour(opened, time_us, row) == expected, (time_us, row)


def test_hover_says_what_it_is(opened: Any) -> None:
    opened.mouse.move(*point(opened, 200, 1))
    tip = opened.locator(".tip").inner_text()
    assert tip == "aten::linear\n500 µs · operator (cpu_op)\nshapes [[2, 3], [4, 3]]"
    opened.mouse.move(*point(opened, 1100, 2))
    assert not opened.locator(".tip").is_visible()


def test_a_click_selects_and_says_what_is_in_it(opened: Any) -> None:
    opened.mouse.click(*point(opened, 120, 1))
    assert selected(opened) == "aten::linear"
    rows = opened.locator(".inside tr").all_inner_texts()
    assert [row.split() for row in rows] == [
        ["aten::mm", "1", "×", "200", "µs", "40", "%"],
        ["aten::add", "2", "×", "100", "µs", "20", "%"],
    ]
    facts = opened.locator(".facts").inner_text()
    assert re.search(r"duration\s+500 µs\s+by itself\s+200 µs \(40 %\)", facts)
    assert "100 µs, in step 4" in facts
    shoot(opened, "timeline-selected")
    opened.mouse.click(*point(opened, 1100, 2))
    assert selected(opened) == ""
    # what begins with its parent lies in it
    opened.mouse.click(*point(opened, 1650, 1))
    assert opened.locator(".inside tr").all_inner_texts()[0].startswith("aten::clamp_min")


def test_a_kernel_and_its_launch_name_each_other(opened: Any) -> None:
    opened.mouse.click(*point(opened, 305, 3))
    assert selected(opened) == "cudaLaunchKernel"
    assert "gemm, which begins 20 µs later" in opened.locator(".facts").inner_text()
    opened.keyboard.press("d")
    assert selected(opened) == "gemm"
    assert "cudaLaunchKernel, 20 µs before it began" in opened.locator(".facts").inner_text()
    opened.keyboard.press("u")
    assert selected(opened) == "cudaLaunchKernel"


def test_the_wheel_zooms_where_the_pointer_is(opened: Any) -> None:
    x, y = point(opened, 500, 1)
    opened.mouse.move(x, y)
    opened.mouse.wheel(0, -500)
    low, high = view(opened)
    assert high - low < 1000
    assert point(opened, 500, 1)[0] == pytest.approx(x, abs=2)
    opened.mouse.wheel(0, 2000)
    assert view(opened)[1] - view(opened)[0] > 1900


def test_a_drag_pans_and_the_wheel_of_a_page_that_scrolls_does_not_zoom(opened: Any) -> None:
    opened.get_by_label("Zoom in").click()
    low, high = view(opened)
    x, y = point(opened, 900, 1)
    opened.mouse.move(x, y)
    opened.mouse.down()
    opened.mouse.move(x + 100, y, steps=4)
    opened.mouse.up()
    now = view(opened)
    assert now[1] - now[0] == pytest.approx(high - low) and now[0] < low
    assert selected(opened) in (None, "")
    # the timeline comes under a pointer that rests while the page scrolls
    opened.evaluate(
        "() => document.body.prepend(Object.assign(document.createElement('div'), "
        "{ style: 'height: 800px' }), document.createElement('p'))"
    )
    opened.evaluate("() => { document.body.style.paddingBottom = '2000px'; scrollTo(0, 0); }")
    opened.mouse.move(500, 300)
    for _ in range(12):
        opened.mouse.wheel(0, 60)
        opened.wait_for_timeout(40)
    assert view(opened) == pytest.approx(now)
    assert opened.evaluate("scrollY") > 600


def test_everything_is_reached_by_keyboard(opened: Any) -> None:
    main = opened.locator("canvas.main")
    main.focus()
    opened.keyboard.press("]")
    assert view(opened) == pytest.approx([-20, 1020])
    opened.keyboard.press("]")
    assert view(opened) == pytest.approx([980, 2020])
    opened.keyboard.press("ArrowLeft")
    assert view(opened)[0] < 980
    opened.keyboard.press("0")
    opened.keyboard.press("+")
    assert view(opened)[1] - view(opened)[0] == pytest.approx(2020 / 1.4)
    opened.keyboard.press("-")
    opened.keyboard.press("0")
    for key, name in (
        ("n", "ProfilerStep#4"),
        ("d", "aten::linear"),
        ("d", "aten::mm"),
        ("n", "aten::add"),
        ("p", "aten::mm"),
        ("u", "aten::linear"),
    ):
        opened.keyboard.press(key)
        assert selected(opened) == name, key
    assert opened.locator("[role=status]").inner_text() == "aten::linear, operator (cpu_op), 500 µs"
    opened.keyboard.press("Enter")
    assert view(opened) == pytest.approx([50, 650])
    opened.keyboard.press("Escape")
    assert selected(opened) == ""
    assert main.get_attribute("aria-label").startswith("Timeline of t.json: 2 ms, steps 4 to 5")


def test_steps_the_mark_and_a_name_can_be_gone_to(opened: Any) -> None:
    opened.get_by_label("Jump to a step").select_option("step 5")
    assert view(opened) == pytest.approx([980, 2020])
    opened.get_by_label("Previous step").click()
    assert view(opened) == pytest.approx([-20, 1020])
    opened.get_by_label("Go to where it is seen best: The CPU cannot keep up").click()
    assert view(opened) == pytest.approx([950, 1950])
    find = opened.get_by_label(re.compile("^Find spans"))
    find.fill("profilerSTEP")
    assert opened.locator("output").inner_text() == "2 found"
    find.fill("ADD")
    assert opened.locator("output").inner_text() == "2 found"
    find.press("Enter")
    low, high = view(opened)
    assert selected(opened) == "aten::add" and low < 400 and high > 450
    find.press("Enter")
    assert "500 µs, in step 4" in opened.locator(".facts").inner_text()
    find.press("Enter")
    assert "400 µs, in step 4" in opened.locator(".facts").inner_text()


def test_a_lane_folds(opened: Any) -> None:
    before = opened.locator("canvas.main").bounding_box()["height"]
    lane = opened.get_by_role("button", name="main thread")
    lane.click()
    assert lane.get_attribute("aria-expanded") == "false"
    assert opened.locator("canvas.main").bounding_box()["height"] == before - 3 * 18
    opened.keyboard.press("Enter")
    assert opened.locator("canvas.main").bounding_box()["height"] == before


def test_what_is_narrower_than_a_pixel_is_there_all_the_same(page: Any, tmp_path: Path) -> None:
    """100,000 spans of which one is a collective: it is found by colour once zoomed to."""
    events = many(100_000)
    events[70_000]["name"] = "gloo:all_reduce"
    events[70_000]["cat"] = "user_annotation"
    t = trace.read(write(tmp_path / "many.json", events))
    page.goto(Timeline(t).save_html(tmp_path / "many.html").as_uri())
    page.wait_for_selector(f"{HOST}[data-view]")
    assert {colour(page, when, 0) for when in range(100_000, 2_000_000, 190_000)} == {"blue"}
    page.mouse.move(*point(page, 1_000_000, 0))
    tip = page.locator(".tip").inner_text()
    assert re.search(r"longest of \d\d\d spans here", tip)
    # they last 1 to 19 µs
    assert float(re.search(r"\n([\d.]+) µs", tip)[1]) > 18
    find = page.get_by_label(re.compile("^Find spans"))
    find.fill("all_reduce")
    find.press("Enter")
    assert selected(page) == "gloo:all_reduce"
    low, high = view(page)
    assert low < 20 * 70_000 < high < low + 1000
    shoot(page, "timeline-many")


# ── in notebooks ─────────────────────────────────────────────────────────────────────────────


def notebook(folder: Path) -> Path:
    """One cell with a short trace, one with a trace too long for a page, one more."""
    write(folder / "short.json", EVENTS)
    write(folder / "long.json", many(100_000))
    cells = [
        "from companion import trace\nfrom companion.classroom.timeline import Timeline",
        "Timeline(trace.read('short.json'))",
        "Timeline(trace.read('long.json'))",
        "kept = 'this cell is still here'",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(book, folder / "timeline.ipynb")
    return folder / "timeline.ipynb"


def test_an_exported_notebook_keeps_it(page: Any, tmp_path: Path) -> None:
    """Run, saved as JupyterLab saves it (without the widgets' state), exported by nbconvert."""
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    book = nbformat.read(notebook(tmp_path), as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, resources=where, timeout=300, store_widget_state=False).execute()
    assert len(json.dumps(book)) < 1_000_000
    (tmp_path / "out.html").write_text(HTMLExporter().from_notebook_node(book)[0])
    page.route(re.compile("^https?:"), lambda route: route.abort())
    page.goto((tmp_path / "out.html").as_uri(), wait_until="commit")
    page.wait_for_function(f"document.querySelectorAll('{HOST}[data-view]').length === 2")
    first = page.locator(HOST).first
    first.locator("canvas.main").focus()
    page.keyboard.press("]")
    page.wait_for_function(f"document.querySelector('{HOST}').dataset.view.startsWith('-20.000')")
    legend = page.locator(HOST).last.locator(".legend").inner_text()
    assert re.search(r"the \d+,\d+ longest of 100,000 spans", legend)
    # MathJax and require.js of the export are not ours
    page.errors = [error for error in page.errors if "require" not in error]
    shoot(page, "timeline-exported")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """JupyterLab on the notebook; its address."""
    path = notebook(tmp_path)
    token, port = secrets.token_hex(8), device.free_port()
    own = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "RUNTIME")}
    own |= {"JUPYTER_DATA_DIR": str(tmp_path / "data"), "IPYTHONDIR": str(tmp_path / "ipython")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={tmp_path}", "--LabApp.news_url=None"]
    with (tmp_path / "lab.log").open("w") as out:
        server = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 120
        while device.port_is_free(port):
            assert server.poll() is None and time.monotonic() < until, "JupyterLab did not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/lab/tree/{path.name}?token={token}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_in_jupyterlab_short_and_long(page: Any, lab: str) -> None:
    page.set_default_timeout(90_000)
    page.goto(lab)
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function(
        r"/\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText || '')"
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()
    hosts = page.locator(f"{HOST}[data-view]")
    hosts.nth(1).wait_for()
    assert hosts.count() == 2
    # the long one has all its spans: they came from the kernel
    assert (
        page.locator(".jp-OutputArea-output:not(.jp-RenderedHTMLCommon)").locator(HOST).count() == 1
    )
    assert "100,000 spans in 1 lane" in hosts.nth(1).locator(".details").inner_text()
    for number in (0, 1):
        host = hosts.nth(number)
        host.scroll_into_view_if_needed()
        before = host.get_attribute("data-view")
        host.locator("canvas.main").click(position={"x": 400, "y": 50})
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(200)
        assert host.get_attribute("data-view") != before
        assert host.get_attribute("data-selected")
        # d d deletes a cell in JupyterLab, 0 0 restarts the kernel, x cuts
        for key in "dd00xdd":
            page.keyboard.press(key)
        host.locator("input").fill("")
        host.locator("input").press_sequentially("ddx")
        page.wait_for_timeout(300)
        assert page.locator(".jp-CodeCell").count() == 4
        assert page.locator(".jp-Dialog").count() == 0
        shoot(page, f"timeline-lab-{number + 1}")
