"""Reports as whole strings, at 80 columns, without colour."""

import io

import pytest
from ledger_strategies import make_event, make_ledger
from rich.console import Console

from torchspmd.comm import Kind, Ledger, Phase, diff_ledgers
from torchspmd.comm.tree import build_tree, fold_alike
from torchspmd.report import format_bytes, print_changes, print_ledger


def event(module, kind=Kind.ALL_REDUCE, phase=Phase.FORWARD, payload=1024, **more):
    return make_event(
        kind, payload, payload * 3 // 2, phase=phase, module=module, **more
    )


def text_of(print_it, *values, width=80):
    out = io.StringIO()
    print_it(*values, Console(file=out, width=width))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def gpt(num_layers=4):
    events = []
    for layer in range(num_layers):
        events.append(event(f"GPT.layers.{layer}.mlp.down"))
        if layer:  # the first layer's input needs no gradient
            events.append(event(f"GPT.layers.{layer}.mlp.up", phase=Phase.BACKWARD))
    return make_ledger(
        *events, event("GPT.head", Kind.ALL_GATHER, payload=4096), event("Global")
    )


LEDGER_TEXT = """\
Communication by module
module               fwd  bwd  own  total   payload  wire/rank
Global                 6    3    1      9  12.0 KiB   18.0 KiB
  GPT                  5    3    0      8  11.0 KiB   16.5 KiB
    layers.0           1    .    0      1  1.00 KiB   1.50 KiB
      mlp              1    .    0      1  1.00 KiB   1.50 KiB
        down           1    .    1      1  1.00 KiB   1.50 KiB
    layers.[1-3] x3    3    3    0      6  6.00 KiB   9.00 KiB
      mlp              3    3    0      6  6.00 KiB   9.00 KiB
        down           3    .    3      3  3.00 KiB   4.50 KiB
        up             .    3    3      3  3.00 KiB   4.50 KiB
    head               1    .    1      1  4.00 KiB   6.00 KiB

Communication by kind
kind        axis  dtype    phase     count   payload  wire/rank
all_reduce  tp    float32  forward       5  5.00 KiB   7.50 KiB
all_reduce  tp    float32  backward      3  3.00 KiB   4.50 KiB
all_gather  tp    float32  forward       1  4.00 KiB   6.00 KiB

"""


def test_ledger_report():
    assert text_of(print_ledger, gpt()) == LEDGER_TEXT


def test_report_fits_80_columns_with_all_phases_and_long_names():
    name = "Model." + ".".join(f"a_rather_long_name_{n}" for n in range(5))
    ledger = make_ledger(*(event(name, phase=phase, payload=2**40) for phase in Phase))
    assert max(map(len, text_of(print_ledger, ledger).splitlines())) <= 80


def test_alike_layers_fold_only_when_everything_inside_is_equal():
    ledger = gpt(6)
    ledger.append(event("GPT.layers.3.mlp.up", Kind.BROADCAST))
    (model,) = fold_alike(build_tree(ledger)).children
    labels = [child.label for child in model.children]
    assert labels == ["layers.0", "layers.[1-2,4-5]", "layers.3", "head"]


def test_parents_include_their_children():
    root = fold_alike(build_tree(gpt()))
    assert root.total.total() == gpt().total()
    (model,) = root.children
    assert len(model.total) == sum(len(child.total) for child in model.children)


def test_what_numbers_do_not_say():
    cause = "aten.mm.default: Shard(0) -> Replicate"
    ledger = make_ledger(
        event("M", implicit=True, cause=cause),
        event("M", implicit=True, cause=cause),
        event("M", check=True),
        max_events=2,
    )
    ledger.note("something could not be seen", 2)
    text = text_of(print_ledger, ledger, width=200)
    assert text.splitlines()[-5:] == [
        "2 of 3 were implicit: DTensor redistributed an operand by itself "
        "(2.00 KiB payload).",
        f"  2 x {cause} in M, forward",
        "1 of 3 belong to checks, not to training.",
        "Note: something could not be seen (2 times).",
        "Note: 1 single events were dropped (the limit is 2), with their causes and "
        "lines; counts and bytes include them.",
    ]


def test_an_empty_ledger_says_so():
    assert "No communication was recorded." in text_of(print_ledger, Ledger())


def test_changes():
    after = make_ledger(
        event("M.a"), event("M.a"), event("M.b", Kind.ALL_GATHER, implicit=True)
    )
    changes = diff_ledgers(make_ledger(event("M.a"), event("M.c")), after)
    assert (
        text_of(print_changes, changes)
        == """\
What changed
module  kind        axis  phase     count               payload
M.a     all_reduce  tp    forward  1 -> 2  1.00 KiB -> 2.00 KiB
M.b     all_gather  tp    forward  0 -> 1       0 B -> 1.00 KiB
        (implicit)
M.c     all_reduce  tp    forward  1 -> 0       1.00 KiB -> 0 B
3 differences: +1 communications, +1.00 KiB payload.
""".replace("3 diff", "\n3 diff")
    )
    assert text_of(print_changes, ()) == "The two ledgers are equal.\n"


def test_alike_changes_fold_and_paths_break_at_dots():
    names = [f"GPT.decoder_layers.{layer}.self_attention.norm" for layer in range(12)]
    before = make_ledger(*map(event, names))
    more = event(names[5], payload=2048)
    changes = diff_ledgers(
        before, make_ledger(*map(event, names), *map(event, names), more)
    )
    assert (
        text_of(print_changes, changes)
        == """\
What changed
module                 kind        axis  phase       count               payload
GPT.decoder_layers.    all_reduce  tp    forward  11 -> 22  11.0 KiB -> 22.0 KiB
[0-4,6-11].
self_attention.
norm x11
GPT.decoder_layers.5.  all_reduce  tp    forward    1 -> 3  1.00 KiB -> 4.00 KiB
self_attention.norm

12 differences: +13 communications, +14.0 KiB payload.
"""
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10 * 2**20, "10.0 MiB"),
     (1000 * 2**30, "1000 GiB"), (2**60, "1024 PiB")],
)  # fmt: skip
def test_format_bytes(number, text):
    assert format_bytes(number) == text
