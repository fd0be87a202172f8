"""The built site in a headless browser: pages render, search finds, nothing is logged as an error."""

import functools
import http.server
import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
CHROMIUM = ROOT / ".venv" / "chromium"

pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class Browser:
    """A page of a headless browser, driven by Chrome's DevTools protocol."""

    def __init__(self, home):
        # Only `make docs` installs it; the other suites collect this file without it.
        from websocket import create_connection

        flags = ["--headless=shell", "--no-sandbox", "--no-zygote", "--single-process", "--in-process-gpu"]
        flags += ["--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*"]
        environment = os.environ | {"LD_LIBRARY_PATH": str(CHROMIUM / "lib"), "HOME": str(home)}
        command = [CHROMIUM / "chromium", *flags, f"--user-data-dir={home}", "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        port = next(found[1] for line in self.process.stderr if (found := re.search(r"ws://127.0.0.1:(\d+)", line)))
        (page,) = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10))
        self.socket = create_connection(page["webSocketDebuggerUrl"], timeout=20)
        self.sent, self.errors = 0, []
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """The result of a command; errors that the page reports meanwhile are kept."""
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.sent:
                return message["result"]
            entry = message.get("params", {})
            failed = message["method"] == "Runtime.exceptionThrown" or entry.get("type") == "error"
            failed = failed or entry.get("entry", {}).get("level") == "error"
            self.errors += [entry] if failed else []

    def open(self, address):
        self.errors.clear()
        self.call("Page.navigate", url=address)

    def wait_for(self, expression):
        """Until a JavaScript expression is true, for at most ten seconds."""
        end = time.monotonic() + 10
        while not self.call("Runtime.evaluate", expression=f"Boolean({expression})")["result"].get("value"):
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def text(self):
        return self.call("Runtime.evaluate", expression="document.body.innerText")["result"]["value"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("home"))
    yield browser
    browser.process.kill()


@pytest.mark.parametrize(
    "page, words",
    [
        ("", ["flashinfer in Python", "Why, and why not"]),
        ("performance/", ["What is slower than a peer", "ragged prefill 4x4096, causal"]),
        ("rooms/attention/", ["Attention"]),
        ("api/attention/", ["BatchDecodeWithPagedKVCacheWrapper", "Parameters", "kv_layout"]),
        ("api/sampling/", ["top_k_top_p_sampling_from_probs"]),
        ("contributing/", ["Adding a room"]),
    ],
)
def test_page_renders(address, browser, page, words):
    browser.open(f"{address}/{page}")
    # The theme's script sets this class in place of "no-js".
    browser.wait_for("document.readyState == 'complete' && document.documentElement.classList.contains('js')")
    text = browser.text()
    assert [word for word in words if word not in text] == []
    assert browser.errors == []


def test_search_finds(address, browser):
    browser.open(f"{address}/?q=append_paged_kv_cache")
    browser.wait_for("document.querySelector('.md-search-result__item a')")
    found = browser.call("Runtime.evaluate", expression="document.querySelector('.md-search-result__list').innerText")
    assert "append_paged_kv_cache" in found["result"]["value"]
    assert browser.errors == []


def test_every_image_is_there(address):
    for page in SITE.rglob("*.html"):
        for source in re.findall(r'<img[^>]*src="([^":]+)"', page.read_text()):
            target = SITE / source[1:] if source.startswith("/") else page.parent / source
            assert target.exists(), f"{page.relative_to(SITE)} shows {source}"
