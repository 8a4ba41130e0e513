"""Stages in the middle of a pipeline that were not rehearsed follow from their neighbours.

All of them make the same passes, and differ in how many they make before the first one
comes back. So a stage's step is cut at its sends and receives; in that sequence, what
repeats is counted; and where the counts of two neighbours differ, they go on changing by as
much from stage to stage. A third one, far from them, is rehearsed too: where it is not
exactly what follows from the first two, nothing does.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchspmd.errors import UsageError
from torchspmd.predict.collectives import price_comm
from torchspmd.predict.figures import Figures
from torchspmd.predict.operators import Cost
from torchspmd.predict.program import Program
from torchspmd.predict.timeline import Item
from torchspmd.rehearse.recording import (
    Comm,
    Event,
    EventRecord,
    EventWait,
    Op,
    Phase,
    Recording,
    Synchronize,
    Wait,
)

__all__ = ["StagesDifferError", "doubled", "fill_in", "to_rehearse"]

_LONGEST = 32  # pieces that repeat together


class StagesDifferError(UsageError):
    """Stages in the middle do not follow from each other: rehearse each of them."""


def to_rehearse(count: int) -> list[int]:
    """Stages that are rehearsed of so many: both ends, two neighbours, one to check."""
    return sorted({0, 1, 2, count - 2, count - 1} & set(range(count)))


def fill_in(
    known: Mapping[int, Program], ranks: Sequence[int], figures: Figures
) -> list[Program]:
    """Programs of all stages, in order.

    Args:
        known: Those of the stages of ``to_rehearse``, and any others, by rank.
        ranks: Of the stages, in their order.
        figures: To price communications by where their ranks are.

    Raises:
        StagesDifferError: They cannot be told from each other.
    """
    if all(rank in known for rank in ranks):
        return [known[rank] for rank in ranks]
    alphabet = _Alphabet(ranks)
    start, check = 1, len(ranks) - 2
    three = [
        alphabet.read(known[ranks[stage]], stage) for stage in (start, start + 1, check)
    ]
    runs = next(
        (
            runs
            for runs in (_changing(_form(word), three) for word in three)
            if _word(runs, check - start) == three[-1]
        ),
        None,
    )
    if runs is None:
        raise StagesDifferError(
            "The stages in the middle of the pipeline do not follow from each other."
        )
    like = known[ranks[start]].recording
    return [
        known[rank]
        if rank in known
        else alphabet.write(_word(runs, stage - start), stage, like, figures)
        for stage, rank in enumerate(ranks)
    ]


def doubled(programs: Sequence[Program], figures: Figures) -> list[Program]:
    """The same steps with twice as many micro-batches; [] where that cannot be told.

    What stages repeat, one pass forward and one backward, is repeated so often that they
    send and receive twice as much. One of them must be seen to repeat it: where all passes
    forward come first, more of them would be another schedule.
    """
    order = sorted(each.recording.rank for each in programs)
    alphabet = _Alphabet(order)
    stages = [order.index(program.recording.rank) for program in programs]
    words = list(map(alphabet.read, programs, stages))
    rounds = [alphabet.round_of(word) for word in words]
    if not all(rounds) or max(times for _, _, times, _ in filter(None, rounds)) < 2:
        return []
    return [
        alphabet.write(
            [*word[:end], *letters * more, *word[end:]],
            stage,
            program.recording,
            figures,
        )
        for program, stage, word, (end, letters, _, more) in zip(
            programs, stages, words, filter(None, rounds), strict=True
        )
    ]


# ----------------------------------------------------------------------------
# Words: a step as a sequence of pieces, each from one send or receive to the next


class _Back(NamedTuple):
    """What is waited for: so many communications of a stream, or events (None), ago."""

    stream: int | None
    ago: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """What happens from one send or receive to the next, the same wherever it does.

    Attributes:
        items: As they were where it was seen first.
        costs: Of operators, by the place of the item.
        waits: What each wait is for, by the place of the item.
        stage: Where it was seen.
        messages: How often it sends to each rank, and receives.
        phases: Of its operators.
    """

    items: tuple[Item, ...]
    costs: Mapping[int, Cost]
    waits: Mapping[int, _Back]
    stage: int
    messages: Counter[tuple[str, int]]
    phases: frozenset[Phase]


def _piece(
    items: tuple[Item, ...],
    costs: Mapping[int, Cost],
    waits: Mapping[int, _Back],
    stage: int,
) -> _Piece:
    events = [item.event for item in items]
    messages = Counter(
        (event.kind, event.peer)
        for event in events
        if isinstance(event, Comm) and event.peer >= 0
    )
    phases = frozenset(event.site.phase for event in events if isinstance(event, Op))
    return _Piece(items, costs, waits, stage, messages, phases)


class _Round(NamedTuple):
    """What a stage repeats for each micro-batch.

    Attributes:
        end: Where in the word it does so no more.
        letters: Of one round.
        times: How often, in a row.
        more: How many rounds make all that the word sends and receives.
    """

    end: int
    letters: tuple[int, ...]
    times: int
    more: int


def _multiple(every: Counter[tuple[str, int]], some: Counter[tuple[str, int]]) -> int:
    """How many times the one is the other; 0 where it is no multiple."""
    if not every or every.keys() != some.keys():
        return 0
    key = next(iter(some))
    times = every[key] // some[key]
    return times if all(every[key] == times * some[key] for key in every) else 0


class _Alphabet:
    """Pieces, by what they do: two that do the same are one letter."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._stages = {rank: stage for stage, rank in enumerate(ranks)}
        self._letters: dict[Hashable, int] = {}
        self._pieces: list[_Piece] = []

    def read(self, program: Program, stage: int) -> list[int]:
        """The letters of a stage's step."""
        word: list[int] = []
        issued = _Issued()
        for items in _cut(program.items):
            waits: dict[int, _Back] = {}
            what: list[Hashable] = []
            for item in items:
                back = issued.look_back(item.event)
                if back is not None:
                    waits[item.place] = back
                what.append((self._what(item, program, stage), back))
            letter = self._letters.setdefault(tuple(what), len(self._pieces))
            if letter == len(self._pieces):
                self._pieces.append(_piece(items, program.costs, waits, stage))
            word.append(letter)
        return word

    def _what(self, item: Item, program: Program, stage: int) -> Hashable:
        """All that the simulation asks of an item, but which stage it is on."""
        event = item.event
        if isinstance(event, Comm):
            return (
                item.host,
                event.kind,
                event.payload_bytes,
                event.stream,
                event.comm_stream,
                event.is_async,
                self._partners(event, stage),
            )
        named: Hashable = event
        if isinstance(event, Op | Wait | EventRecord | EventWait):
            named = (type(event), event.stream)
        elif isinstance(event, Synchronize):
            named = (type(event), event.stream, event.event is None)
        return (item.host, item.work, item.kind, named, program.costs.get(item.place))

    def _partners(self, comm: Comm, stage: int) -> Hashable:
        """Who takes part, as seen from the stage."""
        if comm.peer >= 0:
            return self._stages[comm.peer] - stage
        if self._is_between_stages(comm, stage):
            return (comm.group, comm.ranks)
        return tuple(rank - self.ranks[stage] for rank in comm.ranks)

    def _is_between_stages(self, comm: Comm, stage: int) -> bool:
        mine = self.ranks[stage]
        return any(rank in self._stages for rank in comm.ranks if rank != mine)

    def round_of(self, word: Sequence[int]) -> _Round | None:
        """The fewest passes that the word repeats; those it repeats most often, or last."""
        every = self._messages(word)
        found: _Round | None = None
        for start in range(len(word)):
            for length in range(1, min(_LONGEST, len(word) - start) + 1):
                letters = tuple(word[start : start + length])
                more = _multiple(every, self._messages(letters))
                if not more or not self._goes_both_ways(letters):
                    continue
                end = _repeated(word, start, letters)
                times = (end - start) // length
                if found is None or (more, times) >= (found.more, found.times):
                    found = _Round(end, letters, times, more)
                break  # longer ones are several rounds
        return found

    def _messages(self, word: Sequence[int]) -> Counter[tuple[str, int]]:
        """How often it sends to each stage, and receives."""
        return sum((self._pieces[letter].messages for letter in word), Counter())

    def _goes_both_ways(self, word: Sequence[int]) -> bool:
        """Whether it computes forward and backward."""
        phases = set[Phase]().union(*(self._pieces[letter].phases for letter in word))
        return {Phase.FORWARD, Phase.BACKWARD} <= phases

    def write(
        self, word: Sequence[int], stage: int, like: Recording, figures: Figures
    ) -> Program:
        """The step of a stage that makes these pieces."""
        recording = Recording(like.world_size, self.ranks[stage], like.nodes)
        program = Program(recording)
        moved: dict[tuple[int, int], Item] = {}
        issued = _Issued()
        for letter in word:
            piece = self._pieces[letter]
            for item in piece.items:
                number = len(program.items)
                cost, back = piece.costs.get(item.place), piece.waits.get(item.place)
                if cost is not None:
                    program.costs[number] = cost
                here = item
                if isinstance(item.event, Comm):
                    key = (letter, item.place)
                    if key not in moved:
                        comm = self._moved(item.event, piece.stage, stage)
                        moved[key] = _priced(item, comm, recording, figures)
                    here = moved[key]
                event = issued.numbered(here.event, back, number)
                program.items.append(here._replace(event=event, place=number))
        return program

    def _moved(self, comm: Comm, start: int, stage: int) -> Comm:
        """The same communication on another stage."""
        if comm.peer >= 0:
            peer = self.ranks[self._stages[comm.peer] + stage - start]
            return comm._replace(peer=peer)
        if self._is_between_stages(comm, start):
            return comm
        by = self.ranks[stage] - self.ranks[start]
        return comm._replace(ranks=tuple(rank + by for rank in comm.ranks))


def _cut(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Pieces that begin with a send or receive."""
    start = 0
    for place, item in enumerate(items):
        if isinstance(item.event, Comm) and item.event.peer >= 0 and place > start:
            yield tuple(items[start:place])
            start = place
    yield tuple(items[start:])


def _priced(item: Item, comm: Comm, recording: Recording, figures: Figures) -> Item:
    price = price_comm(comm, figures, recording.nodes, recording.rank)
    return item._replace(event=comm, work=price.seconds, link=price.link)


class _Issued:
    """Communications and recorded events so far, for those who wait for them."""

    def __init__(self) -> None:
        self._all: defaultdict[int | None, list[int]] = defaultdict(list)
        self._places: dict[tuple[bool, int], _Back] = {}  # by whether it is an event

    def _add(self, stream: int | None, number: int) -> None:
        self._places[stream is None, number] = _Back(stream, len(self._all[stream]))
        self._all[stream].append(number)

    def look_back(self, event: Event | None) -> _Back | None:
        """What a wait is for; None for all else, and for what the step before issued."""
        place = None
        match event:
            case Comm():
                self._add(event.comm_stream, event.number)
            case EventRecord():
                self._add(None, event.event)
            case Wait():
                place = self._places.get((False, event.comm))
            case EventWait() | Synchronize() if event.event is not None:
                place = self._places.get((True, event.event))
        return place and _Back(place.stream, len(self._all[place.stream]) - place.ago)

    def numbered(
        self, event: Event | None, back: _Back | None, new: int
    ) -> Event | None:
        """The same event with a number of its own, that waits for the same as before."""
        old = self._all[back.stream][-back.ago] if back else -1
        match event:
            case Comm():
                self._add(event.comm_stream, new)
                return event._replace(number=new)
            case EventRecord():
                self._add(None, new)
                return event._replace(event=new)
            case Wait():
                return event._replace(comm=old)
            case EventWait():
                return event._replace(event=old)
            case Synchronize() if event.event is not None:
                return event._replace(event=old)
        return event


# ----------------------------------------------------------------------------
# Runs: what repeats in a word, and how often


class _Run(NamedTuple):
    """Letters that repeat.

    Attributes:
        letters: Together.
        times: How often, on one stage.
        more: How much more often, or less, on the next.
    """

    letters: tuple[int, ...]
    times: int
    more: int


def _form(word: Sequence[int]) -> list[tuple[int, ...]]:
    """What repeats in a word: from each place on, the letters that reach furthest."""
    form: list[tuple[int, ...]] = []
    start = 0
    while start < len(word):
        best: tuple[int, ...] = (word[start],)
        furthest = start + 1
        for length in range(1, _LONGEST + 1):
            letters = tuple(word[start : start + length])
            end = _repeated(word, start, letters)
            if end > max(furthest, start + length):
                best, furthest = letters, end
        form.append(best)
        start = furthest
    return form


def _repeated(word: Sequence[int], start: int, letters: tuple[int, ...]) -> int:
    """Where the letters no longer follow each other."""
    while tuple(word[start : start + len(letters)]) == letters:
        start += len(letters)
    return start


def _changing(
    form: Sequence[tuple[int, ...]], words: Sequence[Sequence[int]]
) -> list[_Run]:
    """The runs of the first word, with how they change to the second; [] where not so."""
    first, second = (_times(form, word) for word in words[:2])
    return [
        _Run(letters, times, then - times)
        for letters, times, then in zip(form, first, second, strict=False)
    ]


def _times(form: Sequence[tuple[int, ...]], word: Sequence[int]) -> list[int]:
    """How often each of the form's blocks is in the word; [] for a word of another form."""
    times: list[int] = []
    start = 0
    for letters in form:
        end = _repeated(word, start, letters)
        times.append((end - start) // len(letters))
        start = end
    return times if start == len(word) else []


def _word(runs: Sequence[_Run], stages: int) -> list[int]:
    """The word so many stages on."""
    return [
        letter
        for run in runs
        for letter in run.letters * (run.times + stages * run.more)
    ]
