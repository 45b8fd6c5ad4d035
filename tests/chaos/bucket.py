"""Mock S3 server (moto's) in another process, which can be made to fail."""

import http.client
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

NAME = "runs"
MODES = ("normal", "errors", "cut", "stall", "full")
"""Modes: errors answers 503 to all requests; cut closes connections within uploads; stall does not answer;
full answers writes with 403 QuotaExceeded, as Ceph does."""
_CODES = {"errors": ("503 Slow Down", "SlowDown"), "full": ("403 Forbidden", "QuotaExceeded")}


class Bucket:
    """Bucket s3://runs; the environment of this process, and so of its later children, points to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._mode, self._uploads = context.Value("i", 0, lock=False), context.Value("i", 0, lock=False)
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=self._serve, args=(sender,), daemon=True)
        self._process.start()
        port = receiver.recv()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{NAME}")
        connection.getresponse().read()

    def set_mode(self, mode: str) -> None:
        """Switch to a mode of MODES."""
        self._mode.value = MODES.index(mode)

    @property
    def uploads(self) -> int:
        """Number of writes that have begun."""
        return int(self._uploads.value)

    def close(self) -> None:
        """Stop the server; its content is lost."""
        self._process.kill()
        self._process.join()

    def _serve(self, sender: Any) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, 2)
        moto = DomainDispatcherApplication(create_backend_app)

        def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            writes = environ["REQUEST_METHOD"] in ("PUT", "POST") and "delete" not in environ["QUERY_STRING"]
            self._uploads.value += writes
            while (mode := MODES[self._mode.value]) == "stall":
                time.sleep(0.02)
            size = int(environ.get("CONTENT_LENGTH") or 0)
            if mode == "cut" and writes:
                environ["wsgi.input"].read(size // 2)
                environ["werkzeug.socket"].shutdown(2)
                return []
            if mode == "errors" or (mode == "full" and writes):
                status, code = _CODES[mode]
                environ["wsgi.input"].read(size)
                start(status, [("Content-Type", "application/xml")])
                return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]
            answer: Iterable[bytes] = moto(environ, start)
            return answer

        server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
        sender.send(server.server_port)
        server.serve_forever()
