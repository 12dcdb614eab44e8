"""How a run's updates are computed: what wins over what, what falls back, and what the cache survives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.accel import cache, hardware
from qfleet.accel.choose import Choice, Workload, as_config, explicit, key_of, resolve, restrict
from qfleet.accel.config import AccelConfig
from qfleet.accel.hardware import Hardware, cuda_obstacles, look
from qfleet.accel.precision import PRECISIONS
from qfleet.accel.table import EAGER, Settings, shipped

H200 = Hardware("cuda", "NVIDIA H200", (9, 0))
OLD = Hardware("cuda", "Tesla V100", (7, 0), {"precision": "tf32 and bf16 need compute capability 8.0"})
CPU = Hardware("cpu", "some processor, 2 cores", obstacles={"precision": "tf32 and fp16 are for GPUs"})
FAST = Settings(precision="bf16", compile=True, graphs=True, kernels=True, channels_last=True)


def workload(shape: tuple[int, ...] = (4,), kind: str = "rollout", envs: int = 16) -> Workload:
    leaf = {"shape": list(shape), "dtype": "float32"}
    return Workload({"kind": kind}, {"kind": "mlp"}, "adam", "", {"observation": leaf}, 2, envs, 128)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def choice(config: AccelConfig | None = None, on: Hardware = H200, **obstacles: str) -> Choice:
    return resolve(config or AccelConfig(), on, workload(), obstacles)


# ---------------------------------------------------------------- what wins


def test_a_cold_start_takes_the_table_by_hardware_and_observations() -> None:
    vectors, images = (shipped(H200, "rollout", inputs)[0] for inputs in ("vectors", "images"))
    assert (vectors.precision, images.precision) == ("tf32", "bf16")
    assert choice().settings == vectors
    assert choice().why == "shipped table for NVIDIA compute capability 9.0"
    assert resolve(AccelConfig(), H200, workload((4, 10, 10)), {}).settings == images
    assert choice(on=CPU).settings == Settings(kernels=True)


@pytest.mark.parametrize("device", [OLD, Hardware("rocm", "MI300"), Hardware("mps", "mps"), Hardware("xpu", "xpu")])
def test_devices_that_nobody_measured_are_eager(device: Hardware) -> None:
    assert choice(on=device).settings == EAGER


def test_a_probes_choice_wins_over_the_table_for_its_own_key_only() -> None:
    cache.store(key_of(H200, workload()), FAST, "probed on 2026-11-15: 2 steps/s against 1 eager")
    assert choice().settings == FAST
    assert choice().why.startswith("probed on 2026-11-15")
    other = Hardware("cuda", "NVIDIA H100", (9, 0))
    assert "shipped" in choice(on=other).why
    for different in (workload(envs=32), workload(kind="replay"), workload((5,))):
        assert "shipped" in resolve(AccelConfig(), H200, different, {}).why


def test_explicit_settings_win_over_both_and_the_rest_stays() -> None:
    cache.store(key_of(H200, workload()), FAST, "probed")
    found = choice(AccelConfig(precision="fp32", compile="off", graph_updates=64))
    assert found.settings == FAST.replace(precision="fp32", compile=False, graph_updates=64)
    assert found.why == "probed; accel.compile, accel.precision, accel.graph_updates set"


def test_what_a_probe_timed_is_not_said_of_other_settings() -> None:
    cache.store(key_of(H200, workload()), FAST, "probed on 2026-11-15: 2 steps/s against 1 eager")
    assert choice(AccelConfig(compile="off")).why == "probed on 2026-11-15; accel.compile set"
    assert choice(AccelConfig(compile="on")).why.startswith("probed on 2026-11-15: 2 steps/s against 1 eager; ")


def test_a_run_that_goes_on_keeps_its_settings_but_for_explicit_ones() -> None:
    cache.store(key_of(H200, workload()), FAST, "probed")
    kept = resolve(AccelConfig(), H200, workload(), {}, former=EAGER)
    assert (kept.settings, kept.why) == (EAGER, "as before the run was cut")
    changed = resolve(AccelConfig(precision="bf16"), H200, workload(), {}, former=EAGER)
    assert changed.settings == EAGER.replace(precision="bf16")


def test_recordings_asked_for_on_a_cpu_are_said_to_have_no_effect() -> None:
    line = choice(AccelConfig(graph_updates=64), CPU).line(CPU)
    assert "accel.graph_updates has no effect: nothing is recorded on a CPU" in line


any_settings = st.builds(
    Settings,
    precision=st.sampled_from(PRECISIONS),
    compile=st.booleans(),
    graphs=st.booleans(),
    graph_updates=st.integers(1, 4096),
    kernels=st.booleans(),
    channels_last=st.booleans(),
)


@given(any_settings)
@settings(max_examples=50, deadline=None)
def test_settings_asked_for_explicitly_are_what_is_used_unless_they_contradict(wanted: Settings) -> None:
    assert explicit(as_config(wanted)) == wanted.model_dump()
    found = choice(as_config(wanted))
    assert found.settings == wanted.replace(graphs=wanted.graphs and wanted.kernels)
    assert found.why.endswith(" set")
    assert "table" not in found.why


# ---------------------------------------------------------------- what falls back


@given(
    any_settings, st.dictionaries(st.sampled_from(["precision", "compile", "graphs", "kernels"]), st.just("because"))
)
@settings(max_examples=100, deadline=None)
def test_nothing_with_an_obstacle_is_used_and_each_thing_left_out_is_said(
    wanted: Settings, obstacles: dict[str, str]
) -> None:
    used, notes = restrict(wanted, obstacles, "cuda")
    rounded = wanted.precision in ("tf32", "bf16")  # older GPUs have float16
    assert used.precision == ("fp32" if "precision" in obstacles and rounded else wanted.precision)
    assert all(not getattr(used, name) for name in obstacles if name != "precision")
    assert not used.graphs or used.kernels
    changed = [name for name in Settings.model_fields if getattr(used, name) != getattr(wanted, name)]
    assert len(notes) == len(changed)


def test_one_line_says_what_is_used_why_and_what_is_not() -> None:
    line = choice(kernels="Triton is not installed", compile="Triton is not installed").line(H200)
    assert line == (
        "cuda: tf32, eager (shipped table for NVIDIA compute capability 9.0); compile off: Triton is not installed; "
        "kernels off: Triton is not installed; graphs off: they need our kernels"
    )
    assert choice(AccelConfig(precision="bf16"), CPU).line(CPU) == (
        "cpu: fp32, hand-written small network (shipped table for CPUs; accel.precision set); "
        "fp32 in place of bf16: the hand-written network has no other format"
    )


def test_a_cpu_computes_large_networks_in_bfloat16_if_told_to() -> None:
    none = {"kernels": "none for this network on a CPU"}
    assert choice(AccelConfig(), CPU, **none).settings.precision == "fp32"
    assert choice(AccelConfig(precision="bf16"), CPU, **none).settings.precision == "bf16"
    assert "tf32 and fp16 are for GPUs" in choice(AccelConfig(precision="tf32"), CPU, **none).line(CPU)


def test_float16_on_a_cpu_is_float32_and_a_line_says_so() -> None:
    assert "fp32 in place of fp16: " in choice(AccelConfig(precision="fp16"), CPU).line(CPU)
    assert choice(AccelConfig(precision="fp16"), OLD).settings.precision == "fp16"


def test_a_hand_written_network_is_not_compiled() -> None:
    found = choice(AccelConfig(compile="on"), CPU)
    assert (found.settings.kernels, found.settings.compile) == (True, False)
    alone = choice(AccelConfig(compile="on", kernels="off"), CPU)
    assert (alone.settings.kernels, alone.settings.compile) == (False, True)


def test_without_triton_or_a_compiler_no_kernel_and_no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert cuda_obstacles((9, 0)) == {}
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    assert set(cuda_obstacles((9, 0))) == {"kernels", "compile"}
    assert "C compiler" in cuda_obstacles((9, 0))["kernels"]
    assert "C++ compiler" in look(torch.device("cpu")).obstacles["compile"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton" in cuda_obstacles((9, 0))["compile"]
    assert "precision" in cuda_obstacles((7, 5))


def test_a_compiler_named_by_the_environment_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler -m64")
    assert "C compiler" in cuda_obstacles((9, 0))["compile"]


def test_why_there_is_no_cuda_is_said_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert hardware.why_no_cuda() == "The NVIDIA driver on your system is too old (found version 11040)."
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in hardware.why_no_cuda()


# ---------------------------------------------------------------- the cache


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_path() == tmp_path / "cache" / "choices.json"
    monkeypatch.delenv("QFLEET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_path() == tmp_path / "xdg" / "qfleet" / "choices.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_path() == Path.home() / ".cache" / "qfleet" / "choices.json"


def test_a_newer_choice_replaces_an_older_one_and_nothing_else(directory: Path) -> None:
    first, second = key_of(H200, workload()), key_of(H200, workload(envs=1))
    cache.store(first, EAGER, "one")
    cache.store(second, EAGER, "two")
    cache.store(first, FAST, "three")
    assert {entry.why for entry in cache.read()[0]} == {"two", "three"}
    found, complaint = cache.find(first)
    assert found is not None
    assert (found.settings, complaint) == (FAST, "")
    assert [path.name for path in directory.iterdir()] == ["choices.json"]


DAMAGED = {
    "empty": b"",
    "cut": b'{"format": 1, "entries": [{"key": {',
    "binary": b"\x80\x04\x95\x00",
    "a list": b"[]",
    "another format": b'{"format": 2, "entries": []}',
    "foreign settings": json.dumps(
        {"format": 1, "entries": [{"key": {}, "settings": {"precision": "fp8"}, "why": ""}]}
    ).encode(),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_cache_is_ignored_in_one_line_and_rewritten(what: str, directory: Path) -> None:
    directory.mkdir()
    (directory / "choices.json").write_bytes(DAMAGED[what])
    found = choice()
    assert found.settings == shipped(H200, "rollout", "vectors")[0]
    assert "choices.json is damaged" in found.line(H200)
    assert "\n" not in found.line(H200)
    cache.store(key_of(H200, workload()), FAST, "probed")
    assert choice() == Choice(FAST, "probed")


def test_a_cache_that_is_a_directory_is_ignored(directory: Path) -> None:
    (directory / "choices.json").mkdir(parents=True)
    assert "cannot be read" in choice().line(H200)


@pytest.mark.parametrize("version", ["torch", "triton", "qfleet"])
def test_other_versions_do_not_share_choices(version: str) -> None:
    key = key_of(H200, workload())
    other = {**key, "versions": {**key["versions"], version: "0.0"}}
    cache.store(other, FAST, "probed")
    assert cache.find(key) == (None, "")
    assert cache.find(other)[0] is not None
