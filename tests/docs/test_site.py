"""The site that `make docs` builds, opened page by page in a browser."""

import json
import queue
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from workspace import ROOT, environment

pytest.importorskip("mkdocs", reason="needs the extra docs")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# Runs before the scripts of a page, and sends what went wrong to the frame around it.
WITNESS = """<script>
const wrong = [];
console.error = (...words) => wrong.push(words.join(" "));
addEventListener("error", (event) => wrong.push(event.message || event.target.outerHTML), true);
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
addEventListener("load", () => setTimeout(() => parent.postMessage({
  wrong,
  title: document.querySelector("h1").textContent,
  formulas: document.querySelectorAll("math").length,
  others: performance.getEntriesByType("resource").map((entry) => entry.name)
    .filter((name) => new URL(name).origin !== location.origin) }), 100));
</script>"""
VISITOR = """<iframe></iframe><script>
const pages = PAGES, seen = {}, frame = document.querySelector("iframe");
const next = () => pages.length ? (frame.src = pages[0])
  : fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
addEventListener("message", (event) => { seen[pages.shift()] = event.data; next(); });
next();
</script>"""


class Site(SimpleHTTPRequestHandler):
    """Serves the pages, and takes what the browser saw of them."""

    def __init__(self, *args, seen, **kwargs):
        self.seen = seen
        super().__init__(*args, **kwargs)

    def do_POST(self):
        self.seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a link that leads nowhere would have stopped the build."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_option_and_class_is_in_the_reference(site):
    text = (site / "reference" / "rloo" / "index.html").read_text(encoding="utf-8")
    for name in ("num_generations", "normalize_advantages", "vllm_mode", "weight_decay"):
        assert f"<td><code>{name}</code></td>" in text
    assert "make_algorithm" in text and "reward_funcs" in text


def test_formulas_are_laid_out_without_a_script(site):
    text = (site / "dpo_trainer" / "index.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text and "$" not in re.sub(r"<code>.*?</code>", "", text)


def test_the_changelog_is_a_page(site):
    text = (site / "changelog" / "index.html").read_text(encoding="utf-8")
    assert "Unreleased" in text and 'href="../peft/#merge-an-adapter"' in text


def test_search_knows_the_options(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {
        entry["location"].split("/#")[0] for entry in index["docs"] if "ld_alpha" in str(entry)
    }
    assert "reference/dpo" in found


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_every_page_opens_in_a_browser(site, tmp_path):
    pages = sorted(p.relative_to(site).parent.as_posix() for p in site.rglob("index.html"))
    for name in pages:
        file = site / name / "index.html"
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("<head>", "<head>" + WITNESS, 1), encoding="utf-8")
    (site / "visit.html").write_text(
        VISITOR.replace("PAGES", json.dumps([f"/{name}/".replace("/./", "/") for name in pages]))
    )
    index = site / "search" / "search_index.json"  # each page has its search begin anew with it
    found = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps(found | {"docs": found["docs"][:20]}), encoding="utf-8")
    seen = queue.Queue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=site, seen=seen)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/visit.html"
        words = [CHROMIUM, *BROWSER, f"--user-data-dir={tmp_path}", address]
        browser = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found = seen.get(timeout=300)
        finally:
            browser.kill()
            server.shutdown()
    assert len(found) == len(pages) > 40
    assert {name: x["wrong"] for name, x in found.items() if x["wrong"]} == {}
    assert {name: x["others"] for name, x in found.items() if x["others"]} == {}
    assert all(x["title"].strip() for x in found.values())
    assert found["/kto_trainer/"]["formulas"] > 5
