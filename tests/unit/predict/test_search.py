"""The space of a search, its expressions, and how candidates are ranked."""

import argparse

import pytest

from torchspmd._cli import main
from torchspmd._cli import search as command
from torchspmd.errors import UsageError
from torchspmd.predict.ranking import Outcome, describe_search, rank
from torchspmd.predict.repeated import Repeated, extend, how_far_off, of_worst_stage
from torchspmd.predict.search import explore, search
from torchspmd.predict.space import Candidate, Expression, read_space
from torchspmd.rehearse.nodes import Nodes


def words(*text):
    return [candidate.words for candidate in read_space(text).candidates()]


def test_braces_span_a_space():
    assert words("--tp", "{1,2}", "--ac={none,full}", "--fast") == [
        ("--tp", "1", "--ac=none", "--fast"),
        ("--tp", "1", "--ac=full", "--fast"),
        ("--tp", "2", "--ac=none", "--fast"),
        ("--tp", "2", "--ac=full", "--fast"),
    ]


def test_braces_that_a_shell_has_expanded_span_the_same():
    assert words("--tp", "1", "2", "--seq", "512") == words(
        "--tp", "{1,2}", "--seq", "512"
    )
    assert words("--tp=1", "--tp=2", "--fast") == words("--tp={1,2}", "--fast")


def test_names_values_and_what_is_the_same_everywhere():
    space = read_space(["--micro-batch", "{1,2.5,x}", "--seq", "4096", "--lr", "-1"])
    assert space.swept == {"micro_batch": (1, 2.5, "x")}
    assert space.fixed == {"seq": 4096, "lr": -1}
    assert [str(each) for each in space.candidates()][1] == "micro_batch=2.5"


def test_nothing_to_search_is_told():
    with pytest.raises(UsageError, match=r"nothing to search: give some argument"):
        read_space(["--tp", "1"])


def test_expressions_compute_and_refuse():
    values = {"batch": 4, "tp": 8, "ac": "full"}
    assert Expression("batch * tp <= 32 and ac == 'full'", "--where")(values)
    assert not Expression("1 < batch < 3 or not tp % 2 == 0", "--where")(values)
    assert Expression("-batch + 2 ** 3 // 3", "--work")(values) == -2
    with pytest.raises(
        UsageError, match=r"--work 'x' has no x: there are ac, batch, tp"
    ):
        Expression("x", "--work")(values)
    with pytest.raises(UsageError, match=r"--where 'batch \*': invalid syntax"):
        Expression("batch *", "--where")
    with pytest.raises(UsageError, match="only names, numbers, arithmetic"):
        Expression("__import__('os')", "--where")(values)


def test_what_values_do_not_allow_is_told_with_them():
    values = {"batch": 4, "ac": "full"}
    with pytest.raises(UsageError, match=r"cannot be computed for ac='full': '>' not"):
        Expression("ac > 3", "--where")(values)
    with pytest.raises(UsageError, match="for batch=4: division by zero"):
        Expression("batch / 0", "--where")(values)
    with pytest.raises(UsageError, match="with == for equal"):
        Expression("batch = 4", "--where")
    for text in ("ac", "batch - 4", "batch == 4"):
        with pytest.raises(UsageError, match="must be a number greater than 0"):
            Expression(text, "--work").number(values)


def test_braces_of_other_languages_are_left_alone():
    assert words("--config", '{"a": 1, "b": {}}', "--tp", "1", "2") == [
        ("--config", '{"a": 1, "b": {}}', "--tp", "1"),
        ("--config", '{"a": 1, "b": {}}', "--tp", "2"),
    ]
    with pytest.raises(UsageError, match=r"'\{1,2': a brace is missing"):
        read_space(["--tp", "{1,2"])


def test_a_value_that_is_given_twice_is_tried_once():
    assert words("--tp", "{1,2,1}") == [("--tp", "1"), ("--tp", "2")]
    assert words("--tp", "1", "1", "2") == [("--tp", "1"), ("--tp", "2")]


def outcome(name, seconds, nbytes, fits="yes", work=1.0, **parts):
    candidate = Candidate({"tp": name}, ("--tp", str(name)))
    memory = {"device_peak_bytes": nbytes, "margin_bytes": -nbytes}
    prediction = {"step_seconds": seconds, "fits": fits, "memory": memory, **parts}
    return Outcome(candidate, prediction, work)


def test_the_fastest_that_fits_is_best_and_the_front_trades_time_for_memory():
    outcomes = [
        outcome(1, 0.5, 10 << 30, fits="no"),
        outcome(2, 1.0, 70 << 30, compute_seconds=0.9, exposed_seconds=0.1),
        outcome(4, 1.2, 40 << 30, compute_seconds=0.901, exposed_seconds=0.3),
        outcome(8, 1.5, 60 << 30, compute_seconds=1.4, host_seconds=0.1),
        Outcome(Candidate({"tp": 3}, ()), problem="RuntimeError: 3 is odd"),
    ]
    result = rank(outcomes, "token")
    assert result.best is outcomes[1]
    assert result.pareto == [outcomes[1], outcomes[2]]
    text = describe_search(result)
    assert "Best: tp=2" in text
    assert "tp=4: 20.0% slower; 200.00 ms more exposed communication\n" in text
    assert "1 does not fit" in text
    assert "tp=3: RuntimeError: 3 is odd" in text
    data = result.as_json()
    assert data["best"] == {"tp": 2}
    assert [each["pareto"] for each in data["candidates"]].count(True) == 2


def test_work_decides_between_batches():
    small = outcome(1, 1.0, 1, work=1.0)
    large = outcome(2, 1.5, 2, work=2.0)
    assert rank([small, large], "item").best is large


def test_rates_are_in_the_unit_that_the_file_names():
    for unit, rate in (("TFLOP", 4.0), ("item", 4e12)):
        failed = Outcome(Candidate({"tp": 3}, ("--tp", "3")), problem="no")
        data = rank([outcome("a", 0.5, 1, work=2e12), failed], unit).as_json()
        assert data["candidates"][0]["work_per_second"] == rate, unit
        assert data["candidates"][1]["device_peak_bytes"] is None


def test_nothing_that_fits():
    assert "No candidate fits." in describe_search(rank([outcome(1, 1, 1, "no")], "x"))
    failed = Outcome(Candidate({"tp": 3}, ()), problem="RuntimeError: 3 is odd")
    text = describe_search(rank([failed], "x"))
    assert text == (
        "No candidate was predicted.\n1 was not predicted:\n  tp=3: RuntimeError: 3 is odd"
    )


def nothing(tp):
    """Builds nothing."""


def test_an_order_of_other_ranks_is_refused():
    words = {"gpu": "h100", "world_size": 4, "gpus_per_node": 2}
    with pytest.raises(UsageError) as caught:
        search(nothing, {"tp": [1]}, rank_order=[0, 1], **words)
    assert str(caught.value) == (
        "search(): rank_order: it has the hosts of 2 ranks, not of 4."
    )
    with pytest.raises(UsageError, match="host a has 3 ranks, and a node has 2"):
        search(nothing, {"tp": [1]}, rank_order=["a", "a", "a", "b"], **words)


def test_a_function_that_no_other_process_finds_is_refused():
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        search(lambda tp: None, {"tp": [1]}, gpu="h100")


def options(tmp_path, **more):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    values = {
        "script": script,
        "module": False,
        "world_size": 2,
        "rank": 0,
        "gpu": "h100",
        "network": "ib-ndr400",
        "gpus_per_node": 8,
        "nodes": Nodes(),
        "cache": tmp_path / "cache",
        "no_cache": False,
        "jobs": 1,
    }
    return argparse.Namespace(**{**values, **more})


def test_what_was_predicted_before_comes_from_the_cache(tmp_path, monkeypatch):
    candidates = [Candidate({"tp": tp}, ("--tp", str(tp))) for tp in (1, 2)]
    asked = []

    def run_candidates(missing, predict, *, jobs, progress, work):
        for candidate in missing:
            asked.append(candidate)
            if candidate.values["tp"] == 2:
                yield Outcome(candidate, problem="failed")
            else:
                yield Outcome(candidate, {"step_seconds": 1.0, "fits": "yes"})

    monkeypatch.setattr(command, "run_candidates", run_candidates)
    first = command._outcomes(options(tmp_path), candidates)
    assert [each.problem for each in first] == ["", "failed"]
    again = command._outcomes(options(tmp_path), candidates)
    assert again[0].seconds == 1.0
    assert asked == [*candidates, candidates[1]]  # a failure is tried again
    command._outcomes(options(tmp_path, world_size=4), candidates[:1])
    assert len(asked) == 4


def test_the_command_refuses_what_it_cannot_use(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    wrong = ["search", str(script), "--gpu", "h100", "--jobs", "0", "--rank", "3"]
    assert main([*wrong, "--", "--tp", "{1,2}"]) == 2
    text = capsys.readouterr().err
    assert "--rank must be 0 to 0" in text
    assert "--jobs and --top must be at least 1" in text
    nothing = ["search", str(script), "--gpu", "h100", "--where", "tp > 9"]
    assert main([*nothing, "--", "--tp", "{1,2}"]) == 2
    assert "no combination passes --where 'tp > 9'" in capsys.readouterr().err


def test_where_all_fail_the_command_that_shows_an_error_is_told(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("for x in range(3)\n    pass\n")
    words = ["search", str(script), "--gpu", "h100", "--no-cache", "--jobs", "1"]
    assert main([*words, "--", "--tp", "{1,2}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No candidate was predicted."
    assert lines[-1] == (
        f"The whole error of the first one: torchspmd predict {script} --world-size 1 "
        "--rank 0 --gpu h100 --network ib-ndr400 --gpus-per-node 8 -- --tp 1"
    )


def test_a_cache_that_cannot_be_written_is_told_and_left_out(tmp_path, capsys):
    given = options(tmp_path, cache=tmp_path / "train.py" / "cache")
    command._check_cache(given)
    assert given.no_cache
    assert capsys.readouterr().err == (
        f"torchspmd search: predictions are not kept in {given.cache}: Not a directory. "
        "Name another folder with --cache, or give --no-cache.\n"
    )
    given = options(tmp_path)
    command._check_cache(given)
    assert not given.no_cache


def test_the_reason_of_a_failed_script_is_its_error(tmp_path):
    text = "Traceback\n  File x\nRuntimeError: too odd\ntorchspmd predict: x failed"
    assert command._reason(text, 2) == "RuntimeError: too odd"
    assert command._reason("", 2) == "exit code 2"
    usage = "usage: x\nx: error: argument --tp: invalid\ntorchspmd predict: x failed"
    assert command._reason(usage, 2) == "x: error: argument --tp: invalid"


def test_a_repeated_argument_is_swept_with_its_one_value():
    space = read_space(["--layers", "32", "--tp", "{1,2}"], also="layers")
    assert space.swept == {"layers": (32,), "tp": (1, 2)}
    dotted = read_space(["--model.layers", "8", "--tp", "{1,2}"], also="model.layers")
    assert dotted.swept["model_layers"] == (8,)
    with pytest.raises(UsageError, match=r"--repeat depth: .* as in -- --depth 32"):
        read_space(["--tp", "{1,2}"], also="depth")
    with pytest.raises(UsageError, match="nothing to search"):
        read_space(["--layers", "32"], also="layers")


def affine(candidate):
    """A prediction whose every figure is affine in the layers."""
    layers, tp = candidate.values["layers"], candidate.values["tp"]
    if tp == 3:
        return Outcome(candidate, problem="RuntimeError: 3 is odd")
    used = 10 + layers * 8 // tp
    memory = {
        "device_peak_bytes": used,
        "reserved_peak_bytes": used,
        "device_bytes": 200,
        "margin_bytes": 200 - used,
    }
    step = {"step_seconds": 1.0 + layers * tp, "model_flops": 5.0 * layers, "mfu": 0.5}
    return Outcome(candidate, {**step, "fits": "yes", "memory": memory})


def test_few_blocks_stand_for_many():
    space = read_space(["--layers", "30", "--tp", "{1,2,3,4}"], also="layers")
    asked = []

    def run(candidates):
        asked.extend(candidates)
        return [affine(each) for each in candidates]

    result = explore(
        list(space.candidates()),
        run,
        lambda outcome: outcome.prediction["model_flops"],
        "TFLOP",
        Repeated("layers", space, lambda values: (2, 4)),
    )
    assert [each.values["layers"] for each in asked] == [2, 4] * 4 + [30]
    assert result.best.candidate.values == {"layers": 30, "tp": 2}
    assert (result.best.seconds, result.best.nbytes) == (61.0, 130)
    assert [each.candidate.values["tp"] for each in result.too_large] == [1]
    assert [each.candidate.values["tp"] for each in result.failed] == [3]
    assert result.notes == [
        "layers=30 tp=2, rehearsed with all blocks: extended, the step is +0.0% and "
        "memory +0.0% off"
    ]
    assert "1 does not fit" in describe_search(result)
    assert result.as_json()["notes"] == result.notes


def figures(layers, allocated, reserved, *, ran_out=False):
    """A prediction of some layers on a device of 200 bytes, 10 of them outside."""
    memory = {
        "allocated_peak_bytes": allocated * layers,
        "reserved_peak_bytes": reserved * layers,
        "device_peak_bytes": reserved * layers + 10,
        "device_bytes": 200,
        "first_failure": {"bytes": 7 * layers, "module": "head"} if ran_out else None,
    }
    return {"step_seconds": 1.0 * layers, "memory": memory}


def test_tensors_that_fit_are_at_risk_where_their_fragments_do_not():
    told = extend(figures(2, 5, 7), figures(4, 5, 7), (2, 4), 30)
    assert told["fits"] == "at risk"  # 150 of tensors, 210 with fragments, room for 190
    assert told["memory"]["margin_bytes"] == 0
    assert extend(figures(2, 7, 7), figures(4, 7, 7), (2, 4), 30)["fits"] == "no"
    assert extend(figures(2, 5, 5), figures(4, 5, 5), (2, 4), 30)["fits"] == "yes"


def test_the_stage_that_needs_the_most_memory_is_extended_by_itself():
    def stages(layers, first, last):
        told = figures(layers, first, first)
        memories = [told["memory"], figures(1, 50 + last * layers, 50)["memory"]]
        memories[1]["reserved_peak_bytes"] = 50 + last * layers
        told["stages"] = {
            str(rank): {"fits": "yes", "memory": memory}
            for rank, memory in enumerate(memories)
        }
        return told

    extended = extend(stages(2, 5, 1), stages(4, 5, 1), (2, 4), 20)
    needs = {
        rank: e["memory"]["reserved_peak_bytes"]
        for rank, e in extended["stages"].items()
    }
    assert needs == {"0": 100, "1": 70}  # of few layers it is the last that needs more
    worst = of_worst_stage(extended)
    assert (worst["fits"], worst["memory"]["reserved_peak_bytes"]) == ("yes", 100)
    extended = extend(stages(2, 1, 7), stages(4, 1, 7), (2, 4), 30)
    worst = of_worst_stage(extended)
    assert (extended["fits"], worst["fits"]) == ("yes", "no")
    assert worst["memory"]["reserved_peak_bytes"] == 260
    assert of_worst_stage(figures(2, 5, 5)) == figures(2, 5, 5)


def test_what_is_reserved_beside_tensors_does_not_become_less():
    few, more = figures(2, 5, 0), figures(4, 5, 0)
    for each in (few, more):  # a loss that needs more than few blocks do
        each["memory"]["reserved_peak_bytes"] = 60
        each["memory"]["device_peak_bytes"] = 70
    told = extend(few, more, (2, 4), 20)
    assert told["memory"]["reserved_peak_bytes"] == 140  # 100 of tensors, 40 beside
    assert told["fits"] == "yes"


def test_where_few_blocks_run_out_of_memory_what_is_allocated_is_extended():
    full = figures(4, 60, 48, ran_out=True)  # the allocator gave back what it could
    told = extend(figures(2, 60, 75), full, (2, 4), 30)
    assert told["fits"] == "no"
    assert told["memory"]["reserved_peak_bytes"] == 1800
    assert told["memory"]["first_failure"] == {"bytes": 28, "module": "head"}


def test_a_best_that_does_not_fit_whole_makes_room_for_the_next():
    space = read_space(["--layers", "30", "--tp", "{2,4}"], also="layers")

    def run(candidates):
        outcomes = [affine(each) for each in candidates]
        for each in outcomes:
            if each.candidate.values == {"layers": 30, "tp": 2}:
                each.prediction["fits"] = "no"
        return outcomes

    result = explore(
        list(space.candidates()),
        run,
        lambda outcome: outcome.prediction["model_flops"],
        "TFLOP",
        Repeated("layers", space),
    )
    assert result.best.candidate.values["tp"] == 4
    assert [each.candidate.values["tp"] for each in result.too_large] == [2]
    assert result.notes[0] == (
        "layers=30 tp=2, rehearsed with all blocks: it does not fit"
    )


def test_a_table_has_what_tells_candidates_apart_in_eighty_columns():
    def candidate(tp, seconds, **parts):
        one = outcome(tp, seconds, 70 << 30, compute_seconds=seconds, **parts)
        values = {"layers": 32, "schedule": "interleaved", "tensor_parallel": tp}
        one.candidate = Candidate(values, ())
        return one

    rows = [
        candidate(2, 1.0),
        candidate(4, 1.2, exposed_seconds=0.3, host_seconds=0.2, bubble_seconds=0.1),
    ]
    lines = describe_search(rank(rows, "token")).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Best: tensor_parallel=2, 1.0 token/s"
    assert lines[1].split() == (
        "tensor_parallel step token/s MFU memory exposed host bubble".split()
    )
    alone = describe_search(rank(rows[:1], "token"))
    assert "layers=32 schedule=interleaved tensor_parallel=2" in alone
    assert "exposed" not in alone
    assert "Pareto" not in alone


def long_names(*extra, value=4):
    parts = {"exposed_seconds": 0.3, "host_seconds": 0.2}
    rows = [outcome(2, 1.0 + n, 70 << 30, **parts) for n in (0, 1)]
    for n, row in enumerate(rows):
        names = ("gradient_accumulation_steps", "tensor_parallel_size", *extra)
        row.candidate = Candidate(dict.fromkeys(names, f"{value}{n}"), ())
    return describe_search(rank(rows, "TFLOP")).splitlines()


def test_headings_of_long_arguments_are_broken():
    lines = long_names()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Best: gradient_accumulation_steps=40 tensor_par")
    assert [line.split() for line in lines[2:6]] == [
        ["gradient_"],
        ["accumulation_", "tensor_"],
        "steps parallel_size step TFLOP/s MFU memory exposed host".split(),
        ["40", "40", "1.00", "s", "1e-12", "70.00", "GiB", "30%", "20%"],
    ]


@pytest.mark.parametrize(
    ("extra", "value"),
    [((), "configs/llama3_8b_long_context.toml"), (map(str, range(20)), 4)],
)
def test_arguments_without_room_stand_below_their_figures(extra, value):
    lines = long_names(*extra, value=value)
    assert max(map(len, lines)) <= 80
    head = next(n for n, line in enumerate(lines) if line.split()[0] == "step")
    assert lines[head].split()[-1] == "host"
    assert lines[head + 2].startswith(f"    gradient_accumulation_steps={value}0")


def test_a_model_of_few_blocks_is_rehearsed_as_it_is():
    space = read_space(["--layers", "{3,5}", "--tp", "2"], also="layers")
    repeated = Repeated("layers", space)
    three, five = space.candidates()
    assert repeated.rehearsed(three) == (three,)
    assert [each.values["layers"] for each in repeated.rehearsed(five)] == [2, 4]


def test_blocks_that_are_not_alike_are_told():
    one = outcome(2, 1.0, 100)
    assert "not alike" not in how_far_off(one, outcome(2, 1.01, 101))
    assert "not alike: search without" in how_far_off(one, outcome(2, 1.05, 100))
    broken = Outcome(one.candidate, problem="ValueError: no")
    assert how_far_off(one, broken).endswith("with all blocks: ValueError: no")


def test_counts_of_blocks_may_depend_on_the_candidate():
    counts = command._counts("pp,2*pp", {"world_size": 8})
    assert counts({"pp": 4}) == (4, 8)
    with pytest.raises(UsageError, match="two numbers of blocks, as in --repeat lay"):
        command._counts("2", {})
    with pytest.raises(UsageError, match="4 and 4 blocks; the first number must"):
        command._counts("4,pp", {})({"pp": 4})
