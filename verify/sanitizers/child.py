"""The program inside the tool: one life of a cell, neither forked nor in an arena.

`python -m verify.sanitizers.child SOCKET` connects to the judge's socket and answers like any other
life, but that every run gets allocations of its own (`verify.cell.isolated_buffers`), and that each
case is over, copies and all, before the next begins.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
from typing import Any, cast

import torch
from torch import Tensor

from verify.cell.arena import slots_from
from verify.cell.child import Life, preload
from verify.cell.isolated_buffers import Separate
from verify.cell.launching import launch


class SeparateLife(Life):
    """A life whose buffers are allocations of their own."""

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        variant = self.variants[message["variant"]]
        device = message["device"]
        separate = Separate(slots_from(message["slots"]), self.host, device)
        try:
            # It answers what a run asks of the arena's bytes: their device, and slices of them.
            launch(variant, message, cast(Tensor, separate))
        finally:
            try:
                if device == "cuda":
                    torch.cuda.synchronize()
                separate.restore()
            except RuntimeError:
                self.poisoned = True
                raise
        return {}


def main() -> None:
    """Serve on the Unix socket whose path is argv[1]."""
    faulthandler.enable()
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(sys.argv[1])
    preload()
    SeparateLife(peer).serve()


if __name__ == "__main__":
    main()
