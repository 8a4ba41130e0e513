"""Signals that end a process, in scripts that handle them."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import signal, time, torch
{before}
layer = torch.nn.Linear(4, 4).cuda()
try:
    print("started", flush=True)
    while True:
        layer(torch.ones(4, 4, device="cuda"))
        time.sleep(0.01)
except {caught}:
    print("caught")
"""
HANDLERS = """
def keep(*args): pass
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, keep)
    assert signal.getsignal(number) is keep
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize(
    ("before", "caught"), [(HANDLERS, "ValueError"), ("", "BaseException")]
)
def test_a_script_cannot_keep_a_rehearsal_from_ending(
    tmp_path, number, code, before, caught
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(before=before, caught=caught))
    command = [sys.executable, "-m", "torchspmd", "predict", str(script)]
    with subprocess.Popen(
        [*command, "--gpu", "h100"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert "started" in iter(process.stdout.readline, "").__next__()
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()


def test_handlers_are_noted_and_others_work(rehearse):
    def keep(*args):
        seen.append(args)

    seen, before = [], signal.getsignal(signal.SIGTERM)
    with rehearse() as recording:
        assert signal.signal(signal.SIGTERM, keep) is before
        assert signal.signal(signal.SIGTERM, before) is keep
        other = signal.signal(signal.SIGUSR1, keep)
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, other)
    assert len(seen) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    (note,) = [each for each in recording.notes if "SIG" in each]
    assert "test_signals.py" in note
    assert note.endswith("handles SIGTERM: skipped, it ends the rehearsal.")
