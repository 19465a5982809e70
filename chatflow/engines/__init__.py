"""What asks a model: `LiteLLMEngine` for real ones, `ScriptedEngine` for tests and demonstrations."""

from __future__ import annotations

from chatflow.engines.litellm import LiteLLMEngine
from chatflow.engines.scripted import ScriptedEngine

__all__ = ["LiteLLMEngine", "ScriptedEngine"]
