"""Wrong: does not import."""

import no_such_package  # noqa: F401
