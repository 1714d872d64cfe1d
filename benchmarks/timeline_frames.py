"""How long a frame of the timeline takes while you pan and zoom, in a real browser.

    python -m benchmarks.timeline_frames [--events 100000]

The whole page as ``save_html`` writes it is opened in Chromium (no GPU); a pointer drags it to
and fro at four zooms. A frame is the time from one screen refresh to the next, so whatever else
the browser does counts. The promise: 95 of 100 frames take at most 50 ms.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import save, table
from companion import trace
from companion.classroom.timeline import Timeline

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ZOOMS = (1.0, 0.1, 0.01, 0.001)
PAN = """async (frames) => {
  const host = document.querySelector('.companion-timeline');
  const main = host.shadowRoot.querySelector('canvas.main'), box = main.getBoundingClientRect();
  const at = (type, x) => main.dispatchEvent(new PointerEvent(type, {
    pointerId: 1, button: 0, buttons: 1, clientX: box.left + x, clientY: box.top + 60,
    bubbles: true, composed: true }));
  const refresh = () => new Promise(requestAnimationFrame);
  const shown = new Set(), took = [];
  at('pointerdown', 600);
  let before = await refresh();
  for (let i = 0; i < frames; i++) {
    at('pointermove', 600 + 250 * Math.sin(i / 9));
    const now = await refresh();
    took.push(now - before); before = now;
    shown.add(host.dataset.view);
  }
  at('pointercancel', 600);
  return { took, views: shown.size };
}"""


def make_trace(path: Path, events: int) -> None:
    """Ten steps of nested operators on two threads, with kernels on two streams."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    now, correlation = 0.0, 0
    per_step = events // 10

    def add(name: str, start: float, end: float, cat: str, pid: int, tid: int, number: int) -> None:
        rows.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "ts": round(start, 3),
                "dur": round(end - start, 3),
                "pid": pid,
                "tid": tid,
                "args": {"correlation": number} if number else {},
            }
        )

    for step in range(10):
        begun, made = now, len(rows)
        while len(rows) - made < per_step - 1:
            correlation += 1
            kind, thread = int(rng.integers(40)), 1 + int(rng.random() < 0.4)
            long = float(rng.exponential(14)) + 6
            add(f"aten::op_{kind}", now, now + long, "cpu_op", 1, thread, 0)
            add(f"aten::_inner_{kind}", now + 1, now + long - 1, "cpu_op", 1, thread, 0)
            add("cudaLaunchKernel", now + 2, now + 4, "cuda_runtime", 1, thread, correlation)
            name = f"kernel_{kind}" if kind else "ncclDevKernel_AllReduce"
            add(name, now + 5, now + long + 4, "kernel", 0, 7 + (kind == 0), correlation)
            now += long + float(rng.exponential(2)) + 5
        add(f"ProfilerStep#{step}", begun, now, "user_annotation", 1, 1, 0)
    path.write_text(json.dumps({"traceEvents": rows}))


def measure(page: Any, frames: int) -> list[tuple[float, list[float]]]:
    """ms of each frame at each zoom."""
    found = []
    page.locator("canvas.main").focus()
    for zoom in ZOOMS:
        page.keyboard.press("0")
        # one press of + is a factor of 1.4
        for _ in range(round(np.log(1 / zoom) / np.log(1.4))):
            page.keyboard.press("+")
        page.wait_for_timeout(200)
        result = page.evaluate(PAN, frames)
        if result["views"] < 0.5 * frames and zoom < 1:
            raise SystemExit("the timeline did not move: nothing was measured")
        found.append((zoom, result["took"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=200, help="per zoom")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("No Chromium or Chrome was found: install one (apt install chromium).")
    with tempfile.TemporaryDirectory() as folder:
        make_trace(Path(folder) / "trace.json", arguments.events)
        start = time.perf_counter()
        read = trace.read(Path(folder) / "trace.json")
        page_file = Timeline(read).save_html(Path(folder) / "timeline.html")
        seconds, size = time.perf_counter() - start, page_file.stat().st_size
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=ARGUMENTS)
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            page.goto(page_file.as_uri())
            page.wait_for_selector("canvas.main")
            opened = time.perf_counter() - start
            found = measure(page, arguments.frames)
            version = chromium.version
            chromium.close()
    print(
        f"{len(read):,} spans; read and written in {seconds:.2f} s ({size / 1e6:.2f} MB), "
        f"opened in {opened:.2f} s by Chromium {version}"
    )
    rows = [
        (f"{100 * zoom:g} % shown", *(f"{np.percentile(t, q):.1f}" for q in (50, 95, 100)))
        for zoom, t in found
    ]
    print(table(("ms a frame", "median", "95 %", "longest"), rows))
    everything = [t for _, took in found for t in took]
    percentile = float(np.percentile(everything, 95))
    print(f"95th percentile of all {len(everything)} frames: {percentile:.1f} ms")
    figures = {
        "spans": len(read),
        "page_bytes": size,
        "open_seconds": opened,
        "browser": version,
        "frame_ms_95": percentile,
        "frame_ms": {f"{zoom:g}": took for zoom, took in found},
    }
    save("timeline_frames", figures, torch.device("cpu"))


if __name__ == "__main__":
    main()
