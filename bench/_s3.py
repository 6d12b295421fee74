"""A local S3 server (moto) on which some requests fail or are slow; it counts what it serves.

python -m bench._s3 PORT SHARE: this share of requests fails with 503, and as many take half a second. `/_served` tells
the bytes of objects that range requests got, and how many requests failed.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

BUCKET = "traces"


class Faulty:
    """A WSGI application with faults."""

    def __init__(self, application: Any, share: float) -> None:
        self._application, self._share = application, share
        self._chance = random.Random(0)
        self._served = {"bytes": 0, "failed": 0, "requests": 0}

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_served":
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._served).encode()]
        self._served["requests"] += 1
        drawn = self._chance.random()
        if drawn < self._share:
            self._served["failed"] += 1
            start("503 Slow Down", [("Content-Type", "text/plain"), ("Content-Length", "0")])
            return [b""]
        if drawn < 2 * self._share:
            time.sleep(0.5)
        body = b"".join(self._application(environ, start))
        if environ["REQUEST_METHOD"] == "GET" and environ.get("HTTP_RANGE"):
            self._served["bytes"] += len(body)
        return [body]


@contextmanager
def s3(share: float = 0.0) -> Iterator[str]:
    """A server with an empty bucket, in a process of its own; the address at which it is, set for this process too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    known = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(known)
    command = [sys.executable, "-m", "bench._s3", str(port), str(share)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(address)
        yield address
    finally:
        server.kill()
        server.wait()
        for name in known:
            os.environ.pop(name)


def served(address: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{address}/_served", timeout=10) as answer:
        found: dict[str, int] = json.load(answer)
        return found


def _wait(address: str) -> None:
    for _ in range(600):
        try:
            served(address)
        except OSError:
            time.sleep(0.1)
        else:
            request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
            for _ in range(5):
                try:
                    urllib.request.urlopen(request, timeout=10).close()
                except OSError:
                    continue
                return
    raise TimeoutError("the server did not start")


def main(port: int, share: float) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", port, Faulty(application, share), threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
