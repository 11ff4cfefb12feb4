"""The captured path: static inputs, warmup, capture and replay; the recorder where there is no GPU."""
