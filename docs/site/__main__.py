"""`python -m docs.site [FOLDER]`: build the site, by default into .verify/site, and check it.

Exit codes: 0; 1 if a link leads nowhere or a page is not well formed, with one line for each; 2 for
usage, or documents that make no site.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from docs.site import links
from docs.site.build import ROOT, BuildError, build


def main(words: list[str]) -> int:
    """Build and check; returns the exit code."""
    if len(words) > 1 or any(word.startswith("-") for word in words):
        print("usage: python -m docs.site [FOLDER]")
        return 2
    out = Path(words[0]).resolve() if words else ROOT / ".verify" / "site"
    if out.exists() and not (out / "site.css").is_file() and any(out.iterdir()):
        print(f"docs.site: {out} is no site of this command; name a folder that it may empty")
        return 2
    begun = time.monotonic()
    broken = links.check_markdown(ROOT, list(links.pages_of(ROOT)))
    if not broken:
        try:
            count = build(ROOT, out)
        except BuildError as error:
            print(f"docs.site: {error}")
            return 2
        broken = links.check_site(out)
    for line in broken:
        print(f"docs.site: {line}")
    if broken:
        return 1
    print(f"{out / 'index.html'}: {count} files, {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
