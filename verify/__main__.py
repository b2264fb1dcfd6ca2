"""`python -m verify`: the same as the command `verify`.

It cannot help when the working directory holds a `verify.py` of the user's own: Python then runs
that file instead, and nothing of this package. `python -P -m verify` or the command `verify` do.
"""

from verify.cli import entry

if __name__ == "__main__":
    entry()
