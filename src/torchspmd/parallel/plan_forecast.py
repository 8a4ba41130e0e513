"""The communication that a plan will cause, as a ledger that nothing has sent."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from torchspmd.comm import Ledger
from torchspmd.parallel.plan_assignment import Assignment
from torchspmd.parallel.plan_calls import (
    Call,
    Facts,
    Inputs,
    NotRunnableError,
    describe_inputs,
    guess_inputs,
    run_on_shapes,
)
from torchspmd.parallel.plan_collectives import predict_collectives
from torchspmd.parallel.plan_dry_run import find_fixed_sizes
from torchspmd.parallel.plan_names import fold
from torchspmd.parallel.resolve import Resolved


def forecast(
    model: nn.Module,
    resolved: Resolved,
    example: Inputs | None,
    tokens: tuple[int, int],
) -> tuple[Ledger, list[str]]:
    """The expected ledger of one forward and backward, and what it rests on.

    Args:
        model: The model, before the plan.
        resolved: The plan.
        example: Inputs of the model; None to make them from the number of tokens.
        tokens: Batch and sequence length.
    """
    assignments = resolved.assignments
    notes: list[str]
    try:
        inputs = example if example is not None else guess_inputs(model, *tokens)
        calls = run_on_shapes(model, [a.path for a in assignments], inputs)
        notes = [f"Shapes are those of a run on {describe_inputs(inputs)}."]
        failure = find_fixed_sizes(model, assignments, inputs, resolved.mesh.size)
        if failure is not None:
            notes.append(
                f"The forward fails on the shapes of one rank, {failure}. Take sizes and "
                "numbers of heads from the tensors, not from the config: -1 in a view."
            )
    except NotRunnableError as error:
        calls = list(_assumed_calls(assignments, *tokens))
        notes = [
            f"The model does not run on shapes alone ({error}): every layer is taken to "
            f"be called once on {tokens[0]} x {tokens[1]} tokens."
        ]
    prediction = predict_collectives(
        assignments, calls, resolved.mesh, type(model).__name__
    )
    called = {call.path for call in calls}
    notes += _each(
        (a.path for a in assignments if a.path not in called),
        "was not called, so what it sends is not counted.",
    )
    notes += _each(
        prediction.unknown, "sends an amount that is not known, and not counted."
    )
    ledger = Ledger()
    for event in prediction.events:
        ledger.append(event)
    return ledger, notes


def _each(paths: Iterable[str], what: str) -> list[str]:
    return [f"{name or 'the model'} {what}" for name in fold(list(paths))]


def _assumed_calls(
    assignments: Sequence[Assignment], batch: int, seq: int
) -> Iterable[Call]:
    """One call of each layer whose shapes follow from the layer itself."""
    for number, assignment in enumerate(assignments):
        module = assignment.module
        if isinstance(module, nn.Linear):
            sizes, dtype = (
                (module.in_features, module.out_features),
                module.weight.dtype,
            )
            given = Facts((batch, seq, sizes[0]), dtype, True, 2 * number)
        elif isinstance(module, nn.Embedding):
            sizes, dtype = (1, module.embedding_dim), module.weight.dtype
            given = Facts((batch, seq), torch.long, False, 2 * number)
        elif (
            isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and module.weight is not None
        ):
            sizes, dtype = (1, module.normalized_shape[-1]), module.weight.dtype
            given = Facts((batch, seq, sizes[1]), dtype, True, 2 * number)
        else:
            continue
        output = Facts((batch, seq, sizes[1]), dtype, True, 2 * number + 1)
        yield Call(assignment.path, (given,), {}, (output,))
