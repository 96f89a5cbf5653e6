"""Models that also take images, of which the text model is served: its fields and its tensors."""

from __future__ import annotations

from typing import Any

from pagewire.shared.model.fields import Fields

# Prefixes of the served tensors in checkpoints of older and newer releases, and those of the model
# here; then prefixes of tensors that are not loaded.
RENAMED_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
# Fields that such a config.json has outside of `text_config`, and that win over those inside.
_OUTER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")


def text_fields(fields: Fields, default: dict[str, Any], **changes: Any) -> Fields:
    """Return the fields of the text model.

    Args:
        fields: of config.json.
        default: the fields if the file has no `text_config`.
        changes: fields that replace those in `text_config`.

    Raises:
        ModelLoadError: `text_config` is not an object; one line.
    """
    text = fields.raw.get("text_config")
    text = default if text is None else text
    if not isinstance(text, dict):
        raise fields.error(f"text_config must be an object, not {text!r}")
    outer = {name: fields.raw[name] for name in _OUTER if fields.raw.get(name) is not None}
    return Fields({**text, **changes, **outer}, fields.source)
