"""Configuration of the engine and of the Serve application."""

from raylm.config.engine import CacheConfig, EngineConfig, ModelConfig, RuntimeConfig, SchedulerConfig

__all__ = ["CacheConfig", "EngineConfig", "ModelConfig", "RuntimeConfig", "SchedulerConfig"]
