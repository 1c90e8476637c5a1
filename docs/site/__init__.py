"""The site of the documents: pages of HTML that open offline, and a check of every link.

`python -m docs.site` builds it.  It needs markdown-it-py and Pygments, the dependency group `docs`,
and nothing of the judge.
"""
