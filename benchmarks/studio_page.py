"""How soon the studio's page shows its first thumbnails, for a folder of thousands of images, in Chromium.

Digits are written out as 5,000 files, or with --photographs as many JPEGs of 640x480 pixels, which take longer to
read. Measured are the start of the studio (a network in memory, the folder not looked at yet); what a first screen asks
the server for, without a browser, six requests at a time; the time in Chromium from opening the address until every
thumbnail of the first screen is drawn; and the time of one label, from its key to the line that says "saved on disk".
All of it while the network looks at the images in the background. Chromium needs a core of its own: see the load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import torch
from PIL import Image

import fewshift
from fewshift.lab.datasets import digits
from fewshift.studio import open_studio

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRAWN = """() => { const seen = [...document.querySelectorAll('.grid img')].filter(image =>
  image.getBoundingClientRect().top < innerHeight);
  return seen.length >= 14 && seen.every(image => image.naturalWidth > 0); }"""
SCRIPTS = [
    f"/static/{name}" for name in ("style.css", "main.js", "page.js", "look.js", "label.js", "adapt.js", "decide.js")
]
SAVED = "() => document.querySelector('#status').textContent.includes('saved on disk')"


def main(count: int, photographs: bool) -> None:
    network = fewshift.load("digits")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        folder.mkdir()
        (write_photographs if photographs else write_digits)(folder, count)
        began = time.perf_counter()
        with open_studio(network, folder) as studio:
            print(f"{count:,} images; the studio serves after {time.perf_counter() - began:.2f} s")
            ask(studio.address)
            visit(studio.address)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def ask(address: str) -> None:
    """The requests of a first screen of 40 thumbnails."""
    where = urlsplit(address)
    with urlopen(address) as page:
        cookie = page.headers["Set-Cookie"].partition(";")[0]

    def get(path: str) -> bytes:
        with urlopen(Request(f"http://{where.netloc}{path}", headers={"Cookie": cookie})) as answer:
            return bytes(answer.read())

    began = time.perf_counter()
    with ThreadPoolExecutor(6) as connections:
        for paths in (SCRIPTS, ["/api/studio", "/api/pulse"], ["/api/images?count=96"]):
            list(connections.map(get, paths))
        list(connections.map(get, [f"/picture/{number}?size=small" for number in range(200, 240)]))
    print(f"first screen served in {time.perf_counter() - began:.2f} s")


def visit(address: str) -> None:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto("about:blank")
        began = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_function(DRAWN, polling=20)
        print(f"first screen of thumbnails drawn {time.perf_counter() - began:.2f} s after the address was opened")
        page.keyboard.press("b")
        page.wait_for_selector(".stage img")
        waits = []
        for number in range(20):
            page.evaluate("document.querySelector('#status').textContent = ''")
            began = time.perf_counter()
            page.keyboard.press(str(number % 10))
            page.wait_for_function(SAVED, polling=10)
            waits.append(time.perf_counter() - began)
        print(f"a label is on disk {1000 * statistics.median(waits):.0f} ms after its key (median of {len(waits)})")
        browser.close()


def write_digits(folder: Path, count: int) -> None:
    images, _ = digits.uci()
    for number in range(count):
        Image.fromarray((images[number % len(images), 0] * 255).byte().numpy()).save(folder / f"{number:05}.png")


def write_photographs(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    small = [random.integers(0, 255, (30, 40, 3), dtype=np.uint8) for _ in range(20)]
    files = []
    for number, pixels in enumerate(small):
        files.append(folder / f"{number:05}.jpg")
        Image.fromarray(pixels).resize((640, 480)).save(files[-1], quality=92)
    for number in range(len(small), count):
        shutil.copyfile(files[number % len(files)], folder / f"{number:05}.jpg")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--photographs", action="store_true")
    options = parser.parse_args()
    main(options.images, options.photographs)
