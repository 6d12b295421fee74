"""A Python that starts at once: it asks the server to fork one that has imported torch, and ends as that one ends.

It imports the standard library only. `python client.py SOCKET SCRIPT ARGUMENTS` runs a script; the words `ttrace` and
`torchrun` stand for these commands.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence


def ask(
    address: str, words: Sequence[str], folder: str, environment: Mapping[str, str], files: Sequence[int]
) -> socket.socket:
    """Start a process with these files as its standard input, output and error; the answer is its status."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    request = json.dumps([words, folder, dict(environment), os.getpid()]).encode()
    socket.send_fds(server, [struct.pack("!I", len(request))], files)
    server.sendall(request)
    return server


def read_status(server: socket.socket) -> int:
    """Wait for the end of the process; return its status, negative for a signal."""
    received = b""
    while len(received) < 4 and (part := server.recv(4 - len(received))):
        received += part
    return struct.unpack("!i", received)[0] if len(received) == 4 else -signal.SIGKILL


def main() -> None:
    with ask(sys.argv[1], sys.argv[2:], str(os.getcwd()), os.environ, (0, 1, 2)) as server:  # noqa: PTH109
        status = read_status(server)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
