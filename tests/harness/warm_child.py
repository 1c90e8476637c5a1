"""A server with torch imported, which forks the program that a sanitizer starts.

Each program under a tool imports torch, which takes more than a second of CPU time.  The paper tool
of test_sanitizer_run.py lets this server fork one instead. `python -m tests.harness.warm_child
SOCKET` listens on a Unix socket; a request is a JSON list (command line, environment, directory)
and the descriptors of standard output and error; the answer is the exit code, negative for a
signal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback

from verify.sanitizers import child


def serve(path: str) -> None:
    """Fork a program for each connection until this process is killed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of children is not needed
    while True:
        peer, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(peer)
            os._exit(0)
        peer.close()


def _attend(peer: socket.socket) -> None:
    """Run one program to its end."""
    request, fds, _, _ = socket.recv_fds(peer, 1 << 20, 2)
    words, environment, folder = json.loads(request)
    assert words[1:3] == ["-m", child.__name__]
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        peer.send(str(os.waitstatus_to_exitcode(status)).encode())
        return
    try:
        peer.close()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        sys.argv = [child.__file__, *words[3:]]
        child.main()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
