"""What a compiled region leaves out of memory."""

import pytest
import torch
from torch import nn

from torchspmd.predict.figures import Figures
from torchspmd.predict.hardware import load_gpu
from torchspmd.predict.operators import Pricer
from torchspmd.predict.program import price_events
from torchspmd.rehearse.recording import Alloc, Free, Op, Phase

ROWS, WIDTH = 256, 512
LARGE = 4 * ROWS * WIDTH  # one activation, float32


def chain(x):
    return (x.relu() * 2 + 1).sigmoid().sum()


def allocated(recording, phase):
    makers = {e.number: e.name for e in recording.events if isinstance(e, Op)}
    return [
        makers[event.op]
        for event in recording.events
        if isinstance(event, Alloc)
        and event.nbytes == LARGE
        and event.site.phase is phase
        and event.op in makers
    ]


def run(rehearse, function, compiled):
    with rehearse() as recording:
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        module = Wrapped(function).cuda()
        if compiled:
            module = torch.compile(module)
        module(x).backward()
        held = x.grad
    assert held is not None
    return recording


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self.up(x))


def test_elementwise_chains_are_not_in_memory(rehearse):
    eager = run(rehearse, chain, compiled=False)
    assert len(allocated(eager, Phase.FORWARD)) == 5  # the product, and each result
    fused = run(rehearse, chain, compiled=True)
    assert allocated(fused, Phase.FORWARD) == ["aten.addmm.default"]


def test_what_a_product_of_backward_reads_is_kept(rehearse):
    down = nn.Linear(WIDTH, WIDTH)

    def mlp(x):
        return down.to(x.device)(nn.functional.gelu(x)).sum()

    fused = run(rehearse, mlp, compiled=True)
    assert allocated(fused, Phase.FORWARD) == [
        "aten.addmm.default",
        "aten.gelu.default",
        "aten.addmm.default",
    ]


class Residual(nn.Module):
    """Products in 16 bits beside a stream of 32."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for up in self.ups:
            x = x + up(nn.functional.rms_norm(x, (WIDTH,), self.weight))
        return x.sum()


def kept_for_backward(recording):
    """Operators and bytes of what forward leaves in memory when backward begins."""
    makers, live = {}, {}
    for event in recording.events:
        match event:
            case Op():
                makers[event.number] = event.name
                if event.site.phase is Phase.BACKWARD:
                    break
            case Alloc() if event.site.phase is Phase.FORWARD:
                live[event.storage] = (makers.get(event.op), event.nbytes)
            case Free():
                live.pop(event.storage, None)
    return list(live.values())


def test_sums_of_residual_connections_are_kept_not_their_products(rehearse):
    """As torch's partitioner has it: those used far apart are not computed again."""
    with rehearse() as recording:
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        module = torch.compile(Residual().cuda())
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(x)
        loss.backward()
    kept = kept_for_backward(recording)
    assert kept.count(("aten.add.Tensor", LARGE)) == 2  # the third is summed up at once
    assert ("aten.addmm.default", LARGE // 2) not in kept


def test_a_sum_that_is_saved_in_more_bytes_is_kept_in_its_own(rehearse):
    """Norms that are written out save 32 bits of a stream in 16."""

    def normed(x):
        wide = x.float()
        return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)

    class Written(Residual):
        def forward(self, x):
            for up in self.ups:
                x = x + up(normed(x))
            return x.sum()

    with rehearse() as recording:
        x = torch.randn(
            ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        torch.compile(Written().cuda().bfloat16())(x).backward()
    kept = kept_for_backward(recording)
    assert kept.count(("aten.add.Tensor", LARGE // 2)) == 2
    assert ("aten._to_copy.default", LARGE) not in kept


def test_a_tensor_that_several_products_read_is_cast_once(rehearse):
    class Three(Residual):
        def forward(self, x):
            x = x.relu() * self.weight
            return sum(up(x) for up in self.ups).sum()

    with rehearse() as recording:
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        module = torch.compile(Three().cuda())
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(x)
        loss.backward()
    kept = kept_for_backward(recording)
    assert kept.count(("aten._to_copy.default", LARGE // 2)) == 1
    live = set()
    for event in recording.events:
        if isinstance(event, Alloc):
            assert event.storage not in live
            live.add(event.storage)
        elif isinstance(event, Free):
            live.remove(event.storage)


def memory_kernels(recording):
    """Phase, last operator and bytes of kernels that memory bounds, but for small ones."""
    pricer = Pricer(Figures(load_gpu("h200")))
    program = price_events(recording, pricer, range(len(recording.events)))
    return [
        (op.site.phase, op.name, cost.nbytes)
        for place, cost in program.costs.items()
        if isinstance(op := recording.events[place], Op)
        and op.site.phase in (Phase.FORWARD, Phase.BACKWARD)
        and cost.kind == "memory"
        and cost.nbytes > LARGE
    ]


def test_kernels_move_what_is_in_memory_and_compute_the_rest_again(rehearse):
    down = nn.Linear(WIDTH, WIDTH, bias=False)

    def mlp(x):
        return down.to(x.device)((x.relu() * 2 + 1).sigmoid().square()).sum()

    kernels = memory_kernels(run(rehearse, mlp, compiled=True))
    # The product is read, and what the next one reads is written: no mask, no sigmoid.
    assert (Phase.FORWARD, "aten.pow.Tensor_Scalar", 2 * LARGE) in kernels
    # A gradient and the product are read, and a gradient is written.
    (backward,) = (
        nbytes
        for phase, _, nbytes in kernels
        if phase is Phase.BACKWARD and nbytes > 2 * LARGE
    )
    assert 3 * LARGE <= backward < 4.1 * LARGE  # perhaps with the sum for a bias


def test_kernels_are_found_across_products_that_do_not_need_them(rehearse):
    """As in a gated MLP: the activation is issued before the second product."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("gate", "up", "down"):
                setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

        def forward(self, x):
            gate = torch.nn.functional.silu(self.gate(x))
            y = gate * self.up(x)
            return y + self.down(y)

    with rehearse() as recording:
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        torch.compile(Gated().cuda())(x).sum().backward()
    kernels = memory_kernels(recording)
    forward = [each for each in kernels if each[0] is Phase.FORWARD]
    # Two products are read and one result is written. It, and the product made of it, are
    # read by a kernel of their own: this product stands between.
    assert [nbytes // LARGE for _, _, nbytes in forward] == [3, 3]
    # What down hands back, gate and up are read, and both gradients are written; then the
    # gradients of x from two products are added.
    backward = [
        nbytes // LARGE for phase, _, nbytes in kernels if phase is Phase.BACKWARD
    ]
    assert backward == [5, 3]


def test_every_allocation_is_freed_once(rehearse):
    recording = run(rehearse, chain, compiled=True)
    live = set()
    for event in recording.events:
        if isinstance(event, Alloc):
            assert event.storage not in live
            live.add(event.storage)
        elif isinstance(event, Free):
            assert event.storage in live
            live.remove(event.storage)


def test_fused_sums_take_no_buffers_of_kernels(rehearse):
    def workspaces(compiled):
        with rehearse() as recording:
            function = lambda x: x.sum(0)  # noqa: E731
            if compiled:
                function = torch.compile(function)
            function(torch.randn(8192, 768, device="cuda"))
        return [e for e in recording.events if isinstance(e, Alloc) and e.workspace]

    assert workspaces(compiled=False)
    assert not workspaces(compiled=True)


@pytest.mark.parametrize(
    ("dtype", "more"), [(torch.bfloat16, 2 * 1000 * 64), (torch.float32, 0)]
)
def test_compiled_gradients_of_embeddings_are_added_up_in_32_bits(
    rehearse, dtype, more
):
    """Torch's decomposition casts the whole table behind the sums."""
    with rehearse() as recording:
        table = nn.Embedding(1000, 64, device="cuda", dtype=dtype)
        rows = torch.zeros(4096, dtype=torch.long, device="cuda")
        torch.compile(table)(rows).sum().backward()
    taken = [
        event.nbytes
        for event in recording.events
        if isinstance(event, Alloc) and event.workspace
    ]
    assert [nbytes for nbytes in taken if nbytes >= 1000 * 64] == [more] * bool(more)


class Scored(nn.Module):
    """Gives its scores beside the loss, as language models do."""

    def __init__(self, gives_scores):
        super().__init__()
        self.gives_scores = gives_scores
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scores = self.up(x)
        loss = scores.exp().sum()
        return {"loss": loss, "scores": scores} if self.gives_scores else {"loss": loss}


def most_live(recording):
    """Of tensors as large as the scores, in backward."""
    live, most = set(), 0
    for event in recording.events:
        if isinstance(event, Alloc):
            if event.nbytes == LARGE:
                live.add(event.storage)
            if event.site.phase is Phase.BACKWARD:
                most = max(most, len(live))
        elif isinstance(event, Free):
            live.discard(event.storage)
    return most


def score(
    rehearse, *, compiled, gives_scores=True, use=lambda results: results["loss"]
):
    with rehearse() as recording:
        x = torch.randn(ROWS, WIDTH, device="cuda")
        module = Scored(gives_scores).cuda()
        call = torch.compile(module) if compiled else module
        use(call(x)).backward()
    return recording


def test_a_result_that_backward_does_not_reach_gets_zeros(rehearse):
    assert "aten.zeros.default" not in allocated(
        score(rehearse, compiled=False), Phase.BACKWARD
    )
    recording = score(rehearse, compiled=True)
    assert allocated(recording, Phase.BACKWARD).count("aten.zeros.default") == 1
    # x, the scores, which their caller may still read, the zeros, and the gradient.
    assert most_live(recording) == 4


def test_a_result_with_a_gradient_gets_no_zeros(rehearse):
    recording = score(
        rehearse, compiled=True, use=lambda each: each["loss"] + each["scores"].sum()
    )
    assert "aten.zeros.default" not in allocated(recording, Phase.BACKWARD)


def test_what_only_the_region_knows_is_written_over(rehearse):
    recording = score(rehearse, compiled=True, gives_scores=False)
    assert "aten.zeros.default" not in allocated(recording, Phase.BACKWARD)
    assert most_live(recording) == 2  # x, and the scores that become their gradient


def test_zeros_go_with_the_backward_that_they_are_for(rehearse):
    with rehearse() as recording:
        module = torch.compile(Scored(gives_scores=True).cuda())
        loss = module(torch.randn(ROWS, WIDTH, device="cuda"))["loss"]
        loss.backward()
        torch.ones(3, device="cuda")  # while the loss still has its graph
    makers = {e.number: e.name for e in recording.events if isinstance(e, Op)}
    names = [makers.get(getattr(event, "number", None)) for event in recording.events]
    zeros = {
        event.storage
        for event in recording.events
        if isinstance(event, Alloc) and makers.get(event.op) == "aten.zeros.default"
    }
    freed = {
        e.storage
        for e in recording.events[: names.index("aten.ones.default")]
        if isinstance(e, Free)
    }
    assert zeros and zeros <= freed


def test_results_of_a_region_may_be_written(rehearse):
    with rehearse():
        module = torch.compile(Scored(gives_scores=True).cuda())
        results = module(torch.randn(ROWS, WIDTH, device="cuda"))
        results["loss"].mul_(2)
        (results["loss"] + results["scores"].mul(3).sum()).backward()
    assert list(results) == ["loss", "scores"]
