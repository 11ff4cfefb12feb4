"""The models `graphrt train` knows by name. No torch here, so that listing them costs no import."""

from dataclasses import dataclass

__all__ = ["PRESETS", "ModelShape", "Preset"]


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Llama-style model; all but vocab and num_layers must be multiples of 16 for FP8."""

    num_layers: int
    width: int
    num_heads: int
    ffn: int
    vocab: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters: embedding, head, and per block qkv, out, w13, w2 and two norms."""
        block = 4 * self.width**2 + 3 * self.width * self.ffn + 2 * self.width
        return 2 * self.vocab * self.width + self.num_layers * block + self.width


@dataclass(frozen=True)
class Preset:
    """A shape and the settings that train it sensibly: what an option left out falls back to."""

    shape: ModelShape
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    about: str
    weight_transpose: str = "kept"  # "again" where weights take much of the memory

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens one optimizer step sees."""
        return self.seq_len * self.batch_size


PRESETS: dict[str, Preset] = {
    "tiny": Preset(ModelShape(4, 128, 4, 352, 256), 128, 8, 200, 3e-3, "bytes, a minute or two on two CPU cores"),
    "micro": Preset(ModelShape(12, 768, 12, 2048, 32768), 512, 1, 1000, 3e-4, "launch-bound: what graphs help most"),
    "125m": Preset(ModelShape(12, 768, 12, 2048, 32768), 1024, 8, 2000, 6e-4, "GPT-2 small's size"),
    "1b": Preset(ModelShape(16, 2048, 32, 5632, 32768), 2048, 4, 2000, 3e-4, "one GPU, FP8 pays off"),
    "8bslice": Preset(ModelShape(4, 4096, 32, 14336, 32768), 4096, 2, 1000, 2e-4, "four blocks of an 8B model", "again"),
}
