"""Where a difference begins, from which values differ."""

from torchspmd.verify.parity.origin import Result, Status, choose_first, execution_order
from torchspmd.verify.recording.files import Key, Kind

F, IN, GO, GI = Kind.FORWARD, Kind.INPUT, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT
G, P = Kind.GRADIENT, Kind.PARAMETER

# A model with a block of two layers, in the order in which it is recorded.
STEP = [
    (IN, ""), (IN, "block"), (IN, "block.up"), (F, "block.up"), (IN, "block.down"),
    (F, "block.down"), (F, "block"), (F, ""),
    (GO, "block.down"), (GO, "block"), (GO, ""), (GI, "block.down"), (GO, "block.up"),
    (GI, "block.up"), (GI, "block"), (GI, ""),
    (G, "block.up.weight"), (G, "block.down.weight"), (Kind.LOSS, ""),
    (P, "block.up.weight"), (P, "block.down.weight"),
]  # fmt: skip


def place(*wrong, is_later=False, sizes=None):
    keys = [Key(*pair) for pair in STEP]
    orders = execution_order(keys)
    results = [
        Result(
            key,
            orders[key],
            Status.DIFFERS if key[:2] in wrong else Status.AGREES,
            relative=(sizes or {}).get(key[:2], 1.0),
        )
        for key in keys
    ]
    found = choose_first(results, is_later=is_later)
    return None if found is None else found[1]


def test_nothing_differs():
    assert place() is None


def test_the_first_module_in_forward():
    after = [(F, "block"), (F, ""), (Kind.LOSS, "")]
    assert place((F, "block.down"), *after) == "block.down"
    assert place((F, "block.up"), (F, "block.down"), *after) == "block.up"


def test_code_between_modules():
    after = [(F, "block.down"), (F, "block"), (F, ""), (Kind.LOSS, "")]
    assert place((IN, "block.down"), *after) == "block, before block.down"
    assert place(*after[1:]) == "block"


def test_partial_sums_that_the_module_around_puts_right():
    assert place((F, "block.down")) is None
    assert place((F, "block.down"), (Kind.LOSS, "")) == "(loss)"


def test_the_batch():
    assert place((IN, ""), (F, "block.up"), (F, "block"), (F, "")) == "(batch)"


def test_the_loss_comes_before_backward():
    assert (
        place((Kind.LOSS, ""), (GO, "block.down"), (G, "block.up.weight")) == "(loss)"
    )
    assert place((GO, "block.down"), (GO, "block"), (GO, ""), (GI, "")) == "(loss)"


def test_the_gradient_of_an_input():
    after = [(GI, "block"), (GI, "")]
    assert place((GI, "block.up"), *after) == "block.up"
    middle = [(GO, "block.up"), (GI, "block.up"), (G, "block.up.weight"), *after]
    assert place(*middle) == "block, after block.up"


def test_the_gradient_of_one_parameter_belongs_to_its_module():
    assert place((G, "block.down.weight"), (P, "block.down.weight")) == "block.down"


def test_the_gradients_of_all_parameters():
    both = [(G, "block.up.weight"), (G, "block.down.weight")]
    assert place(*both) == "(all parameters)"
    assert place((GI, "block.up"), (GI, "block"), (GI, ""), *both) == "block.down"


def test_the_updates_of_all_parameters():
    both = [(P, "block.up.weight"), (P, "block.down.weight")]
    assert place(*both) == "(optimizer)"
    assert place(both[0]) == "block.up"


def test_rounding_of_earlier_updates_is_left_out_beside_a_large_difference():
    wrong = [(F, "block.up"), (F, "block.down"), (F, "block"), (F, ""), (Kind.LOSS, "")]
    sizes = {(F, "block.up"): 1e-4}
    assert place(*wrong, sizes=sizes) == "block.up"
    assert place(*wrong, sizes=sizes, is_later=True) == "block.down"
