"""A real S3 server in a process of its own, which verifies signatures, behind a connection that can be cut."""

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from s3fs import S3FileSystem

BUCKET = "runs"
_KEYS = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nobody", "region_name": "us-east-1"}


class S3Server:
    """An S3 server of moto with one user and one bucket.

    Attributes:
        environment: variables with which boto3, and so s3fs, finds the server and the user's keys.
    """

    def __init__(self, log: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._cable = _Cable(("127.0.0.1", port))
        # Requests before the user exists are let through; all others must be signed with its keys.
        environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with open(log, "w") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _wait_until_it_listens(port)
        direct = f"http://127.0.0.1:{port}"
        keys = _make_user(direct)
        boto3.client("s3", endpoint_url=direct, region_name="us-east-1", **keys).create_bucket(Bucket=BUCKET)
        self.environment = {
            "AWS_ENDPOINT_URL": self._cable.url,
            "AWS_ACCESS_KEY_ID": keys["aws_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": keys["aws_secret_access_key"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def cut_at_upload(self, number: int | None) -> None:
        """Cut the connection at the upload of this number, counted from 1, and for all that follows; None mends it."""
        self._cable.uploads_left, self._cable.is_cut = number, False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._cable.shutdown()
        self._cable.server_close()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server that this process, and those that it starts, use for ``s3://…``."""
    server = S3Server(folder / "s3.log")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        patch.setattr(S3FileSystem, "retries", 1)
        forget_connections()
        try:
            yield server
        finally:
            server.close()
            forget_connections()


def forget_connections() -> None:
    """Have s3fs read the environment again."""
    S3FileSystem.clear_instance_cache()


def _make_user(url: str) -> dict[str, str]:
    iam = boto3.client("iam", endpoint_url=url, **_KEYS)
    iam.create_user(UserName="trainer")
    allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=json.dumps(allowed))
    key = iam.create_access_key(UserName="trainer")["AccessKey"]
    return {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}


def _wait_until_it_listens(port: int, patience_s: float = 60) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the S3 server does not start"
            time.sleep(0.05)


class _Cable(socketserver.ThreadingTCPServer):
    """Forwards connections to the server, until it is cut."""

    daemon_threads = True
    uploads_left: int | None = None
    is_cut = False

    def __init__(self, server: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.server = server
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._counting = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def lets_through(self, data: bytes) -> bool:
        with self._counting:
            if data.startswith(b"PUT ") and self.uploads_left is not None:
                self.uploads_left -= 1
                self.is_cut = self.is_cut or self.uploads_left == 0
            return not self.is_cut


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            with socket.create_connection(self.server.server) as server:
                threading.Thread(target=_forward, args=[server, self.request], daemon=True).start()
                while (data := self.request.recv(2**16)) and self.server.lets_through(data):
                    server.sendall(data)
        except OSError:
            pass  # the server was killed, or the client: the other side sees a closed connection


def _forward(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
