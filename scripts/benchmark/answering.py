"""A contender's side of a comparison: requests and answers as lines of JSON on standard input and output.

Runs under any Python, since peers live in an environment of their own.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

Request = Any
Serve = Callable[[dict[str, Any], Iterator[Request]], Iterator[dict[str, Any]]]


def answer(serve: Serve) -> None:
    """Give `serve` the first request and an iterator over the others, and send what it yields: one answer each."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # a library that prints does not answer
    spec = json.loads(sys.stdin.readline())
    try:
        for found in serve(spec, map(json.loads, sys.stdin)):
            print(json.dumps(found), file=answers, flush=True)
    except ImportError as error:
        sys.exit(f"{spec['peer']}: {error} ({sys.executable})")
