"""CUDA graphs: what a capture holds, each replay does again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchspmd.errors import UsageError
from torchspmd.predict.account import Part
from torchspmd.predict.allocator import AllocatorSettings
from torchspmd.predict.hardware import load_gpu, load_network
from torchspmd.predict.memory import count_memory
from torchspmd.predict.prediction import predict_time
from torchspmd.rehearse.recording import Alloc, Comm, Mark, MarkKind, Op, Phase

WIDTH = 256
RUN = (Phase.FORWARD, Phase.BACKWARD)


def build():
    torch.cuda.set_device(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True, fused=True)
    return model, optimizer, torch.randn(64, WIDTH, device="cuda")


def train(model, batch):
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def warm_up(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def steps(recording):
    """Operators and communications of each step, by the places of its ends."""
    result = [[]]
    for event in recording.events:
        if isinstance(event, Mark) and event.kind is MarkKind.STEP_END:
            result.append([])
        elif isinstance(event, Op | Comm):
            result[-1].append(event)
    return result[:-1]


def names(events, *phases):
    return [
        event.name if isinstance(event, Op) else event.op
        for event in events
        if not phases or event.site.phase in phases
    ]


def test_a_replay_does_what_was_captured(rehearse):
    """The whole step: forward, backward and optimizer, as torch's documentation has it."""
    with rehearse() as recording:
        model, optimizer, batch = build()

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = train(model, batch)
            optimizer.step()
            return loss

        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        assert recording.warms_up
        for _ in range(3):
            batch.copy_(torch.randn(64, WIDTH, device="cuda"))
            graph.replay()
        assert not recording.warms_up
    warm, captured, *replayed = steps(recording)
    assert recording.steps == 5
    for each in replayed:
        launched = [event for event in each if event.through == "graph"]
        assert names(launched) == names(captured)
        assert names(launched, *RUN) == names(warm, *RUN)
        assert names(each)[:2] == ["aten.randn.default", "aten.copy_.default"]
        assert {event.site.step for event in each} == {replayed.index(each) + 2}
    numbers = [event.number for each in steps(recording) for event in each]
    assert numbers == sorted(set(numbers))


def test_only_forward_and_backward(rehearse):
    """The optimizer steps behind the replay; the loss is read there."""
    with rehearse() as recording:
        model, optimizer, batch = build()
        warm_up(lambda: train(model, batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train(model, batch)
        for _ in range(3):
            graph.replay()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            loss.item()
    last = steps(recording)[-1]
    by_graph = [event for event in last if event.through == "graph"]
    assert {event.site.phase for event in by_graph} == {
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OTHER,
    }
    assert by_graph[0].site.module == "Sequential.0"
    assert names(last, Phase.OPTIMIZER)[-1] == "aten._fused_adamw_.default"
    assert not any(
        isinstance(event, Alloc) and event.site.step == 3 for event in recording.events
    )


def test_communication_is_sent_again(rehearse):
    with rehearse(4) as recording:
        dist.init_process_group("nccl")
        model, optimizer, batch = build()

        def reduced():
            train(model, batch)
            works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for work in works:
                work.wait()

        warm_up(reduced)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reduced()
        for _ in range(2):
            graph.replay()
            optimizer.step()
    gpu, network = load_gpu("h100"), load_network("ib-ndr400")
    assert [
        sum(isinstance(event, Comm) for event in each) for each in steps(recording)
    ] == [6, 12, 6]
    timed = predict_time(recording, gpu, network)
    assert timed.step_seconds > 0


def test_a_graph_spares_the_host(rehearse):
    def seconds(with_graph):
        with rehearse() as recording:
            model, optimizer, batch = build()
            run = lambda: train(model, batch)  # noqa: E731
            if with_graph:
                warm_up(run)
                optimizer.step()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                run = graph.replay
            for _ in range(2):
                run()
                optimizer.step()
        timed = predict_time(recording, load_gpu("h100"), load_network("ib-ndr400"))
        return timed.host_issue_seconds, timed.account.parts[Part.COMPUTE]

    (eager, computing), (replayed, same) = seconds(False), seconds(True)
    assert replayed < eager / 3
    assert 0.5 * computing < same < computing  # kernels follow at once


def test_the_memory_of_a_graph_is_its_own(rehearse):
    """What the capture frees is not there for others, and stays reserved."""
    with rehearse() as recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = torch.ones(1 << 20, device="cuda")  # 4 MiB
            kept = kept * 2 + 1
        torch.cuda.empty_cache()
        other = torch.empty(6 << 20, device="cuda")  # 24 MiB
        shared = torch.cuda.CUDAGraph()
        with torch.cuda.graph(shared, pool=graph.pool()):
            torch.ones(1 << 20, device="cuda")
        del other
    account = count_memory(recording, load_gpu("h100"), AllocatorSettings())
    mib = 1 << 20
    # A segment of 20 MiB that both graphs share, and one of 24 MiB.
    assert account.reserved_peak == (20 + 24) * mib
    begins = [e for e in recording.events if isinstance(e, Mark) and e.value]
    assert len({event.value for event in begins}) == 1


def test_graphed_callables(rehearse):
    with rehearse() as recording:
        model, optimizer, batch = build()
        model = torch.cuda.make_graphed_callables(model, (batch.clone(),))
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            train(model, batch)
            optimizer.step()
    last = steps(recording)[-1]
    products = [e for e in last if isinstance(e, Op) and "mm" in e.name]
    assert len(products) == 3 + 5  # of weights, and of all inputs but the first
    assert {event.through for event in products} == {"graph"}


def test_compiled_regions_cost_what_they_did(rehearse):
    """Their kernels follow from the memory of the capture, and a replay has none."""

    def compute(with_graph):
        with rehearse() as recording:
            model, optimizer, batch = build()
            compiled = torch.compile(nn.Sequential(*model, nn.GELU(), nn.Softmax(-1)))
            run = lambda: train(compiled, batch)  # noqa: E731
            if with_graph:
                warm_up(run)
                optimizer.step()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                run = graph.replay
            for _ in range(2):
                run()
                run()  # accumulates
                optimizer.step()
        timed = predict_time(recording, load_gpu("h100"), load_network("ib-ndr400"))
        return [
            (item.event.name, item.work - gap, item.event.site.phase)
            for item in timed.program.items
            if isinstance(item.event, Op) and item.event.site.phase in RUN
            for gap in [0 if with_graph else timed.figures.number("kernels.gap")]
        ]

    eager, replayed = compute(False), compute(True)
    assert len(eager) > 20
    assert [name for name, *_ in replayed] == [name for name, *_ in eager]
    for one, other in zip(replayed, eager, strict=True):
        assert one[1] == pytest.approx(other[1], abs=1e-9), one


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: torch.cuda.synchronize(), "torch.cuda.synchronize"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: torch.tensor([1.0]).cuda(), "_to_copy"),
        (lambda x: x[x > 0], "index"),
    ],
)
def test_what_cuda_refuses_to_capture(rehearse, body, problem):
    with rehearse():
        batch = torch.randn(8, device="cuda")
        with (
            pytest.raises(UsageError) as caught,
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            body(batch)
    text = str(caught.value)
    assert problem in text and "test_cuda_graphs.py" in text
    assert "the host waits for the device while a CUDA graph is captured" in text
    assert "Keep out of the capture what reads a value" in text


def test_mistakes_with_graphs(rehearse):
    with rehearse():
        model, _, batch = build()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UsageError, match="nothing was captured"):
            graph.replay()
        with pytest.raises(UsageError, match="no capture has begun"):
            graph.capture_end()
        with pytest.raises(UsageError, match="default stream cannot be captured"):
            graph.capture_begin()
        with torch.cuda.graph(graph):
            batch.mul_(2)
            assert torch.cuda.is_current_stream_capturing()
            assert torch.cuda.current_stream().is_capturing()
            with pytest.raises(
                UsageError, match="another CUDA graph is being captured"
            ):
                torch.cuda.CUDAGraph().capture_begin()
            with pytest.raises(UsageError, match="a replay cannot be a part of it"):
                graph.capture_end() or torch.cuda.graph(
                    torch.cuda.CUDAGraph()
                ).__enter__()
                graph.replay()
    with rehearse():
        model, _, batch = build()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, batch)
        with (
            pytest.raises(RuntimeError, match="capturable is False"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            optimizer.step()


def test_no_values_are_known_of_what_a_replay_writes(rehearse):
    with rehearse() as recording:
        counter = torch.zeros((), dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counter.add_(1)
        graph.replay()
        counter.item()
    assert any("reads a value" in note for note in recording.notes)


def test_steps_without_a_capture_to_come(rehearse):
    """A script that trains on a side stream is told, in its prediction."""
    with rehearse() as recording:
        model, optimizer, batch = build()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):
                train(model, batch)
                optimizer.step()
    timed = predict_time(recording, load_gpu("h100"), load_network("ib-ndr400"))
    assert any("ran on a side stream as before a capture" in n for n in timed.notes())
