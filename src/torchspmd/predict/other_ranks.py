"""What other ranks of a rehearsed script send: they are rehearsed too, one process each.

One process plays one rank. Where that rank receives Python objects, such as the shapes that
a stage of a pipeline tells the next one, or where its time depends on when another stage
sends, the other rank is rehearsed in a process of its own, which leaves its answer in a
folder that all of them share.
"""

import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torchspmd.errors import UsageError
from torchspmd.predict.forks import Forks
from torchspmd.predict.stages import to_rehearse
from torchspmd.rehearse.recording import Comm, Recording
from torchspmd.rehearse.world import EndOfWindow

__all__ = ["OtherRanks", "Question"]

_MOST = 64  # ranks of a pipeline that are rehearsed
_SECONDS = 1800  # for one of them


class Question(NamedTuple):
    """What a process is started for.

    Attributes:
        rank: That it plays.
        asking: The ranks that wait for it, the first one first.
        objects: How many messages of objects the last of them wants; 0: the recording.
    """

    rank: int
    asking: tuple[int, ...]
    objects: int = 0


class OtherRanks:
    """Asks other ranks of the same script, and answers those that ask this one.

    Args:
        rank: That this process plays.
        forks: Rehearse another rank each; answers are left in their folder.
        question: That this process is there to answer; None: it is the first.
        at_once: How many are asked at a time.
    """

    def __init__(
        self,
        rank: int,
        forks: Forks,
        question: Question | None = None,
        at_once: int | None = None,
    ) -> None:
        self._rank, self._forks, self._question = rank, forks, question
        self._at_once = at_once or os.cpu_count()
        self._folder = forks.folder
        self._sent: defaultdict[int, list[list[Any]]] = defaultdict(list)
        self._received: Counter[int] = Counter()
        self._rehearsed: set[int] = set()  # to their end

    @property
    def is_asked(self) -> bool:
        """Whether this process is there to answer another."""
        return self._question is not None

    # --- objects ----------------------------------------------------------------------

    def send(self, objects: list[Any], rank: int | None) -> None:
        """The script sends objects: keep them for the rank that they are for."""
        if rank is None:
            return
        sent = self._sent[rank]
        sent.append(list(objects))
        _write(self._objects_of(self._rank, rank), sent)
        question = self._question
        if question and rank == question.asking[-1] and len(sent) == question.objects:
            raise EndOfWindow

    def receive(self, rank: int | None) -> list[Any]:
        """The objects that a rank sends to this one.

        Raises:
            UsageError: It sends none, or waits for this one.
        """
        if rank is None:
            raise UsageError(
                "recv_object_list(src=None): name the rank that sends; in a rehearsal "
                "nobody else is there to be the first."
            )
        self._received[rank] += 1
        count = self._received[rank]
        path = self._objects_of(rank, self._rank)
        messages = _read(path)
        if messages is None or len(messages) < count:
            self._ask(rank, objects=count)
            messages = _read(path)
        if messages is None or len(messages) < count:
            raise UsageError(
                f"Rank {self._rank} receives objects from rank {rank}, which was "
                "rehearsed and sends none to it."
            )
        message: list[Any] = messages[count - 1]
        return message

    def _objects_of(self, source: int, destination: int) -> Path:
        return self._folder / f"objects-{source}-{destination}.pickle"

    # --- recordings -------------------------------------------------------------------

    def answer(self, recording: Recording) -> None:
        """Leave the recording for the one who asks.

        Not one that ends where objects were asked for: that would take the place of the
        whole one, which another process may have left meanwhile.
        """
        if not (self._question and self._question.objects):
            _write(self._recording_of(recording.rank), recording)

    def few_stages(self, recording: Recording) -> tuple[list[Recording], list[int]]:
        """Recordings of some ranks of a pipeline, this one first; and all its ranks.

        Those in between follow from them, as far as stages are alike. No ranks where this
        one is not on a pipeline that is long enough, or not known to be: then there is
        its recording alone.
        """
        ranks = _pipeline(recording)
        some = [ranks[stage] for stage in to_rehearse(len(ranks))]
        if len({*some, recording.rank}) >= len(ranks):
            return [recording], []
        return [recording, *self._recordings(set(some) - {recording.rank})], ranks

    def stages(self, recording: Recording) -> list[Recording]:
        """Recordings of all ranks that this one meets in sends and receives, itself first.

        A pipeline of more ranks than can be rehearsed in reasonable time is left alone,
        with a note.
        """
        found = {recording.rank: recording}
        waiting = _peers(recording)
        while waiting:
            if len(found) + len(waiting) > _MOST:
                recording.notes.append(
                    f"This rank meets more than {_MOST} others in sends and receives: "
                    "they are taken to be ready whenever it is."
                )
                return [recording]
            new = self._recordings(waiting)
            found |= {each.rank: each for each in new}
            waiting = {rank for each in new for rank in _peers(each)} - found.keys()
        return list(found.values())

    def _recordings(self, ranks: Collection[int]) -> list[Recording]:
        """Of each rank, in order: rehearsed now where it was not before."""
        # A rank that was asked for objects alone has left no recording.
        missing = sorted(set(ranks) - self._rehearsed)
        with ThreadPoolExecutor(self._at_once) as pool:
            for _ in pool.map(self._ask, missing):
                pass
        self._rehearsed.update(missing)
        return [self._read_recording(rank) for rank in sorted(ranks)]

    def _read_recording(self, rank: int) -> Recording:
        recording: Recording | None = _read(self._recording_of(rank))
        if recording is None:
            raise UsageError(f"Rank {rank} was rehearsed and left no recording.")
        return recording

    def _recording_of(self, rank: int) -> Path:
        return self._folder / f"recording-{rank}.pickle"

    # --- processes --------------------------------------------------------------------

    def _ask(self, rank: int, objects: int = 0) -> None:
        mine = self._question
        asking = (*(mine.asking if mine and mine.objects else ()), self._rank)
        if objects and rank in asking:
            chain = " of ".join(f"rank {each}" for each in (*asking[::-1], rank))
            raise UsageError(f"Ranks wait for each other's objects: {chain}.")
        what = f"Rank {rank}, which rank {self._rank} waits for,"
        try:
            problem = self._forks.ask(Question(rank, asking, objects), _SECONDS)
        except TimeoutError:
            raise UsageError(
                f"{what} was not rehearsed within {_SECONDS} s. Does the script wait for "
                "something on that rank?"
            ) from None
        if problem:
            raise UsageError(f"{what} could not be rehearsed: {problem}")


def _peers(recording: Recording) -> set[int]:
    return {
        event.peer
        for event in recording.events
        if isinstance(event, Comm) and event.peer >= 0
    } - {recording.rank}


def _pipeline(recording: Recording) -> list[int]:
    """Ranks of the pipeline that this one is on; [] where its peers are not beside it."""
    groups = {
        event.ranks
        for event in recording.events
        if isinstance(event, Comm) and event.peer >= 0
    }
    if len(groups) != 1:
        return []
    (ranks,) = groups
    place = ranks.index(recording.rank)
    beside = {ranks[i] for i in (place - 1, place + 1) if 0 <= i < len(ranks)}
    return list(ranks) if _peers(recording) == beside else []


def _write(path: Path, value: object) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(value))
    part.replace(path)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.is_file() else None
