"""`report --open`: serves a page and its trace to the browser on this machine, and nothing else to anybody."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import webbrowser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urljoin

from profiler_wrapper.trace.run_directory import href

_OUR_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")  # any port: it may be forwarded (ssh -L)
# Nothing is kept, embedded elsewhere or guessed at, and no other page is told the address.
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """Has its port as soon as it is made; `files` are what it serves, by their paths in addresses.

    Raises:
        OSError: the port is taken, or not allowed.
    """

    def __init__(self, port: int | None = None) -> None:
        self.files: dict[str, Path] = {}
        try:
            super().__init__(("127.0.0.1", port or 0), _Answer)
        except OSError as error:
            advice = "Give another --port, or none: then a free one is taken."
            raise OSError(f"--port {port} on 127.0.0.1: {error.strerror}. {advice}") from error

    def add(self, page: Path, trace: Path | None) -> str:
        """The address of the page; whoever does not know it finds nothing. The page's own link leads to the trace."""
        link = "" if trace is None else href(trace, page=page)
        folders = "page/" * link.split("/").count("..")  # so that no link leads out of what the token guards
        address = f"/{secrets.token_urlsafe(16)}/{folders}report.html"
        self.files[address] = page
        if trace is not None:
            self.files[urljoin(address, link)] = trace
        return f"http://127.0.0.1:{self.server_port}{address}"

    def show(self, address: str) -> None:
        """Open the browser, and serve until Ctrl-C."""
        # A browser of the terminal returns when it is left.
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with suppress(KeyboardInterrupt):
            self.serve_forever()

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has gone is no error of ours."""


class _Answer(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "profiler-wrapper", ""

    def parse_request(self) -> bool:
        """Refuses other methods, and names that others have let lead to this machine (DNS rebinding)."""
        if not super().parse_request():
            return False
        allowed = self.command == "GET" and _OUR_HOSTS.fullmatch(self.headers.get("Host", "")) is not None
        if not allowed:
            self.send_error(403)
        return allowed

    def do_GET(self) -> None:
        try:
            file = self.server.files[self.path].open("rb")
        except (KeyError, OSError):
            self.send_error(404)
            return
        with file:
            self.send_response(200)
            is_page = self.path.endswith("/report.html")
            self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal has the address."""
