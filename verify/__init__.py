"""attention-verify: decides whether an attention kernel is right, and shows why.

Importing this package imports nothing else, so that `python -m verify` can set up its own environment first.
"""

__version__ = "0.1.0"
