"""The page of `examples/space/app.py` in headless Chromium, for its test and for the picture in the docs.

python -m tests.examples.space_page  # writes docs/pictures/space.png
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
"""For the start of the app, and for an answer about a small model; an idle machine needs a few seconds."""


@contextmanager
def served() -> Iterator[str]:
    """Start the app at a free port; return its address once it answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    command = [sys.executable, str(ROOT / "examples" / "space" / "app.py")]
    app = subprocess.Popen(command, env=environment)
    try:
        yield _when_it_answers(f"http://127.0.0.1:{port}/", app)
    finally:
        app.terminate()
        app.wait(timeout=30)


def _when_it_answers(address: str, app: subprocess.Popen[bytes]) -> str:
    direct, end = build_opener(ProxyHandler({})), time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert app.poll() is None, "the app ended"
        try:
            direct.open(address, timeout=5).close()
            return address
        except (URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise TimeoutError(f"{address} does not answer")


@contextmanager
def chromium() -> Iterator[Any]:
    """Return Playwright's browser: its own, or the machine's; ``None``: there is no Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        path = own if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")
        if path is None:
            yield None
            return
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def ask(page: Any, limit_s: float = LIMIT_S, **fields: str) -> str:
    """Fill in fields by their labels, press the button, and return the verdict when it is another one."""
    before = _verdict(page)
    for label, text in fields.items():
        page.get_by_label(label).fill(text)
    page.get_by_role("button", name="Will it fit?").click()
    end = time.monotonic() + limit_s
    while _verdict(page) in ("", before):
        assert time.monotonic() < end, "no answer"
        page.wait_for_timeout(200)
    return _verdict(page)


def _verdict(page: Any) -> str:
    return "".join(page.locator("#verdict h2").all_text_contents())


def main() -> None:
    from PIL import Image

    picture = ROOT / "docs" / "pictures" / "space.png"
    config = (ROOT / "docs" / "command_line" / "llama_2_7b.json").read_text(encoding="utf-8")
    with served() as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 1000})
        page.goto(address)
        print(ask(page, 4 * LIMIT_S, Model=config, Sequence="8k", Budget="64GiB"))
        page.locator("#picture img").wait_for()
        page.wait_for_timeout(1000)  # what was in motion is in its place
        page.screenshot(path=str(picture), full_page=True)
    with Image.open(picture) as shot:
        few = shot.convert("RGB").quantize(128)
    few.save(picture, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    main()
