"""How the command ends, and output that nobody reads any more: nothing is lost."""

import atexit
import concurrent.futures
import sys
import threading
import time

import pytest
from processes import run_forked

from torchspmd._cli import command
from torchspmd._cli.process import NEVER_FREED, exit_process
from torchspmd.comm import CommEvent, Group, Kind, Ledger, save_ledger

pytestmark = pytest.mark.forks

TRAIN = """\
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(4)).sum().backward()
optimizer.step()
print("the script's own line", flush=True)
"""


class Freed:
    def __del__(self):
        print("freed")


def end_with_work_left():
    def work():
        time.sleep(0.2)
        print("the thread ended")

    NEVER_FREED.append(Freed())
    executor = concurrent.futures.ThreadPoolExecutor(1)  # its worker waits for work
    executor.submit(print, "the executor worked").result()
    atexit.register(print, "the exit handler ran")
    threading.Thread(target=work).start()
    print("no newline", end="")
    exit_process(7)


def test_threads_handlers_and_text_come_first_and_what_is_kept_is_never_freed(tmp_path):
    done = run_forked(end_with_work_left, folder=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout == (
        "the executor worked\nno newlinethe thread ended\nthe exit handler ran\n"
    )


def end_interrupted():
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("interrupted")
    exit_process(130)


def test_after_an_interruption_no_thread_is_waited_for(tmp_path):
    done = run_forked(end_interrupted, folder=tmp_path, timeout=30)
    assert done.returncode == 130, done.stderr
    assert done.stdout == "interrupted\n"


def print_and_exit():
    print("nobody reads this")
    exit_process(3)


def test_a_reader_that_went_away_is_no_error(tmp_path):
    done = run_forked(print_and_exit, folder=tmp_path, unread=True)
    assert done.returncode == 3, done.stderr


@pytest.fixture
def folder(tmp_path):
    ledger = Ledger()
    save_ledger(ledger, tmp_path / "a.json")
    group = Group("0", (0, 1), "tp")
    ledger.append(CommEvent(Kind.ALL_REDUCE, "op", "float32", (8,), 32, 32, group))
    save_ledger(ledger, tmp_path / "b.json")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run_command(words):
    sys.argv = ["torchspmd", *words]
    command()


@pytest.mark.parametrize(
    ("words", "unbuffered", "code"),
    [
        (["diff", "a.json", "a.json"], False, 0),
        (["diff", "a.json", "b.json", "--json"], True, 1),
        (["plan", "--help"], False, 0),
    ],
)
def test_the_exit_code_is_that_of_a_run_with_a_reader(folder, words, unbuffered, code):
    options = {"folder": folder, "unread": True, "unbuffered": unbuffered}
    done = run_forked(run_command, words, **options)
    assert (done.returncode, done.stderr) == (code, "")


def test_the_script_goes_on_and_the_ledger_is_written(folder):
    words = ["trace", "train.py", "--world-size", "2", "--out", "out.json"]
    done = run_forked(run_command, words, folder=folder, unread=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "tracing train.py as rank 0 of 2 (simulated) ...\n"
    assert (folder / "out.json").exists()
