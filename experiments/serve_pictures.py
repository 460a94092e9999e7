"""Takes the screenshots of the web page that the docs show, with Debian's Chromium.

    python experiments/serve_pictures.py [RUN_FOLDER ...]        the shipped models by default

docs/pictures/page.png shows the page on a desktop, after completions and a race. page_phone.png
shows it on a phone in dark mode.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from serve_load import server

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


def play(page: Page, url: str) -> None:
    """Draws the top of a digit, completes it and races the models."""
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.wait_for_selector("#go:not([disabled])")  # the samples of a first visit are there
    if page.locator("#model option[value=mnist-best-small]").count():
        page.select_option("#model", "mnist-best-small")  # can race with the other models
    page.click("[aria-label='Sample prompt 3']")
    for _ in range(2):  # kernels are chosen at the first call of a shape
        page.click("#go")
        page.wait_for_selector("#on:not([disabled])")
    if page.locator("#race").is_visible():
        page.click("#race")
        page.wait_for_selector("#race:not([disabled])", timeout=60_000)


def main() -> None:
    looks = {
        "page": {"viewport": {"width": 900, "height": 800}, "color_scheme": "light"},
        "page_phone": {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"},
    }
    with server(sys.argv[1:]) as (_, port), sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, look in looks.items():
            page = browser.new_context(**look).new_page()
            play(page, f"http://127.0.0.1:{port}/")
            page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
            print(f"{PICTURES / name}.png")


if __name__ == "__main__":
    main()
