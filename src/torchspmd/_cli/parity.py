"""``torchspmd parity``: compare two recordings of a training run."""

import argparse
import json
from dataclasses import asdict

from torchspmd.verify import compare_recordings


def run(options: argparse.Namespace) -> int:
    """Compare, print, and tell by the exit code whether they agree."""
    verdict = compare_recordings(
        options.reference,
        options.other,
        tolerance="bitwise" if options.bitwise else options.tolerance,
        without_grad=options.without_grad,
    )
    print(json.dumps(asdict(verdict), indent=1) if options.json else verdict)
    return 0 if verdict else 1
