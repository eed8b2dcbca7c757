"""The planner: what it reads, what it predicts, and what it says."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from powersgd import calibration, forecast, planner
from powersgd.__main__ import main
from powersgd.costs import Algorithm, Costs, Exchange, Job, Link, Method, split_into_buckets
from powersgd.forecast import BF16, PLAIN, advise, predict
from powersgd.layout import ParameterSpec
from powersgd.models import Layer, read_layers
from powersgd.units import format_bytes, format_rate, format_time, parse_rate, parse_time
from powersgd.workloads import WORKLOADS

FREE = Costs("nothing", (1, 4), (0.0, 0.0), (0.0, 0.0), 0.0, 0.0, 0.0, 0.0)
BITS = 8 / 0.95  # per byte of payload
LINK = Link(BITS * 1e6, 0.001)  # a megabyte per second, a millisecond
RANK1 = Method(Exchange.POWERSGD, 1)


def _layer(*shape: int) -> Layer:
    return Layer("x".join(map(str, shape)), ParameterSpec.of(torch.empty(shape, device="meta")))


def _job(*layers: Layer, workers: int = 4, compute_s: float = 0.0, costs: Costs = FREE) -> Job:
    return Job(layers, workers, compute_s, costs)


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("square", 24 * 2**20),
        ("resnet18", 11_173_962),
        ("resnet50", 25_557_032),
        ("lstm", 28_949_319),
        ("gpt", 67_736_832),
        ("gpt2", 124_439_808),
        ("vit_b", 86_567_656),
        ("t5_large", 737_668_096),
    ],
)
def test_workloads_have_as_many_parameters_as_the_models(name: str, numel: int) -> None:
    assert sum(layer.spec.numel for layer in read_layers(name)) == numel
    assert name in WORKLOADS


# What is read


def test_shapes_may_be_written_down() -> None:
    layers = read_layers("512x256,64x3x3x3,7")
    assert [layer.spec.shape for layer in layers] == [(512, 256), (64, 3, 3, 3), (7,)]


def make_model() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(5, 7), "norm": nn.BatchNorm1d(7), "b": nn.Linear(5, 7)})
    model["b"].weight = model["a"].weight
    model["norm"].bias.requires_grad = False
    return model


def make_on_cpu_alone() -> nn.Module:
    model = make_model()
    assert model["a"].weight.sum().item() is not None  # raises on the meta device
    return model


NAMES = ["a.weight", "a.bias", "norm.weight", "b.bias"]


@pytest.mark.parametrize("function", ["make_model", "make_on_cpu_alone"])
def test_a_module_is_read_without_tied_and_frozen_parameters(function: str) -> None:
    assert [layer.name for layer in read_layers(f"tests.test_planner:{function}")] == NAMES


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_a_state_dict_is_read_without_tied_tensors_and_statistics(
    key: str | None, tmp_path: Path
) -> None:
    content = make_model().state_dict()
    path = tmp_path / "model.pt"
    torch.save(content if key is None else {"epoch": 3, key: content}, path)
    layers = read_layers(str(path))
    assert [x.name for x in layers] == ["a.weight", "a.bias", "norm.weight", "norm.bias", "b.bias"]
    assert [x.spec.shape for x in layers] == [(7, 5), (7,), (7,), (7,), (7,)]


def test_the_bytes_of_each_dtype_are_known(tmp_path: Path) -> None:
    half, numbers = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    wide = torch.zeros(3, 4, dtype=torch.complex64)
    torch.save({"half": half, "numbers": numbers, "wide": wide}, tmp_path / "model.pt")
    assert [x.nbytes for x in read_layers(str(tmp_path / "model.pt"))] == [24, 96]
    entries = {
        "half": {"dtype": "BF16", "shape": [3, 4]},
        "numbers": {"dtype": "I64", "shape": [2]},
        "__metadata__": {},
    }
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(40)
    (tmp_path / "model.safetensors").write_bytes(content)
    (layer,) = read_layers(str(tmp_path / "model.safetensors"))
    assert (layer.name, layer.spec.shape, layer.nbytes) == ("half", (3, 4), 24)


@pytest.mark.parametrize(
    ("text", "value"),
    [("100Mbit", 1e8), ("2.5 Gbit/s", 2.5e9), ("64kbit", 64e3), ("8.2Gbit", 8.2e9)],
)
def test_rates_are_read(text: str, value: float) -> None:
    assert parse_rate(text) == value


def test_times_are_read_and_written() -> None:
    times = [parse_time(text) for text in ("0s", "100us", "1.5 ms", "350ms")]
    assert times == [0, 1e-4, 1.5e-3, 0.35]
    for wrong in ("fast", "1", "-1ms", "1m"):
        with pytest.raises(ValueError, match="is no time"):
            parse_time(wrong)
    for wrong in ("1", "0Gbit", "-1Mbit", "1GB", "infbit"):
        with pytest.raises(ValueError, match="is no link rate"):
            parse_rate(wrong)
    assert [format_time(s) for s in (0.0123, 1.5, 99e-6, 0.9996)] == [
        *("12.3 ms", "1.50 s", "99.0 us", "1.00 s"),
    ]
    assert format_rate(999.9e6) == "1.00 Gbit/s"
    assert format_bytes(183_740) == "184 kB"


# What is predicted


def test_an_all_reduce_costs_what_the_alpha_beta_model_says() -> None:
    for workers, ring, tree in ((2, 2e-3 + 1, 2e-3 + 2), (4, 6e-3 + 1.5, 4e-3 + 2)):
        for algorithm, right in (("ring", ring), ("tree", tree), ("best", min(ring, tree))):
            link = replace(LINK, algorithm=Algorithm(algorithm))
            assert FREE.all_reduce_s(1_000_000, workers, link) == pytest.approx(right)
    tiny = FREE.all_reduce_s(4, 1024, LINK)  # a tree of ten levels, up and down
    assert tiny == pytest.approx(20 * 1e-3 + 8e-6)
    assert FREE.all_reduce_s(4, 1, LINK) == 0
    host = replace(FREE, message_s=0.002, byte_s=3e-6)
    assert host.all_reduce_s(1_000_000, 2, LINK) == pytest.approx(2 * 0.003 + 4)


def test_buckets_are_filled_from_the_end_and_the_first_is_smaller() -> None:
    layers = tuple(_layer(512, 512) for _ in range(7))  # a MiB each
    sizes = [len(bucket) for bucket in split_into_buckets(layers, 2)]
    assert sizes == [1, 2, 2, 2]
    assert split_into_buckets(layers, 2)[0] == (layers[-1],)
    assert [len(bucket) for bucket in split_into_buckets(layers[:1], 25)] == [1]


def test_plain_averaging_hides_behind_backward() -> None:
    a, b = _layer(1000, 1000), _layer(500, 500)  # 4 MB and 1 MB; b fills the first bucket
    link, layers = replace(LINK, latency_s=0.0), (a, b)
    ring = 1.5  # bytes travel 2 * 3 / 4 times
    job = replace(_job(*layers), bucket_cap_mb=0.5)
    assert job.step_s(PLAIN, link) == pytest.approx(ring * 5)
    # Forward takes 30 s. Backward ends after 12 more with b, after 60 in all with a.
    slow = replace(job, compute_s=90.0)
    assert slow.step_s(PLAIN, link) == pytest.approx(90 + ring * 4)
    assert slow.step_s(BF16, link) == pytest.approx(90 + ring * 2)
    copied = replace(slow, costs=replace(FREE, copy_s=2e-5))
    assert copied.step_s(PLAIN, link) == pytest.approx(90 + 1.25e6 * 2e-5 + ring * 4)
    # The link is the bottleneck: it starts with b and is never idle.
    fast = replace(job, compute_s=0.9)
    assert fast.step_s(PLAIN, link) == pytest.approx(0.3 + 0.6 / 5 + ring * 5)


def test_powersgd_sends_p_and_q_and_pays_for_its_work() -> None:
    costs = replace(FREE, element_s=(3e-6, 6e-6), group_s=(0.3, 0.3))
    job = _job(_layer(1000, 1000), _layer(10), costs=costs)
    link, ring = replace(LINK, latency_s=0.0), 1.5e-6
    third = (1_000_000 * 3e-6 + 0.3) / 3
    sent = ring * 4 * (1000 + 10 + 1) + ring * 4 * 1000
    assert job.step_s(RANK1, link) == pytest.approx(3 * third + sent)
    assert job.step_s(Method(Exchange.POWERSGD, 3), link) == pytest.approx(
        1_000_000 * 5e-6 + 0.3 + ring * 4 * (6000 + 11)  # between the ranks measured: a line
    )
    with_compute = replace(job, compute_s=10.0)
    assert with_compute.step_s(RANK1, link) == pytest.approx(10 + 3 * third + sent)


def test_break_even_is_where_both_take_as_long() -> None:
    costs = replace(FREE, element_s=(1e-8, 1e-8))
    job = _job(_layer(1000, 1000), costs=costs)
    rate = job.break_even_bits_per_s(RANK1, PLAIN, LINK)
    at = replace(LINK, bits_per_s=rate)
    assert job.step_s(RANK1, at) == pytest.approx(job.step_s(PLAIN, at))
    no_latency = replace(LINK, latency_s=0.0)
    rate = job.break_even_bits_per_s(RANK1, PLAIN, no_latency)
    # 10 ms of work are worth the 4,000,000 - 8004 bytes that need not travel 1.5 times.
    assert rate == pytest.approx(1.5 * (4_000_000 - 8004) * BITS / 0.01)
    assert _job(_layer(3, 3)).break_even_bits_per_s(RANK1, PLAIN, LINK) == 0
    assert _job(_layer(1000, 1000)).break_even_bits_per_s(RANK1, PLAIN, no_latency) == math.inf


def test_the_advice_says_use_dont_or_never() -> None:
    costs = replace(FREE, element_s=(1e-8, 1e-8))
    job = _job(_layer(1000, 1000), costs=costs)
    slow = advise(predict(job, LINK), LINK)
    assert slow.startswith("Use PowerSGD: at 8.42 Mbit/s, rank 4 takes")
    assert "it pays up to rank 32" in slow
    fast = Link(1e12, 0.0)
    said = advise(predict(job, fast), fast)
    assert said.startswith("Don't use PowerSGD here: at 1.00 Tbit/s the fastest rank, 1, takes")
    assert "break even on a link of" in said
    vectors = _job(_layer(100_000))
    assert "would not pay on any link" in advise(predict(vectors, LINK), LINK)
    near = replace(LINK, bits_per_s=0.99 * job.break_even_bits_per_s(RANK1, BF16, LINK))
    assert advise(predict(job, near), near).startswith("It hardly matters")


def test_floats_are_those_of_the_design() -> None:
    job = replace(_job(*read_layers("resnet18")), min_compression_rate=0.1)
    floats = {rank: forecast.count_sent_bytes(job, rank) / 4 for rank in (1, 2, 4, 7)}
    assert floats == {1: 45_935, 2: 82_260, 4: 154_910, 7: 263_885}


def test_calibration_measures_what_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LARGE", [(256, 256)] * 2)
    monkeypatch.setattr(calibration, "SMALL", [(33 + i, 40) for i in range(4)])
    monkeypatch.setattr(calibration, "LARGE_BYTES", 2**20)
    costs = calibration.calibrate()
    assert costs.ranks == (1, 2, 4, 8, 16, 32)
    assert all(
        value > 0 for value in (*costs.element_s, costs.cast_s, costs.copy_s, costs.message_s)
    )
    assert costs.byte_s >= 0
    assert not torch.distributed.is_initialized()


# The command


def _plan(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def test_the_command_shows_saves_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    link = ["--link", "1Gbit", "--workers", "16,4096", "--compute", "0.1s"]
    assert _plan("1024x512,7,3x3", *link, "--json", save, "--plot", picture) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "a vector" in output
    assert "rate 1.5 is not over 2" in output
    assert "Use PowerSGD" in output
    assert "4,096" in output
    content = json.loads(save.read_text())
    first, vector, tiny = content["layers"]
    assert (first["is_compressed"], first["sent_numel"]) == (True, 1536)
    assert first["rate"] == pytest.approx(1024 * 512 / 1536)
    assert (vector["reason"], tiny["sent_numel"]) == ("a vector", 9)
    assert [p["workers"] for p in content["predictions"]] == [16, 4096]
    assert content["predictions"][0]["methods"][2]["sent_bytes"] == 4 * (1536 + 7 + 9)
    assert "rank 4" in picture.read_text() or picture.stat().st_size > 5000


def test_the_command_of_the_readme_gives_advice(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (command,) = re.findall(r"<!-- plan example -->\n```bash\npowersgd (.*)\n```", text)
    assert main(command.split()) == 0
    assert "PowerSGD" in capsys.readouterr().out.rpartition("\n\nAssumed")[0]


def test_costs_are_written_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    monkeypatch.setattr(calibration, "calibrate", lambda device: replace(FREE, source="a test"))
    assert _plan("512x256", "--link", "1Gbit", "--calibrate", "--costs", path) == 0
    assert _plan("512x256", "--link", "1Gbit", "--costs", path) == 0
    assert capsys.readouterr().out.count("Costs: a test.") == 2
    assert planner.calibration.load(path) == replace(FREE, source="a test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is no workload"),
        (["no_such_module:function"], "cannot be loaded: No module named"),
        (["tests.test_planner:nothing"], "has no attribute 'nothing'"),
        (["math:cos"], "math:cos() failed: TypeError"),
        (["time:time"], "returned a float, but no module"),
        (["resnet18", "--link", "fast"], "--link: 'fast' is no link rate"),
        (["resnet18", "--latency", "5"], "--latency: '5' is no time"),
        (["resnet18", "--workers", "1"], "must be from 2 to 1000000"),
        (["resnet18", "--workers", "many"], "'many' must be numbers such as 16"),
        (["resnet18", "--rank", "0"], "--rank is 0, but must be from 1"),
        (["resnet18", "--min-compression-rate", "0"], "must be a finite number > 0"),
        (["resnet18", "--plot", "x.png"], "need --link"),
        (["resnet18", "--link", "1Gbit", "--plot", "x.jpg"], "must end in .png or .svg"),
        (["resnet18", "--json", "/no/such/x.json"], "there is no directory /no/such"),
        (["resnet18", "--costs", "/no/such/x.json"], "holds no costs"),
        (["resnet18", "--device", "tpu"], "must be cpu or cuda"),
        (["resnet18", "--algorithm", "star"], "star"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_broken_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.pt", "model.safetensors"):
        (tmp_path / name).write_bytes(b"\x00\x01broken")
        assert _plan(tmp_path / name) == 2
    torch.save({"step": torch.tensor(3)}, tmp_path / "empty.pt")
    assert _plan(tmp_path / "empty.pt") == 2
    error = capsys.readouterr().err
    assert "cannot be read as a state_dict" in error
    assert "is no safetensors file" in error
    assert "has no floating-point parameters" in error
    assert error.count("\n") == 3
