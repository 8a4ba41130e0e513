"""Hardware files: the package's own, a user's, and what is wrong with one."""

from pathlib import Path

import pytest

from torchspmd.errors import UsageError
from torchspmd.predict import hardware
from torchspmd.predict.hardware import known_gpu, load_gpu, load_network

FOLDER = Path(hardware.__file__).parent / "hardware"
GPUS = """
a100 a100-40gb a100-pcie b200 h100 h100-500w h100-pcie h200
""".split()
NETWORKS = """
efa-400 ethernet-100 ethernet-25 ib-hdr100 ib-hdr200 ib-ndr400 ib-xdr800 roce-100
roce-200 roce-400
""".split()


def test_the_files_are_those_that_the_docs_name():
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == GPUS
    folder = FOLDER / "networks"
    assert sorted(path.stem for path in folder.glob("*.toml")) == NETWORKS


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_what_memory_and_time_need(name):
    gpu = load_gpu(name)
    total = gpu.nbytes("total")
    assert 39 * 2**30 < total < 192 * 2**30
    assert gpu.nbytes("context") + gpu.nbytes("nccl_communicator") < 0.04 * total
    assert gpu.number("flops.bfloat16") > gpu.number("flops.bfloat16_achieved") > 2e14
    assert gpu.number("bandwidth.memory") > 1e12
    assert gpu.number("launch.eager") > gpu.number("launch.compiled")
    assert all(figure.source for figure in gpu.figures.values())
    hopper = float(gpu.compute_capability) >= 9
    assert gpu.nbytes("cublas_workspace") == (32 << 20 if hopper else 8519680)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_a_rate(name):
    network, bits = load_network(name), float(name.lstrip("abcdefhinorstx-"))
    ports = 8 if "TCP" in network.title else 1  # GPUs of one
    assert network.number("network.port") == bits * 1e9 / 8 / ports
    assert 0.5 < network.number("network.efficiency") < 1


@pytest.mark.parametrize(
    ("title", "name", "is_known"),
    [
        ("NVIDIA H200", "h200", True),
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA H100 PCIe", "h100-pcie", True),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100 80GB PCIe", "a100-pcie", True),
        ("NVIDIA L4", "h100", False),
    ],
)
def test_a_gpu_is_known_by_the_title_that_cuda_gives(title, name, is_known):
    gpu, is_same = known_gpu(title)
    assert (gpu.name, is_same) == (name, is_known)


def test_what_was_measured_belongs_to_the_file_that_gives_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "h100-500w"\n[power]\nlimit = { value = 400, source = "me" }\n'
    )
    mine = load_gpu(str(path))
    owners = {
        "power.limit": "mine",
        "bandwidth.memory": "h100-500w",
        "collectives.all_reduce": "h100",
    }
    for key, name in owners.items():
        assert mine.measured_on(key).name == name


def test_rows_are_sorted_by_size():
    for name in GPUS:
        rows = load_gpu(name).figures["collectives.all_reduce"].value
        assert list(rows) == sorted(rows)


def test_names_are_found_in_any_case():
    assert load_gpu("H100").title == "NVIDIA H100 SXM 80GB"


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(
        UsageError,
        match=r"There is no GPU 'v100': choose one of a100, a100-40gb, a100-pcie, b200, "
        r"h100, h100-500w, h100-pcie, h200, or give the path of a TOML file of your own",
    ):
        load_gpu("v100")
    with pytest.raises(
        UsageError, match="no network 'x': choose one of efa-400, ether"
    ):
        load_network("x")
    with pytest.raises(UsageError, match=r"no GPU 'none\.toml'"):
        load_gpu("none.toml")


def test_a_file_of_the_users_own(tmp_path):
    path = tmp_path / "mine.toml"
    text = (FOLDER / "h100.toml").read_text()
    path.write_text(text.replace("NVIDIA H100 SXM 80GB", "Mine"))
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.title) == ("mine", "Mine")
    assert gpu.figures == load_gpu("h100").figures


def test_every_problem_of_a_file_is_told_at_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[memory]\ntotal = 5\ncontext = { value = -1, source = 'x' }\n"
        "kernels = { value = 1, source = '' }\n"
        "cublas_workspace = { value = [[1, true]], source = 'x' }\n"
    )
    with pytest.raises(UsageError) as caught:
        load_gpu(str(path))
    text = str(caught.value)
    for key in ("total", "context", "kernels", "cublas_workspace"):
        assert f"memory.{key} is not a table with a value" in text
    assert "memory.nccl_library is missing" in text
    assert "are examples" in text


@pytest.mark.parametrize("text", ["[memory", "\0"])
def test_a_file_that_is_no_toml(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"GPU file .*mine\.toml: .*\(at "):
        load_gpu(str(path))


def test_a_figure_that_is_not_there_is_asked_for_by_name():
    with pytest.raises(
        UsageError, match=r"of h100 has no flops\.int4: add int4 = .* \[flops\]"
    ):
        load_gpu("h100").number("flops.int4")
    with pytest.raises(UsageError, match="has rows, not a number, for collectives"):
        load_gpu("h100").number("collectives.all_reduce")


def test_a_file_that_is_like_another_gives_only_what_differs(tmp_path):
    path = tmp_path / "capped.toml"
    path.write_text(
        'title = "Capped"\nlike = "h100"\n[power]\n'
        'limit = { value = 350, source = "nvidia-smi -pl 350" }\n'
    )
    capped, whole = load_gpu(str(path)), load_gpu("h100")
    assert (capped.name, capped.compute_capability) == ("capped", "9.0")
    assert capped.number("power.limit") == 350
    assert capped.number("flops.bfloat16") == whole.number("flops.bfloat16")
    path.write_text('like = "v100"\n')
    with pytest.raises(UsageError, match="There is no GPU 'v100'"):
        load_gpu(str(path))


def test_a_misspelt_figure_is_refused_and_one_of_another_version_is_not(tmp_path):
    path = tmp_path / "capped.toml"
    text = 'like = "h100"\n[powr]\nlimit = { value = 500, source = "me" }\n'
    path.write_text(text + '[flops]\nbfloat_16 = { value = 1e14, source = "me" }\n')
    with pytest.raises(UsageError) as caught:
        load_gpu(str(path))
    assert "powr.limit is not known, but power.limit is" in str(caught.value)
    assert "flops.bfloat_16 is not known, but flops.bfloat16 is" in str(caught.value)
    path.write_text(
        'like = "h100"\n[kernels]\nof_old = { value = 1, source = "me" }\n'
        '[collectives]\nall_reduce_2x3 = { value = 1, source = "me" }\n'
    )
    assert load_gpu(str(path)).number("kernels.of_old") == 1
