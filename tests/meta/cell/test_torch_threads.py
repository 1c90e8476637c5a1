"""Threads of torch that begin at the same time do not end a kernel process."""

from __future__ import annotations

import subprocess
import sys

# A fork server of a campaign was itself forked from a process that has torch, so that torch has
# counted its threads there.  Each thread of autograd, one for each GPU, begins as these do.
FORKS = """
import ctypes, os, threading
import torch
from verify.cell.preloading import preload

def begin(barrier, library):
    barrier.wait()
    library._ZN2at16init_num_threadsEv()

def kernel_process():
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    given = threading.Barrier(4), library
    threads = [threading.Thread(target=begin, args=given) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

torch.get_num_threads()
preload()
ended = []
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        kernel_process()
        os._exit(0)
    ended.append(os.waitpid(pid, 0)[1])
print(ended)
"""


def test_threads_of_autograd_that_begin_together() -> None:
    """Without the mend of `preload`, 9 of 10 of these processes abort on two cores."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[0] * 20}\n", done.stderr
