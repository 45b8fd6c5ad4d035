"""Base of the HTTP handlers of mock hubs, and a process that looks at one."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Handler that answers with JSON or bytes, and writes no log."""

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Write no log."""


def look_at(monkeypatch: Any, address: str, cache: Path) -> None:
    """Let huggingface_hub of this process use a hub, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
