"""Names for the annotations of families, whose modules must not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel as DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory as LayerFactory
else:
    DecoderModel = LayerFactory = Any
