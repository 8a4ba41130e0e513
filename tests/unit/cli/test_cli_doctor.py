"""``torchspmd doctor``: what it tries, what it says, how it ends."""

import json

import torch
import torch.distributed as dist

from torchspmd._cli import doctor, main

FEATURES = [
    "torch",
    "simulated ranks (trace, lock, fake_mesh)",
    "styles and plans (parallelize_module)",
    "the step as one graph (compile)",
    "real ranks on this CPU (check_parity, run_ranks)",
    "rehearsals of scripts for GPUs (predict, search)",
    "real ranks on GPUs",
    'compile(backend="cudagraph")',
    'compile(backend="inductor")',
    "plans of Hugging Face models",
    "the pytest plugin",
]


def use(monkeypatch, *features):
    monkeypatch.setattr(doctor, "_FEATURES", features)


def fail(error):
    def check():
        raise error

    return check


def test_everything_that_the_tests_need_works_here(capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [feature["feature"] for feature in told["features"]] == FEATURES
    assert all(f["works"] for f in told["features"] if not f["optional"])
    assert torch.__version__.startswith(told["versions"]["torch"])  # without +cu130
    assert "CPU cores" in told["machine"]
    assert not dist.is_initialized()


def test_a_feature_that_should_work_and_does_not(monkeypatch, capsys):
    use(
        monkeypatch,
        ("tracing", fail(KeyError("allreduce_")), False),
        ("GPUs", fail(doctor._Missing("there is none")), True),
        ("plans", lambda: "all kinds", False),
    )
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.split("\n\n", 1)[1] == (
        "FAILS  tracing: KeyError: 'allreduce_'\n"
        "no     GPUs: there is none\n"
        "works  plans: all kinds\n"
        "\n"
        "1 of 3 should work here and do not.\n"
    )


def test_what_needs_other_hardware_is_no_fault(monkeypatch, capsys):
    use(monkeypatch, ("GPUs", fail(doctor._Missing("there is none")), True))
    assert main(["doctor"]) == 0
    assert "All is well: what does not work needs other" in capsys.readouterr().out
    use(monkeypatch, ("plans", lambda: "all kinds", False))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\n\nAll is well.\n")


def _detail(check):
    finding = doctor._try("it", check, False)
    return finding.works, finding.detail


def test_torch_that_is_too_old_or_newer_than_the_tests(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert _detail(doctor._check_version) == (
        False,
        "2.9.1 is too old: pip install 'torch>=2.11'",
    )
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    assert _detail(doctor._check_version) == (
        True,
        "2.15.0, newer than what was tested (up to 2.13)",
    )
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    assert _detail(doctor._check_version) == (
        True,
        "2.11.0, supported; the tests run with 2.13",
    )
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert _detail(doctor._check_version) == (True, "2.13.0")


def test_gloo_without_a_network(monkeypatch):
    error = RuntimeError("[enforce fail] resolve: no such host\nmore")
    monkeypatch.setattr(doctor, "_group", fail_with(error))
    assert _detail(doctor._check_gloo) == (
        False,
        "gloo cannot start: [enforce fail] resolve: no such host. It takes the network "
        "interface of this host's name: name another one, as in GLOO_SOCKET_IFNAME=lo",
    )


def fail_with(error):
    def group(backend):
        raise error

    return group


def test_what_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "g++-13")
    works, detail = _detail(doctor._check_nccl)
    assert not works
    assert detail.startswith("this torch was built without CUDA;")
    assert _detail(doctor._check_inductor) == (
        False,
        "there is no C++ compiler (g++-13, clang++): install one, or name it in CXX",
    )
    assert _detail(lambda: doctor._package("no_such_package")) == (
        False,
        "no_such_package is not installed: pip install no_such_package",
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _detail(doctor._check_cuda_graphs) == (
        False,
        "there is no CUDA device here, or its driver does not answer",
    )
