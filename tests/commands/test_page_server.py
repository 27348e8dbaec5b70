"""`profiler-wrapper report --open`: who can read what, where from, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, urljoin, urlsplit
from urllib.request import Request, urlopen

import pytest

from browser import Browser
from page_files import trace_href
from profiler_wrapper.__main__ import main
from profiler_wrapper.commands.page_server import PageServer
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.trace.run_directory import href
from recordings import Trace
from sample_results import llama


def recorded(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Trace().mark(".", 0, 90_000).op("aten::mm", 2000, 52_000).write(path)


@contextmanager
def serving(page: Path, trace: Path | None) -> Iterator[str]:
    """The address."""
    with PageServer() as server:
        address = server.add(page, trace)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a page that says so; beside it lie its trace and a secret."""
    (tmp_path / "report.html").write_text("the page")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a b.json").write_bytes(b"the trace")
    with serving(tmp_path / "report.html", tmp_path / "run" / "a b.json") as found:
        yield found


def asked(address: str, path: str | None = None, *, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    """Status and body for exactly that path, which urllib would tidy up."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.netloc, timeout=30)
    connection.putrequest(method, where.path if path is None else path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    with connection.getresponse() as answer:
        return answer.status, answer.read()


def test_page_and_trace_are_served_as_they_are(address: str) -> None:
    with urlopen(address, timeout=30) as answer:
        assert (answer.read(), answer.headers["Content-Type"]) == (b"the page", "text/html; charset=utf-8")
        kept = set(answer.headers)
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert not {name for name in kept if name.startswith(("Access-Control", "Cross-Origin-Opener"))}
    with urlopen(urljoin(address, "run/a%20b.json"), timeout=30) as answer:
        assert (answer.read(), answer.headers["Content-Length"]) == (b"the trace", "9")


def test_each_page_has_a_token_of_its_own(tmp_path: Path) -> None:
    with PageServer() as server:
        tokens = {urlsplit(server.add(tmp_path / "report.html", None)).path.split("/")[1] for _ in range(9)}
    assert len(tokens) == 9
    assert min(map(len, tokens)) >= 22  # 128 bits


def test_nothing_else_can_be_read(address: str) -> None:
    path = urlsplit(address).path
    token = path.split("/")[1]
    for other in (
        "/", "/report.html", f"/{token}", f"/{token}/", f"/{token}/secret.txt", f"/{token[:-1]}/report.html",
        f"/{token}/run/../secret.txt", f"/{token}/../secret.txt", f"/{token}/..%2fsecret.txt",
        f"/{token}/%2e%2e/secret.txt", f"/{token}/run/..%5c..%5csecret.txt", f"/{token}//etc/passwd", "//etc/passwd",
        "/../../../../etc/passwd", f"/{token}/report.html%00", f"/{token}/report.html/", f"{path}?x", "/favicon.ico",
        address, "*",
    ):  # fmt: skip
        status, body = asked(address, other)
        assert status == 404, other
        assert b"secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "NOSUCH"])
def test_pages_are_only_read(method: str, address: str) -> None:
    assert asked(address, method=method)[0] == 403


def test_other_names_of_this_machine_lead_nowhere(address: str) -> None:
    port = urlsplit(address).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9000", "127.0.0.1"):
        assert asked(address, host=host) == (200, b"the page")
    for host in (f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"localhost.evil:{port}", "0.0.0.0", ""):
        assert asked(address, host=host)[0] == 403, host


def test_only_this_machine_is_listened_to(tmp_path: Path) -> None:
    with PageServer() as server:
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("page", ["run/report.html", "report.html", "here/there/page.html", "run/rank0/p.html"])
def test_the_link_of_the_page_leads_to_its_trace_wherever_both_are(page: str, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run" / "rank0" / "ünd x.json")
    (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / page).write_text("the page")
    with serving(tmp_path / page, trace) as address:
        token = urlsplit(address).path.split("/")[1]
        at = urljoin(address, href(trace, page=tmp_path / page))
        assert urlsplit(at).path.startswith(f"/{token}/")
        with urlopen(at, timeout=30) as answer:
            assert answer.read() == trace.read_bytes()


def test_what_was_removed_is_not_there(address: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").unlink()
    with pytest.raises(HTTPError, match="404"):
        urlopen(Request(address), timeout=30)


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the browser was asked to open, which is not served: Ctrl-C comes at once."""
    addresses: list[str] = []

    def show(server: PageServer, address: str) -> None:
        addresses.append(address)

    monkeypatch.setattr(PageServer, "show", show)
    return addresses


def test_the_page_is_made_and_its_address_said(
    tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = recorded(tmp_path / "x.json")
    assert main(["report", str(trace), "--open"]) == 0
    page = tmp_path / "x_report.html"
    assert capsys.readouterr().out == f"{page}\n{opened[0]} (Ctrl-C ends it)\n"
    assert trace_href(page) == "x.json"
    assert main(["report", str(trace), "--open", "--force", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(page), "trace": str(trace), "address": opened[1]}


@pytest.mark.parametrize("given", ["x_trace.json", "."])
def test_a_page_that_is_there_is_shown_as_it_is(
    given: str, tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "x_trace.json")
    page = tmp_path / ("report.html" if given == "." else "x_trace_report.html")
    page.write_text("mine")
    assert main(["report", str(tmp_path / given), "--open"]) == 0
    assert page.read_text() == "mine"
    assert capsys.readouterr().err == f"{page} is there already, and is shown as it is; --force makes it anew\n"
    assert len(opened) == 1


def test_a_page_to_share_is_served_without_its_trace(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Path | None] = []
    add = PageServer.add

    def noted(server: PageServer, page: Path, trace: Path | None) -> str:
        served.append(trace)
        return add(server, page, trace)

    monkeypatch.setattr(PageServer, "add", noted)
    trace = recorded(tmp_path / "x.json")
    for how in ([], ["--share"], ["--share"]):
        assert main(["report", str(trace), "--open", *how]) == 0
    assert served == [trace, None, None]


def test_a_port_that_is_taken_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = recorded(tmp_path / "x.json")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["report", str(trace), "--open", "--port", str(port)]) == 1
    said = f"error: --port {port} on 127.0.0.1: Address already in use. Give another --port, or none: "
    assert capsys.readouterr().err.startswith(said)
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("how", [["--port", "8000"], ["--open", "--port", "0"], ["--open", "--port", "70000"]])
def test_a_port_that_means_nothing_is_wrong_use(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(recorded(tmp_path / "x.json")), *how]) == 2
    assert "give a number from 1 to 65535, beside --open" in capsys.readouterr().err


def test_a_port_can_be_given(tmp_path: Path, opened: list[str]) -> None:
    with PageServer() as free:
        port = free.server_port
    assert main(["report", str(recorded(tmp_path / "x.json")), "--open", "--port", str(port)]) == 0
    assert opened[0].startswith(f"http://127.0.0.1:{port}/")


def test_ctrl_c_ends_it_and_nothing_but_the_address_is_said(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "x.json")
    # Whoever started these tests in the background had SIGINT ignored.
    program = (
        "import signal, sys; from profiler_wrapper.__main__ import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "report", str(trace), "--open"]
    environment = {**os.environ, "BROWSER": "true"}  # a program that opens nothing
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    ) as running:
        try:
            assert running.stdout is not None and running.stderr is not None
            assert running.stdout.readline() == f"{tmp_path / 'x_report.html'}\n"
            address = running.stdout.readline().removesuffix(" (Ctrl-C ends it)\n")
            with urlopen(address, timeout=30) as answer:
                assert answer.read() == (tmp_path / "x_report.html").read_bytes()
            assert asked(address, "/")[0] == 404
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=30) == 0
            assert (running.stdout.read(), running.stderr.read()) == ("", "")
        finally:
            running.kill()


def test_the_browser_is_opened_while_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("the page")
    read: list[bytes] = []

    def browse(at: str) -> bool:  # as a browser of the terminal: returns when it is left
        with urlopen(at, timeout=30) as answer:
            read.append(answer.read())
        signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr(webbrowser, "open", browse)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with PageServer() as server:
            server.show(server.add(tmp_path / "report.html", None))
    finally:
        signal.signal(signal.SIGINT, before)
    assert read == [b"the page"]


# ---- Perfetto, of which a stub takes what the page hands over ------------------------------------

STUB = b"""<!doctype html><script>
addEventListener("message", async event => {
  if (event.data === "PING") return event.source.postMessage("PONG", event.origin);
  const { buffer, title, fileName } = event.data.perfetto;
  await fetch("/?" + new URLSearchParams({ title, fileName, from: event.origin }), { method: "POST", body: buffer });
});
</script>"""


class Perfetto(ThreadingHTTPServer):
    """Another origin, with a page that answers PING and sends here what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Stub)
        self.got: list[tuple[str, bytes]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A window that was closed."""


class _Stub(BaseHTTPRequestHandler):
    server: Perfetto

    def do_GET(self) -> None:
        self._answer(STUB)

    def do_POST(self) -> None:
        self.server.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def perfetto() -> Iterator[Perfetto]:
    with Perfetto() as stub:
        thread = threading.Thread(target=stub.serve_forever, args=(0.01,))
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


OPEN = "#perfetto"
STATUS = "#whole-trace [role=status]"


@pytest.mark.full
def test_a_served_page_hands_its_trace_to_perfetto(browser: Browser, perfetto: Perfetto, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "rank0" / "mine é.json")
    page_path = tmp_path / "report.html"
    write_page(llama(2), page_path, title="Mine & <b>", trace_href=href(trace, page=page_path))
    stub = f"http://127.0.0.1:{perfetto.server_port}"
    with serving(page_path, trace) as address:
        page = browser.open(address, address="run")
        page.wait("document.documentElement.dataset.ready")
        assert "report --open" not in page.text("#whole-trace")
        page.evaluate(f"perfetto.origin = '{stub}'")
        page.click(OPEN)
        page.wait(f"document.querySelector('{STATUS}').textContent.includes('Handed over')")
        page.evaluate("new Promise(done => setTimeout(done, 300))")
        ours = address.removesuffix(urlsplit(address).path)
        assert page.requests == [urljoin(address, href(trace, page=page_path))]
        assert page.problems == []
        page.close()
    ((told, body),) = perfetto.got
    assert body == trace.read_bytes()
    assert parse_qs(urlsplit(told).query) == {"title": ["Mine & <b>"], "fileName": ["mine é.json"], "from": [ours]}


@pytest.mark.full
def test_a_trace_that_cannot_be_read_is_said_and_nothing_is_handed_over(
    browser: Browser, perfetto: Perfetto, tmp_path: Path
) -> None:
    page_path = tmp_path / "report.html"
    write_page(llama(2), page_path, trace_href="gone.json")
    with serving(page_path, tmp_path / "gone.json") as address:
        page = browser.open(address, address="run")
        page.wait("document.documentElement.dataset.ready")
        page.evaluate(f"perfetto.origin = 'http://127.0.0.1:{perfetto.server_port}'")
        page.click(OPEN)
        page.wait(f"document.querySelector('{STATUS}').textContent.includes('cannot be read (404)')")
        page.wait(f"!document.querySelector('{OPEN}').disabled")
        page.close()
    assert perfetto.got == []


@pytest.mark.full
def test_a_page_on_a_disk_says_what_to_drop_where(browser: Browser, perfetto: Perfetto, tmp_path: Path) -> None:
    trace = recorded(tmp_path / "rank0" / "mine é.json")
    page_path = tmp_path / "report.html"
    write_page(llama(2), page_path, trace_href=href(trace, page=page_path))
    page = browser.open(page_path, address="run")
    page.wait("document.documentElement.dataset.ready")
    assert "report --open" in page.text("#whole-trace")
    page.evaluate(f"perfetto.origin = 'http://127.0.0.1:{perfetto.server_port}'")
    page.click(OPEN)
    page.wait(f"document.querySelector('{STATUS}').textContent")
    assert page.text(STATUS).strip() == f"Drop this file there: {trace}"
    assert (page.requests, page.problems, perfetto.got) == ([], [], [])
    page.close()
