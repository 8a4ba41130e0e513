"""Training steps drawn from a grammar: whatever compiles equals eager.

``benchmarks/adversary.py`` draws for as long as it is told, on one or more ranks.
"""

import dataclasses

import _adversary
import adversary
import pytest
from hypothesis import HealthCheck, Phase, given, settings

DRAWN = settings(
    max_examples=6,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@DRAWN
@given(_adversary.recipes(modes=("",), backends=("graph",)))
def test_drawn_steps_equal_eager(recipe):
    outcome, text = _adversary.judge(recipe)
    assert not outcome.startswith("fault"), f"{text}\n{recipe}"


@DRAWN
@given(
    _adversary.recipes(
        modes=("default", "replicate", "fully_shard"), backends=("graph",)
    )
)
def test_drawn_steps_of_every_mode_equal_eager(recipe):
    with _adversary.group_of_one():
        outcome, text = _adversary.judge(recipe)
    assert not outcome.startswith("fault"), f"{text}\n{recipe}"


def test_a_fault_is_seen(monkeypatch):
    """The comparison itself: a step that does something else than eager."""
    recipe = _adversary.Recipe(layers=("tanh",))
    assert _adversary.judge(recipe) == ("equal", "")
    real = _adversary.compile_step

    def wrong(**options):
        def wrap(step):
            def other(model, optim, batch, argument):
                return step(model, optim, batch * 1.001, argument)

            return real(**options)(other)

        return wrap

    monkeypatch.setattr(_adversary, "compile_step", wrong)
    outcome, text = _adversary.judge(recipe)
    assert outcome == "fault: differs"
    assert text.startswith("value 0 of")
    # Where sums are taken in another order, rounding is measured, and this is more.
    inexact = dataclasses.replace(recipe, mode="default")
    with _adversary.group_of_one():
        outcome, text = _adversary.judge(inexact)
    assert outcome == "fault: differs"


def test_rounding_that_a_step_amplifies_is_no_fault(monkeypatch):
    """Signs of gradients that are rounding: other ones for another order of sums."""
    amplified = {"amsgrad": False, "eps": 1e-30}
    recipe = _adversary.Recipe(
        layers=("instancenorm",),
        optimizer="Adam",
        options=tuple(amplified.items()),
        mode="default",
    )
    with _adversary.group_of_one():
        assert _adversary.judge(recipe) == ("equal", "")
        monkeypatch.setattr(_adversary, "rounding_of", lambda *_: [0.0] * 99)
        assert _adversary.judge(recipe)[0] == "fault: differs"


def test_a_recipe_is_read_back_from_its_text():
    recipe = _adversary.Recipe(("tanh", "tied"), options=(("foreach", False),), seed=3)
    text = "Recipe(layers=('tanh', 'tied'), options=(('foreach', False),), seed=3)"
    assert str(recipe) == text
    assert _adversary.Recipe.parse(text) == recipe
    with pytest.raises(ValueError, match="is not like Recipe"):
        _adversary.Recipe.parse("3")


def run_command(monkeypatch, capsys, outcomes):
    """The exit code and the text of the command, for one recipe with these outcomes."""
    monkeypatch.setattr(adversary.Judge, "_outcomes", lambda self, recipe: outcomes)
    monkeypatch.setattr("sys.argv", ["adversary.py", "--recipe", "Recipe(seed=3)"])
    return adversary.main(), capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcomes", "code", "words"),
    [
        ([("equal", "")] * 2, 0, "     1 equal\nNothing was refused"),
        ([("refused", "CaptureError: no")] * 2, 0, "     1 CaptureError: no"),
        ([("equal", ""), ("fault: differs", "value 3")], 1, "differs\n  value 3\n"),
        ([("equal", ""), ("refused", "why")], 1, "ranks differ\n  equal, refused: why"),
    ],
)
def test_the_command_says_what_became_of_a_recipe(
    monkeypatch, capsys, outcomes, code, words
):
    found, text = run_command(monkeypatch, capsys, outcomes)
    assert found == code
    assert words in text
    assert ("  Recipe(seed=3)" in text) is bool(code)


def test_the_command_keeps_to_80_columns(monkeypatch, capsys):
    words = "CaptureError: " + "why " * 60
    for outcome in ("refused", "fault: ShadowError"):
        _, text = run_command(monkeypatch, capsys, [(outcome, words)])
        assert max(map(len, text.splitlines())) <= 80
