"""moto's S3 server with a look at each request, and one that counts the bytes of each object that cross the
network."""

import os
import urllib.request
from contextlib import contextmanager

from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class ObservedS3(ThreadedMotoServer):
    """moto's server on a free port of this machine, each of whose requests passes `answer`."""

    def __init__(self):
        super().__init__(ip_address="127.0.0.1", port=0, verbose=False)

    def answer(self, moto, environ, start):
        """Return the response to a request; `moto` is the application that makes it."""
        return moto(environ, start)

    def _server_entry(self):
        moto = DomainDispatcherApplication(create_backend_app)

        def application(environ, start):
            return self.answer(moto, environ, start)

        self._server = make_server(
            self._ip_address, self._port, application, True, request_handler=MotoRequestHandler
        )
        self._server_ready_event.set()
        self._server.serve_forever()


@contextmanager
def served(storage, bucket):
    """Serve a bucket by `storage`, an ObservedS3; yield its client and the variables by which processes reach
    it."""
    import boto3
    from botocore.config import Config

    storage.start()
    host, port = storage.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    settings = {f"AWS_{name}": value for name, value in keys.items()} | {"AWS_ENDPOINT_URL": address}
    settings |= {f"FLYTE_AWS_{name}": value for name, value in keys.items()} | {"FLYTE_AWS_ENDPOINT": address}
    signed = {"region_name": "us-east-1", "config": Config(signature_version="s3v4")}
    s3 = boto3.client("s3", endpoint_url=address, aws_access_key_id="a", aws_secret_access_key="b", **signed)
    try:
        s3.create_bucket(Bucket=bucket)
        yield s3, settings
    finally:
        # moto's storage belongs to the process and outlives the server.
        urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")).close()
        s3.close()
        storage.stop()


class CountedS3(ObservedS3):
    """Server that adds up the bytes of the objects' contents, sent and received, in `traffic` by their
    paths."""

    def __init__(self):
        super().__init__()
        self.traffic = {}

    def answer(self, moto, environ, start):
        """Count the body of the request and that of the response."""
        path = environ["PATH_INFO"]
        received = (
            int(environ.get("CONTENT_LENGTH") or 0) if environ["REQUEST_METHOD"] in ("PUT", "POST") else 0
        )
        self.traffic[path] = self.traffic.get(path, 0) + received
        for chunk in moto(environ, start):
            if environ["REQUEST_METHOD"] == "GET":
                self.traffic[path] += len(chunk)
            yield chunk

    def bytes_of(self, suffix):
        """Return the bytes of all objects whose names end so."""
        return sum(count for path, count in self.traffic.items() if path.endswith(suffix))


@contextmanager
def counted_bucket(name="models"):
    """Serve a bucket on this machine, with its address and credentials in the environment; yield the
    server."""
    import s3fs

    from tasks.runtime.termination import close_file_systems

    before = dict(os.environ)
    with served(server := CountedS3(), name) as (_, settings):
        os.environ.update(settings, AWS_DEFAULT_REGION="us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield server
        finally:
            close_file_systems()
            os.environ.clear()
            os.environ.update(before)
