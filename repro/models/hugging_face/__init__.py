"""Configurations and checkpoints in the layout of Hugging Face `transformers`; see README.md of `repro.models`."""

from repro.models.hugging_face.checkpoint import load_hf, read_json, save_hf
from repro.models.hugging_face.convert import assemble, config_from_hf, describe, from_hf, take_apart, to_hf
from repro.models.hugging_face.families import FAMILIES, Reading, read
from repro.models.hugging_face.fields import Note

__all__ = [
    "FAMILIES", "Note", "Reading", "assemble", "config_from_hf", "describe", "from_hf", "load_hf", "read",
    "read_json", "save_hf", "take_apart", "to_hf",
]  # fmt: skip
