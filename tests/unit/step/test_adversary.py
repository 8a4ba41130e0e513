"""Training steps drawn from a grammar: whatever compiles equals eager.

``benchmarks/adversary.py`` draws for as long as it is told, on one or more ranks.
"""

import _adversary
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
