"""Takes registry addresses out of a uv.lock: reads it on stdin, writes it to stdout.

git runs this as the clean filter `hostless` (see README.md beside this file). Versions, hashes
and sizes stay; `source = { registry = "<address>" }` becomes `{ registry = "pypi" }`, and the
`url` of a distribution becomes the `filename` that ends it. Doing it twice changes nothing more.
"""

import re
import sys

REGISTRY = re.compile(r'(source = \{ registry = )"https?://[^"]*"')
URL = re.compile(r'\burl = "https?://[^"]*/([^"/]+)"')


def normalise(lock: str) -> str:
    """Returns the text of a uv.lock with every registry address replaced."""
    return URL.sub(r'filename = "\1"', REGISTRY.sub(r'\1"pypi"', lock))


if __name__ == "__main__":
    sys.stdout.write(normalise(sys.stdin.read()))
