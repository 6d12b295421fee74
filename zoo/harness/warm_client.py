"""A stand-in for a command of Python: has it run by the server of `zoo.harness.warm`, or by Python where that cannot.

It is copied to a folder on PATH under the name of the command, and may import the standard library only.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
OTHER_TORCH = "zoo.harness.with_wheels"
"""What runs scripts on other releases, of torch for instance: nothing may have been imported before."""


def main() -> None:
    own = Path(sys.argv[0])
    words = sys.argv[1:] if own.name == "python" else [str(Path(sys.executable).with_name(own.name)), *sys.argv[1:]]
    command = words[1:] if words[:1] == ["-u"] else words
    if not command or (command[0].startswith("-") and command[0] != "-m") or OTHER_TORCH in words:
        os.execv(sys.executable, [sys.executable, *words])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(own.with_name("socket")))
    request = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    status = int(connection.recv(16) or -signal.SIGKILL)
    if status >= 0:
        os._exit(status)
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)


if __name__ == "__main__":
    main()
