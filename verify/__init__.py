"""attention-verify: decides whether an attention kernel is right, and shows why.

Importing this package imports nothing but the standard library, so that `python -m verify` can set
up its own environment first.
"""

from verify import bundle

__version__ = "0.1.0"

bundle.install()
