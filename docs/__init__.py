"""The documents, and `docs.site`, which makes a site of them; no part of the wheel."""
