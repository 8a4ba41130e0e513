"""How the command ends: nothing is lost, and torch is not taken apart."""

import os
import subprocess
import sys

SCRIPT = """\
import atexit, concurrent.futures, sys, threading, time
from torchspmd._cli.output import KEPT, leave

class Group:
    def __del__(self):
        print("freed")

def work():
    time.sleep(0.2)
    print("the thread ended")

KEPT.append(Group())
executor = concurrent.futures.ThreadPoolExecutor(1)  # its worker waits for work
executor.submit(print, "the executor worked").result()
atexit.register(print, "the exit handler ran")
threading.Thread(target=work).start()
print("no newline", end="")
leave(7)
"""


def test_threads_handlers_and_text_come_first_and_what_is_kept_is_never_freed():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == (
        "the executor worked\nno newlinethe thread ended\nthe exit handler ran\n"
    )


def test_a_reader_that_went_away_is_no_error():
    script = "from torchspmd._cli.output import leave; print(input()); leave(3)"
    pipe = subprocess.PIPE
    held_back = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=held_back,
    ) as process:
        process.stdout.close()
        process.stdin.write(b"nobody reads this\n")
        process.stdin.close()
        assert process.wait(60) == 3, process.stderr.read().decode()
