"""Which kernels an engine takes, and that it says so at the start where they cannot run."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.execution import kernel_choice

CPU = torch.device("cpu")


def test_auto_takes_torch_on_the_cpu() -> None:
    assert kernel_choice.choose_ops("auto", CPU).backend == "torch"


@pytest.mark.parametrize("interpreted", [False, True])
def test_triton_runs_on_the_cpu_in_its_interpreter_alone(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    triton = pytest.importorskip("triton")
    load_ops("triton", "cpu")  # kernels become what they are when they are imported: for all tests
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    if interpreted:
        assert kernel_choice.choose_ops("triton", CPU).backend == "triton"
    else:
        with pytest.raises(ConfigError, match="--kernels torch"):
            kernel_choice.choose_ops("triton", CPU)


def test_missing_triton_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_nothing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(kernel_choice, "load_ops", load_nothing)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        kernel_choice.choose_ops("triton", torch.device("cuda"))
