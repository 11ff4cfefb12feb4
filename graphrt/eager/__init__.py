"""The eager path: the public region, which flushes what earlier backwards requested, and the eager runner."""

from graphrt.eager.autocast import fp8_autocast

__all__ = ["fp8_autocast"]
