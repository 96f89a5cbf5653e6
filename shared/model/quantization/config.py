"""Which of a model's weights are quantised, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.quantization.names import ProjectionNames

# What is done to a projection's input when activations have 16 bits: each token's is divided by a
# scale of its own, all are divided by the scale that the checkpoint has, or nothing.
Activations = Literal["token", "static", "none"]
# Projections that have no part in the speed of a step, or whose result is compared: they are
# quantised only if a checkpoint has them so.
KEPT = ("lm_head", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Weights in FP8 (e4m3), with a scale for each block of them.

    Attributes:
        rows: outputs of a block; None: all of a projection's.
        columns: inputs of a block; None: all. With blocks of inputs, a token's input has a scale
            for each, too.
        activations: what is done to inputs.
    """

    name: ClassVar[str] = "fp8"
    rows: int | None
    columns: int | None
    activations: Activations = "token"

    @property
    def units(self) -> tuple[int | None, int | None]:
        """Outputs and inputs that are quantised together; None: all."""
        return self.rows, self.columns


# Of AWQ; of GPTQ, whose first version stores zeros less one; of compressed-tensors.
Int4Layout = Literal["awq", "gptq", "gptq_v2", "packed"]


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Weights in INT4, with a scale and a zero for each group of inputs.

    Attributes:
        layout: of the checkpoint's tensors.
        group: inputs of a group; None: all.
        symmetric: whether all zeros are 8 and not in the checkpoint.
        ordered: whether the checkpoint says which inputs are in a group.
    """

    name: ClassVar[str] = "int4"
    layout: Int4Layout
    group: int | None
    symmetric: bool = False
    ordered: bool = False

    @property
    def units(self) -> tuple[int | None, int | None]:
        """Outputs and inputs that are packed, or quantised together; None: all."""
        return 8, 8 if self.group is None else math.lcm(8, self.group)


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Weights of experts in MXFP4: numbers of e2m1, with a power of two for each 32 inputs."""

    name: ClassVar[str] = "mxfp4"

    @property
    def units(self) -> tuple[int | None, int | None]:
        """Outputs and inputs that are quantised together."""
        return 1, 32


LinearFormat = Fp8Format | Int4Format  # the formats that projections may have
WeightFormat = LinearFormat | Mxfp4Format


@dataclass(frozen=True, slots=True)
class FormatGroup:
    """Projections that have one format.

    Attributes:
        format: their format.
        targets: their names; None: all.
    """

    format: WeightFormat
    targets: ProjectionNames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The quantised weights of a model.

    Attributes:
        dialect: `quant_method` of config.json, or the name of what quantises a checkpoint.
        groups: the formats, in the order in which they are looked for.
        ignored: names of projections that are not quantised.
        kept: last names of projections, or of what has them, that are not quantised by default.
        while_loading: whether the weights are quantised while they are loaded; otherwise the
            checkpoint has them so.
        quantised: the projections that are quantised in the checkpoint's files, which know best;
            None if they were not read.
    """

    dialect: str
    groups: tuple[FormatGroup, ...]
    ignored: ProjectionNames = field(default_factory=ProjectionNames)
    kept: tuple[str, ...] = ()
    while_loading: bool = False
    quantised: frozenset[str] | None = None

    @property
    def kinds(self) -> str:
        """The kinds of formats, such as "fp8", with commas between several."""
        return ", ".join(sorted({group.format.name for group in self.groups}))

    @property
    def converts(self) -> bool:
        """Whether loading gives linear layers another form than the checkpoint has."""
        are_fp8 = all(isinstance(group.format, Fp8Format) for group in self.groups)
        return self.while_loading or not are_fp8

    @property
    def unit(self) -> int:
        """Numbers that are quantised together, in each dimension: weights are cut between them."""
        formats = (group.format for group in self.groups)
        return math.lcm(*(size for form in formats for size in form.units if size is not None))

    def format_of(self, name: str) -> WeightFormat | None:
        """Return the format of a projection's weight; None if it is not quantised.

        Args:
            name: of the projection in the model here, such as `model.layers.0.mlp.up_proj`.

        Raises:
            ModelLoadError: the files have the weight quantised, and config.json does not say in
                which of several formats; one line.
        """
        if self.quantised is None:
            is_kept = any(part in self.kept for part in name.split(".")[-2:])
            if is_kept or self.ignored.have(name):
                return None
        elif name not in self.quantised:
            return None
        for group in self.groups:
            if group.targets is None or group.targets.have(name):
                return group.format
        if self.quantised is None:
            return None
        # The file has the weight quantised, by a class of layers that has another name here.
        if len({group.format for group in self.groups}) > 1:
            raise ModelLoadError(
                f"{name} is quantised, but none of the config_groups in config.json names it: add "
                "it to the targets of the group that has its format"
            )
        return self.groups[0].format


FP8_WHILE_LOADING = QuantConfig(
    dialect="fp8",
    groups=(FormatGroup(Fp8Format(rows=1, columns=None)),),
    kept=KEPT,
    while_loading=True,
)
