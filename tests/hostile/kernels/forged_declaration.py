"""Answers for its file before it is loaded: a declaration with more roundings than one can hold.

Must: not load: scale_roundings
"""

import time

from hostile_base import answer, declare, wrong


def widened(x):
    if isinstance(x, dict):
        return {key: 10**6 if key == "scale_roundings" else widened(y) for key, y in x.items()}
    return [widened(y) for y in x] if isinstance(x, list | tuple) else x


VARIANT = declare("forged-declaration", wrong)
told = {"undeclared": False, "interpreted": False, "twins": []}
answer({"status": "ok", "variants": [widened(VARIANT.describe() | told)], "sources": []})
time.sleep(100)
