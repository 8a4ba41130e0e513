"""Correct edits are proved; whatever changes what a graph computes is caught.

Ground truth: both graphs are run on four ranks in lockstep, on random numbers.
"""

import contextlib
from random import Random

import pytest
from edit_graphs import is_same, training_graph
from edit_moves import edit_at_random, write_in_place
from edit_mutations import OF_VALUES, STRUCTURAL, NoPlaceError, move_over_a_write
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspmd.errors import LegalityError
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.legality.check import check_edit

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=10, deadline=None, print_blob=False)


def edited(seed, in_place=False):
    """A graph after some correct edits, as it was before, and which node was which."""
    random = Random(seed)
    fused = random.random() < 0.5 and not in_place
    graph = training_graph(random, sharded=random.random() < 0.5, fused=fused)
    before, mapping = copy_graph(graph)
    done = edit_at_random(graph, random)
    if in_place:
        write_in_place(graph, random)
    return random, before, graph, mapping, done


def mutated(seed, mutate, is_ready=lambda *case: True, in_place=False):
    """The same with a wrong edit on top; from the next seeds where it finds no place."""
    for attempt in range(seed, seed + 40):
        random, *case, _ = edited(attempt, in_place)
        if is_ready(*case):
            with contextlib.suppress(NoPlaceError):
                mutate(case[1], random)
                case[1].lint()
                return case
    raise AssertionError(f"{mutate.__name__} found no place")


def verdict(before, graph, mapping, **options):
    try:
        return str(check_edit(before, graph, mapping, **options)).partition(";")[0]
    except LegalityError:
        return "caught"


@settings(quick, max_examples=15)
@given(seeds, st.booleans())
def test_correct_edits_are_proved(seed, in_place):
    _, before, graph, mapping, done = edited(seed, in_place)
    assert is_same(before, graph), done
    assert verdict(before, graph, mapping, may_reorder=True) == "proved equal", done


@pytest.mark.parametrize("mutate", STRUCTURAL, ids=lambda mutate: mutate.__name__)
@settings(quick, max_examples=5)
@given(seeds)
def test_wrong_whatever_the_numbers_are(mutate, seed):
    def keeps_order(*case):
        return verdict(*case) == "proved equal"

    assert verdict(*mutated(seed, mutate, keeps_order)) == "caught"


@pytest.mark.parametrize("mutate", OF_VALUES, ids=lambda mutate: mutate.__name__)
@settings(quick, max_examples=5)
@given(seeds)
def test_changed_numbers_are_caught_and_only_they(mutate, seed):
    before, graph, mapping = mutated(seed, mutate)
    found = verdict(before, graph, mapping, may_reorder=True)
    if not is_same(before, graph):
        assert found == "caught"
    # Taking one item of a coalesced collective twice is a second wait.
    elif mutate.__name__ != "take_another_item":
        assert found == "proved equal"


@quick
@given(seeds, st.booleans())
def test_reads_over_writes_are_caught(seed, was_functional):
    kept = []

    def keep(before, graph, mapping):
        kept[:] = copy_graph(graph)
        return True

    before, graph, mapping = mutated(seed, move_over_a_write, keep, in_place=True)
    if not was_functional:
        before, mapping = kept
    same = is_same(before, graph)
    found = verdict(before, graph, mapping, may_reorder=True)
    assert found == ("proved equal" if same else "caught")
