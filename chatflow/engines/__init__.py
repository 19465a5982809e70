"""What asks a model: `LiteLLMEngine` for real ones, `ScriptedEngine` for tests and demonstrations."""

from __future__ import annotations

from chatflow.engines.litellm import LiteLLMEngine
from chatflow.engines.scripted import ScriptedEngine, last_result, user_text

__all__ = ["LiteLLMEngine", "ScriptedEngine", "last_result", "user_text"]
