"""Run the GPU tests without pytest: ``PYTHONPATH=src python tests/gpu/run.py [words]``.

Every ``test_*`` function of every ``test_*.py`` beside this file, or those whose file and
name contain one of the words; exit code 1 on a failure.
"""

import importlib
import sys
import time
import traceback
from pathlib import Path


def main() -> int:
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    passed = failed = 0
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name in sorted(vars(module)):
            words = sys.argv[1:] or [""]
            wanted = any(word in f"{path.stem}.{name}" for word in words)
            if not name.startswith("test_") or not wanted:
                continue
            start = time.perf_counter()
            try:
                getattr(module, name)()
            except BaseException:
                failed += 1
                traceback.print_exc()
                verdict = "FAILED"
            else:
                passed += 1
                verdict = "ok"
            print(
                f"{path.stem}.{name}: {verdict} ({time.perf_counter() - start:.1f} s)"
            )
            sys.stdout.flush()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
