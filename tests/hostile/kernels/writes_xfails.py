"""Declares itself a known defect, at import, in the directory that the judge was started in.

Must: not load: PermissionError
"""

from hostile_base import declare, wrong

with open("xfails.toml", "w", encoding="utf-8") as file:
    file.write('[[xfail]]\ncases = ".*"\nlink = "none"\nexpires = 2099-01-01\n')


def forward(args, out, lse, workspace):
    wrong(args, out, lse)


VARIANT = declare("writes-xfails", forward)
