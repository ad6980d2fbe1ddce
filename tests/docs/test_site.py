"""The site is built without a warning, loads nothing from elsewhere, and works in a browser."""

import contextlib
import functools
import http.server
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import types
import urllib.parse
from collections.abc import Iterator
from types import ModuleType

import pytest
from mkdocs.exceptions import PluginError

from tests.programs import ROOT

pytestmark = pytest.mark.xdist_group("site")  # one worker, so that the site is built once

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Opens page after page in a frame, and sends what it saw: how many pictures each page has and which did not load, and
# what a search finds.
CHECKS = """<!doctype html><link rel="icon" href="data:,"><iframe width=1300 height=900></iframe><script>
const frame = document.querySelector("iframe");
const open = page => new Promise(done => { frame.onload = () => done(frame.contentDocument); frame.src = page; });
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
async function check() {
  const pages = {};
  for (const page of PAGES) {
    const images = [...(await open(page)).images];
    await Promise.allSettled(images.map(image => image.decode()));
    pages[page] = { pictures: images.length, broken: images.filter(each => !each.naturalWidth).map(each => each.src) };
  }
  const found = await open("/?q=2bw");
  let results = [];
  for (let turn = 0; turn < 100 && !results.length; turn++) {
    await wait(200);
    results = [...found.querySelectorAll(".md-search-result__link")].map(each => each.href);
  }
  await fetch("/seen", { method: "POST", body: JSON.stringify({ pages, results }) });
}
check();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def pages_of(site: pathlib.Path) -> list[str]:
    """The addresses of the site's pages, from its root."""
    return sorted(f"/{file.relative_to(site).parent}/".replace("/./", "/") for file in site.rglob("index.html"))


def test_every_page_of_the_docs_and_every_notebook_is_there(site: pathlib.Path) -> None:
    pages = pages_of(site)
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs").with_suffix("")).removesuffix("index").rstrip("/")
        assert f"/{name}/" in pages
    for notebook in (ROOT / "experiments" / "notebooks").glob("*.ipynb"):
        text = (site / "notebooks" / notebook.stem / "index.html").read_text(encoding="utf-8")
        assert '<div class="language-python' in text  # its cells
        assert text.count("<pre>") > text.count('<div class="language-python')  # and their outputs


def test_pages_load_nothing_from_elsewhere(site: pathlib.Path) -> None:
    for file in site.rglob("*.html"):
        for found in re.finditer(r"<(?:script|img|iframe|source|link)\b[^>]*>", file.read_text(encoding="utf-8")):
            assert not re.search(r"\b(?:src|href)=[\"']?(?:https?:)?//", found[0]), (file, found[0])
    for file in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", file.read_text(encoding="utf-8")), file


def test_the_search_index_has_pages_and_no_source(site: pathlib.Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = {each["location"].partition("#")[0] for each in entries if "2bw" in each["text"]}
    assert {"semantics/", "concepts/"} <= found
    assert not [each for each in entries if re.fullmatch(r"source/.*\.py/", each["location"])]


def test_fields_of_the_config_have_their_comments_in_the_reference(site: pathlib.Path) -> None:
    text = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    assert re.search(r"num_chunks</span></code></td>.*?stages on each pipe rank", text, flags=re.DOTALL)
    assert "_prefix" not in re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)


@pytest.fixture
def hooks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/hooks.py, for a tree of the test's own."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for path in ("docs/deep/page.md", "docs/other.md", "fiddlex/some.py", "README.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# A title\n")
    return module


@pytest.mark.parametrize(
    ("link", "targets"),
    [
        ("[a](../other.md#place)", ["docs/other.md"]),
        ("[a](../../fiddlex/some.py) and [`b`](../../fiddlex)", ["fiddlex/some.py", "fiddlex"]),
        ("![picture](../../README.md)", ["README.md"]),
        ("[a](https://example.org/none.md), [b](#none), [c](mailto:none)", []),
        ("`[a](none.md)`\n\n```\n[b](none.md)\n```\n\n  ~~~~text\n  [c](none.md)\n  ~~~~\n", []),
    ],
)
def test_links(hooks: ModuleType, tmp_path: pathlib.Path, link: str, targets: list[str]) -> None:
    (tmp_path / "docs/deep/page.md").write_text(link)
    assert [*hooks._targets("docs/deep/page.md")] == targets


@pytest.mark.parametrize("link", ["none.md", "../../fiddlex/none.py#L3", "../../../README.md", "other.md"])
def test_a_link_to_nothing_ends_the_build(hooks: ModuleType, tmp_path: pathlib.Path, link: str) -> None:
    (tmp_path / "docs/deep/page.md").write_text(f"Text\n[a]({link})")
    with pytest.raises(PluginError, match=rf"docs/deep/page\.md links to {re.escape(link.partition('#')[0])}, and"):
        [*hooks._targets("docs/deep/page.md")]


@pytest.mark.parametrize(
    "path", ["README.md", "docs/deep/page.md", "experiments/notebooks/a.ipynb", "fiddlex/some.py", "CHANGELOG.md"]
)
def test_each_file_has_one_page(hooks: ModuleType, tmp_path: pathlib.Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    assert hooks._path(hooks._uri(path)) == path


@pytest.mark.parametrize(
    ("repository", "colab"),
    [
        (
            "https://github.com/some/fiddlex/",
            "https://colab.research.google.com/github/some/fiddlex/blob/main/a/b.ipynb",
        ),
        ("https://example.org/github.com/fiddlex", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_notebooks_of_a_repository_on_github_open_in_colab(
    hooks: ModuleType, repository: str | None, colab: str
) -> None:
    text = hooks._where_to_run("a/b.ipynb", types.SimpleNamespace(repo_url=repository))
    assert re.findall(r"\]\((.*)\)", text) == ([colab] if colab else [])


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the page of checks, and keeps the answers that failed and what the checks have seen."""

    server: "_Server"

    def do_GET(self) -> None:
        if self.path != "/checks.html":
            super().do_GET()
            return
        body = CHECKS.replace("PAGES", json.dumps(self.server.pages)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.ended.set()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if int(code) >= 400:
            self.server.failed.append(f"{code} {urllib.parse.unquote(self.path)}")


class _Server(http.server.ThreadingHTTPServer):
    """A server of the site on this machine."""

    def __init__(self, site: pathlib.Path):
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(site)))
        self.pages, self.failed, self.seen, self.ended = pages_of(site), [], {}, threading.Event()


@contextlib.contextmanager
def browser(address: str, folder: pathlib.Path) -> Iterator[None]:
    """Opens an address in Chromium, which resolves no other host and writes the console to `folder/log`."""
    line = [
        str(CHROMIUM),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
        *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr"),
        *("--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", address),
    ]
    with open(folder / "log", "w") as log, subprocess.Popen(line, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium, or Chrome")
def test_a_browser_opens_every_page_and_finds_2bw(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with _Server(site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with browser(f"http://127.0.0.1:{server.server_port}/checks.html", tmp_path):
                assert server.ended.wait(300), (tmp_path / "log").read_text()
        finally:
            server.shutdown()
    assert server.failed == []
    pages = server.seen["pages"]
    assert list(pages) == server.pages
    assert [each["broken"] for each in pages.values() if each["broken"]] == []
    assert pages["/"]["pictures"] >= 1
    assert pages["/concepts/"]["pictures"] >= 3
    assert pages["/notebooks/schedules/"]["pictures"] >= 2
    assert any("/semantics/" in result for result in server.seen["results"])
    console = [line for line in (tmp_path / "log").read_text().splitlines() if "CONSOLE" in line]
    assert console == []
