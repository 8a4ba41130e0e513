"""The user's own code: what it names, whose it is, and which of its lines runs now.

A captured step is stale when a value that its code reads has changed since. Which values
those are is read from the code, as Dynamo reads it: a counter that no line names may count.
"""

import dis
import functools
import linecache
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

# They take the names of attributes as text, or all attributes at once.
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "attrgetter"})
_ALL_AT_ONCE = frozenset({"vars", "__dict__", "asdict", "astuple", "__getattribute__"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTES = ("ATTR", "METHOD")  # how the names of such instructions end
# Attributes that a method of torch's own reads, where the step may have such an object.
_BEHIND = {"get_last_lr": "_last_lr"}
# What torch calls by itself: a module's forward, an autograd function's backward.
CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context"})


@dataclass(frozen=True, slots=True)
class Names:
    """The names in a function's code, and in the functions written inside of it.

    Attributes:
        globals: Variables of its file.
        attributes: Attributes and methods of any object.
        imports: Modules that are imported there: how many packages up, and the name.
        environment: Texts that may be variables of the environment.
        is_open: Whether it may read attributes by names that are not written there.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[tuple[int, str]]
    environment: frozenset[str]
    is_open: bool


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """What a function's code names."""
    variables: set[str] = set()
    attributes: set[str] = set()
    imports: set[tuple[int, str]] = set()
    is_formatting = False
    before: deque[Any] = deque(maxlen=2)  # of an import: the level, and what of it
    for each in dis.get_instructions(code):
        if each.opname in _GLOBALS:
            variables.add(each.argval)
        elif each.opname.endswith(_ATTRIBUTES):
            attributes.add(each.argval)
        elif each.opname == "IMPORT_FROM":
            attributes.add(each.argval)
        elif each.opname == "IMPORT_NAME":
            attributes.update(each.argval.split("."))  # of `import a.b`, a is bound
            imports.add((before[0], each.argval))
        before.append(each.argval)
        is_formatting = is_formatting or each.opname == "BUILD_STRING"
    texts = {each for each in code.co_consts if isinstance(each, str)}
    attributes |= {_BEHIND[each] for each in attributes & _BEHIND.keys()}
    if "globals" in variables:
        variables |= texts
    is_by_text = not _BY_TEXT.isdisjoint(variables | attributes)
    if is_by_text:
        attributes |= texts
    is_open = is_by_text and (is_formatting or not texts)
    environment = {
        each for each in texts if not _ENVIRONMENT.isdisjoint(variables | attributes)
    }
    is_open = is_open or not _ALL_AT_ONCE.isdisjoint(variables | attributes)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = names_in(inner)
            variables |= found.globals
            attributes |= found.attributes
            imports |= found.imports
            environment |= found.environment
            is_open = is_open or found.is_open
    return Names(
        frozenset(variables),
        frozenset(attributes),
        frozenset(imports),
        frozenset(environment),
        is_open,
    )


def imported_module(level: int, name: str, package: str | None) -> ModuleType | None:
    """The module that an import in a function means, if it is loaded already."""
    if level:
        if not package:
            return None
        parts = package.split(".")
        name = ".".join((*parts[: len(parts) - level + 1], *filter(None, (name,))))
    return sys.modules.get(name)


# ----------------------------------------------------------------------------
# Whose code it is.

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen")
_INSTALLED = ("site-packages", "dist-packages")  # inside of that folder, or elsewhere


@functools.lru_cache(maxsize=4096)
def is_users_file(filename: str) -> bool:
    """Whether a file is the user's own: of no installed package.

    >>> is_users_file(torch.__file__), is_users_file("train.py")
    (False, True)
    """
    if filename.startswith((*_OWN, *_LIBRARY)):
        return False
    return not any(folder in Path(filename).parts for folder in _INSTALLED)


def is_users_function(value: Any) -> bool:
    """Whether a value is a Python function of the user's own."""
    return isinstance(value, FunctionType) and is_users_file(value.__code__.co_filename)


_MOST_WRAPPERS = 16  # around one function


def users_functions_in(value: Any) -> Iterator[FunctionType]:
    """The user's function, or those that a decorator of a library keeps in its own.

    >>> @torch.no_grad()
    ... def evaluate(): ...
    >>> is_users_function(evaluate), next(users_functions_in(evaluate)).__name__
    (False, 'evaluate')
    """
    waiting, seen = deque([value]), {id(value)}
    while waiting and len(seen) <= _MOST_WRAPPERS:
        found = waiting.popleft()
        if is_users_function(found):
            yield found
        elif isinstance(found, FunctionType):
            for inner in filter(callable, _kept_by(found)):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    held: Any = inner
                    is_method = isinstance(held, MethodType)
                    waiting.append(held.__func__ if is_method else held)


def _kept_by(function: FunctionType) -> Iterator[Any]:
    """What a function keeps: what it wraps, and what is in the variables around it."""
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if isinstance(held, dict):  # the functions that singledispatch chooses from
            yield from held.values()
        else:
            yield held


_MOST_CALLED = 512  # functions of packages, behind the forwards of a model


def called_in_packages(functions: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """Functions of installed packages, and those that they name in their own file.

    Of torch's own the functions themselves: what its code calls inside is its own.
    """
    waiting, seen = deque(functions), set[int]()
    while waiting and len(seen) < _MOST_CALLED:
        found = waiting.popleft()
        if id(found) in seen or is_users_function(found):
            continue
        seen.add(id(found))
        yield found
        if _is_own(found.__code__):
            continue
        names = names_in(found.__code__)
        for key in names.globals:
            inner = found.__globals__.get(key)
            if isinstance(inner, FunctionType) and not _is_own(inner.__code__):
                waiting.append(inner)


# ----------------------------------------------------------------------------
# The functions of a class that a step may call.

# Not called on an object that is there already.
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_UNCALLED = frozenset(
    {"__repr__", "__str__", "__del__", "__getstate__", "__setstate__"}
)


def methods_of(
    kind: type,
    names: frozenset[str] | set[str],
    *,
    is_made: bool,
    is_holder: bool = False,
) -> Iterator[tuple[str, FunctionType]]:
    """The functions of a class that may be called: by name, or by an operator.

    Args:
        kind: The class.
        names: Names of attributes and methods that the step's code has.
        is_made: Whether the step may make objects of it.
        is_holder: Whether its objects hold models: nobody compares these, and what a
            dataclass has for that names every field.
    """
    for key, value in vars(kind).items():
        is_special = key.startswith("__") and key.endswith("__")
        if key in _MAKING:
            is_called = is_made
        else:
            is_called = key in names or (is_special and key not in _UNCALLED)
        if is_called:
            for function in _functions_in(value):
                is_made_up = is_special and function.__code__.co_filename == "<string>"
                if not (is_made_up and is_holder) or key in _MAKING:
                    yield key, function


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions behind a method, a property or a decorator."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, property):
        for each in (value.fget, value.fset):
            yield from _functions_in(each)
    else:
        for key in ("__func__", "func", "__wrapped__"):
            inner = attribute_of(value, key)
            if isinstance(inner, FunctionType):
                yield inner
                return


def attribute_of(value: Any, name: str, default: Any = None) -> Any:
    """As ``getattr``, also of an object that answers with an error of its own."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def unwrapped(value: Any) -> Callable[..., Any] | None:
    """The Python function that a decorator of the standard library keeps, if any."""
    inner = attribute_of(value, "__wrapped__")
    return inner if isinstance(inner, FunctionType) else None


# ----------------------------------------------------------------------------
# Lines of the user's code.

# Frames that only pass on that a tensor is printed: a DTensor's, a mode's.
_PRINTING = (
    *("__repr__", "__format__", "__torch_function__", "handle_torch_function"),
    *("call", "_refuse_printing"),
)


def user_line(error: BaseException) -> str:
    """``file:line function: source`` of the user's innermost frame behind an error."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def raises_itself(error: BaseException) -> bool:
    """Whether a ``raise`` or ``assert`` made an error, in code that is not torch's or ours.

    Of code of the standard library it is not known: it may be at odds with a trace.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if _is_own(code) or not runs_for_user(trace.tb_frame):
        return False
    return any(
        each.offset == trace.tb_lasti and each.opname == "RAISE_VARARGS"
        for each in dis.get_instructions(code)
    )


def calling_line() -> str:
    """``file:line function: source`` of the user's code that is running now."""
    return _innermost(traceback.walk_stack(sys._getframe(1)))


def printing_line() -> str | None:
    """The user's line that prints a tensor; None where torch or this package prints it."""
    frame: Any = sys._getframe(1)
    while frame and _is_own(frame.f_code) and frame.f_code.co_name in _PRINTING:
        frame = frame.f_back
    if frame is None or _is_own(frame.f_code):
        return None
    return _format_line(frame.f_code, frame.f_lineno)


def _is_own(code: CodeType) -> bool:
    """Whether code is torch's or this package's."""
    return code.co_filename.startswith(_OWN)


def runs_for_user(frame: FrameType | None) -> bool:
    """Whether code runs for the user, and not for torch or this package.

    Of code of the standard library, whoever called it decides.
    """
    while frame is not None and not _is_own(frame.f_code):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARY) or any(each in file for each in _INSTALLED):
            return True
        frame = frame.f_back
    return False


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    made = None
    for frame, line in frames:
        if _is_own(frame.f_code):
            continue
        if frame.f_code.co_filename != "<string>":
            return _format_line(frame.f_code, line)
        # Code without a file may have been made by torch: named if there is no other.
        made = made or _format_line(frame.f_code, line)
    return made or "(no line of yours: the call came from torch)"


def _format_line(code: CodeType, line: int) -> str:
    source = linecache.getline(code.co_filename, line).strip()
    place = f"{code.co_filename}:{line} {code.co_name}"
    return f"{place}: {source}" if source else place
