#!/usr/bin/env python3
"""Runs a command through dsh-execd, with nothing but the standard library. The protocol: docs/protocol.md.

    client.py [--mode MODE] [--workspace DIR] [--socket PATH] COMMAND
"""

import argparse
import base64
import json
import os
import signal
import socket
import struct
import sys

FRAME_LIMIT = 16 * 1024 * 1024


class Daemon:
    """One connection: frames of JSON, each after its length as four bytes, least significant first."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.send({"protocol": {"major": 1, "minor": 0}, "encoding": "json", "client": "client.py"})
        hello = self.receive()
        if "error" in hello:
            raise SystemExit("refused: " + hello["error"]["message"])

    def send(self, message):
        payload = json.dumps(message).encode()
        self.socket.sendall(struct.pack("<I", len(payload)) + payload)

    def receive(self):
        (length,) = struct.unpack("<I", self.exactly(4))
        if length > FRAME_LIMIT:
            raise SystemExit("the daemon sent a frame that is too long")
        return json.loads(self.exactly(length))

    def exactly(self, count):
        data = b""
        while len(data) < count:
            chunk = self.socket.recv(count - len(data))
            if not chunk:
                raise SystemExit("the daemon closed the connection; the fate of the command is unknown")
            data += chunk
        return data

    def run(self, request):
        """Yields every event of a command; the last is `finished` or `error`."""
        self.send({"type": "run", "id": 1, "stream": True, "request": request})
        while True:
            message = self.receive()
            if message.get("id") not in (1, None):
                continue
            yield message
            if message["type"] in ("finished", "error"):
                return


def raw(value):
    """Bytes are text in JSON when they are UTF-8, and an object with `base64` when they are not."""
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])


def text(value):
    """The other way: what the environment has, byte for byte."""
    data = os.fsencode(value)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def usual_socket():
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(runtime, "dsh-execd") if runtime else "/tmp/dsh-execd-%d" % os.getuid()
    return os.path.join(folder, "socket")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="read-only")
    parser.add_argument("--workspace", default=os.getcwd())
    parser.add_argument("--socket", default=usual_socket())
    parser.add_argument("command")
    arguments = parser.parse_args()
    request = {
        "command": arguments.command,
        "ambientEnv": {name: text(value) for name, value in os.environ.items() if name.isascii()},
        "sandboxPolicy": {"mode": arguments.mode, "workspaceRoot": os.path.abspath(arguments.workspace)},
    }
    for event in Daemon(arguments.socket).run(request):
        if event["type"] == "output":
            stream = sys.stdout if event["stream"] == "stdout" else sys.stderr
            stream.buffer.write(raw(event["data"]))
            stream.flush()
        elif event["type"] == "error":
            raise SystemExit("not run: " + event["error"]["message"])
        elif event["type"] == "finished":
            result = event["result"]
            for fact in result["sandbox"].get("denials", []):
                print("refused: %(operation)s %(errno)s" % fact, fact.get("path", ""), file=sys.stderr)
            return 128 + signal.Signals[result["signal"]] if result["signal"] else result["exitCode"]


if __name__ == "__main__":
    sys.exit(main())
