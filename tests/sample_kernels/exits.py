"""Wrong: ends the process."""

import os

DTYPES = ("float32",)


def attention(q, k, v):
    os._exit(0)
