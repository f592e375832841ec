"""An S3 server of our own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import s3fs


@contextlib.contextmanager
def s3_server():
    """``(url of a bucket, storage options)`` of a server that lives as long as the context."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the S3 server does not start"
                time.sleep(0.05)
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "testing", "secret": "testing"}
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket", options
    finally:
        server.kill()
        server.wait()
