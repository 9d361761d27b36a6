"""An S3 server on the loopback, and a bucket in it that a test fills from a folder."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

NAME = "training"


class Bucket:
    """The bucket `NAME` of a server that is this test's own to stop."""

    def __init__(self, server: ThreadedMotoServer) -> None:
        host, port = server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self._server = server
        self._client: Any = boto3.client("s3", endpoint_url=self.endpoint)
        self.create()

    def create(self) -> None:
        """Make the bucket, empty."""
        self._client.create_bucket(Bucket=NAME)

    def put(self, key: str, content: bytes) -> None:
        """Write one object."""
        self._client.put_object(Bucket=NAME, Key=key, Body=content)

    def upload(self, folder: Path, prefix: str = "runs") -> None:
        """Write every file below `folder`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def contents(self, prefix: str = "") -> dict[str, bytes]:
        """The objects whose keys begin so, by the rest of their keys."""
        listed = self._client.list_objects_v2(Bucket=NAME, Prefix=prefix)
        keys = [item["Key"] for item in listed.get("Contents", [])]
        objects = {key: self._client.get_object(Bucket=NAME, Key=key) for key in keys}
        return {key.removeprefix(prefix): found["Body"].read() for key, found in objects.items()}

    def delete(self, prefix: str = "") -> None:
        """Delete the objects whose keys begin so."""
        listed = self._client.list_objects_v2(Bucket=NAME, Prefix=prefix)
        for item in listed.get("Contents", []):
            self._client.delete_object(Bucket=NAME, Key=item["Key"])

    def drop(self) -> None:
        """Delete the bucket and all in it."""
        self.delete()
        self._client.delete_bucket(Bucket=NAME)

    def admit_anybody_for(self, count: str) -> None:
        """Let anybody in for so many requests ("inf": always), then only those whom it knows: none.

        All servers of a process share it.
        """
        header = {"Content-Type": "text/plain"}
        address = f"{self.endpoint}/moto-api/reset-auth"
        urllib.request.urlopen(
            urllib.request.Request(address, count.encode(), headers=header)
        ).close()

    def stop(self) -> None:
        """Stop the server, so that nothing listens there."""
        self._server.stop()
        # It ends the loop; what connects would else wait in the listening socket's queue.
        self._server._server.server_close()  # type: ignore[union-attr]  # started


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """A bucket on a real HTTP server; the environment names its address, keys and a cache."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-a-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    # All servers of a process share what they hold.
    host, port = server.get_host_and_port()
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    made = Bucket(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    server.stop()
