"""The settings of a run: what the options say, what the preset fills in, and what can be refused before anything is made.

No torch here: a mistyped option is answered at once.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from graphrt.presets import PRESETS, ModelShape

__all__ = ["CHOICES", "InputError", "Settings", "as_sentence", "change_settings", "is_settings_file", "make_settings", "options_of"]


class InputError(ValueError):
    """What the user gave cannot be used: one sentence that names it, one of remedy. Nothing was written."""


CHOICES = {
    "precision": ("fp8", "bf16", "fp32"),
    "backward_accum": ("accurate", "fast"),
    "weight_transpose": ("kept", "again"),
    "checkpointing": ("none", "block"),
    "mode": ("auto", "graph", "eager"),
    "token_dtype": ("auto", "uint16", "uint32"),
}

_COUNTS = ("vocab_size", "seq_len", "batch_size", "grad_accum", "steps", "eval_every", "save_every", "slots_every")
#: What may differ when a run is resumed: none of these changes which batches or which model it trains.
_CHANGEABLE = ("steps", "eval_every", "save_every", "slots_every", "mode", "device", "checkpointing", "backward_accum", "weight_transpose")
_MAX_COUNT = (1 << 31) - 1
_MAX_SHOWN = 60  # characters of a value that cannot be used
_TOKEN_MULTIPLE = 16  # of the contraction dimension of an FP8 GEMM


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes. Sequence lengths in tokens, batch sizes in sequences."""

    preset: str
    text: tuple[str, ...]  # absolute paths and patterns; empty for the default text
    tokens: str | None
    token_dtype: str
    vocab_size: int
    seq_len: int
    batch_size: int  # per optimizer step, all microbatches together
    grad_accum: int
    steps: int
    lr: float
    warmup: int  # steps over which the learning rate rises
    seed: int
    precision: str
    backward_accum: str  # of the FP8 products of the gradients
    weight_transpose: str  # where their transposed FP8 weights come from
    checkpointing: str
    mode: str
    device: str
    eval_every: int
    save_every: int
    slots_every: int  # steps between rows of slots_history.jsonl

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions."""
        return replace(PRESETS[self.preset].shape, vocab=self.vocab_size)

    @property
    def arithmetic(self) -> str:
        """The precision, and in brackets what its FP8 products do that those of most presets do not."""
        named = {"accumulating fast": self.backward_accum == "fast", "transposed weights made again": self.weight_transpose == "again"}
        changed = [name for name, is_changed in named.items() if is_changed and self.precision == "fp8"]
        return f"{self.precision} ({', '.join(changed)})" if changed else self.precision

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens one optimizer step sees."""
        return self.batch_size * self.seq_len

    def to_json(self) -> str:
        """One JSON object, a field a line."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, file: Path, remedy: str = "Start a new run with another --out.") -> "Settings":
        """What `to_json` wrote.

        Raises:
            InputError: the text is something else.
        """
        try:
            values = _saved_values(text)
            return _checked(cls(**{**values, "text": tuple(values["text"])}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{file} does not hold the settings of a run: {as_sentence(str(error))} {remedy}") from error


def _saved_values(text: str) -> dict[str, Any]:
    """Values by field name, each of its field's type."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None
    if not isinstance(values, dict):
        raise ValueError("it is not one JSON object.")
    if _is_whole(values.get("steps")):
        values.setdefault("slots_every", _slots_every(values["steps"]))  # runs of before there was one
    values.setdefault("backward_accum", "accurate")  # as above
    values.setdefault("weight_transpose", "kept")
    if values.keys() != {field.name for field in fields(Settings)}:
        raise ValueError("fields are missing or unknown.")
    for field in fields(Settings):
        if not _has_type(values[field.name], field.type):
            raise ValueError(f"{field.name} is {_cut(repr(values[field.name]))}.")
    if values["preset"] not in PRESETS:
        raise ValueError(f"there is no preset {_cut(repr(values['preset']))}, only {', '.join(PRESETS)}.")
    return values


def _has_type(value: object, kind: Any) -> bool:
    if kind == tuple[str, ...]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is int:
        return _is_whole(value)
    if kind is float:
        return isinstance(value, float) or _is_whole(value)
    return isinstance(value, kind)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def make_settings(options: Mapping[str, Any]) -> Settings:
    """Settings from the options given; the preset and the defaults fill in the rest.

    Args:
        options: values by field name; None, or an empty tuple, for an option left out.

    Raises:
        InputError: an option's value cannot be used, or two contradict each other.
    """
    given = _given(options)
    name = given.get("preset", "tiny")
    if name not in PRESETS:
        raise InputError(f"There is no preset {name!r}. Choose one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    steps = given.get("steps", preset.steps)
    is_count = isinstance(steps, int) and steps > 0
    defaults = {
        "preset": name, "text": (), "tokens": None, "token_dtype": "auto", "vocab_size": preset.shape.vocab,
        "seq_len": preset.seq_len, "batch_size": preset.batch_size, "grad_accum": 1, "steps": preset.steps, "lr": preset.lr,
        "warmup": min(100, steps // 10) if is_count else 0, "seed": 0, "precision": "fp8", "backward_accum": "accurate",
        "weight_transpose": preset.weight_transpose, "checkpointing": "none", "mode": "auto", "device": "auto",
        "eval_every": max(1, steps // 5) if is_count else 1, "slots_every": _slots_every(steps) if is_count else 1,
    }  # fmt: skip
    values = {**defaults, **given}
    _check_names(values)
    values["text"] = tuple(_absolute(pattern) for pattern in values["text"])
    values["tokens"] = values["tokens"] and _absolute(values["tokens"])
    return _checked(Settings(**{"save_every": values["eval_every"], **values}))


def change_settings(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Settings of a run to resume, with the options given now.

    Raises:
        InputError: an option differs that would make it another run, or its value cannot be used.
    """
    given = _given(options)
    asked = make_settings({**asdict(settings), **given})
    for name in given:
        before, now = getattr(settings, name), getattr(asked, name)
        if before != now and name not in _CHANGEABLE:
            raise InputError(
                f"The run to resume has {_flag(name)} {_shown(before)}, got {_shown(now)}. Leave the option out, or start a new run "
                "with another --out."
            )
    return asked


def options_of(settings: Settings) -> list[tuple[str, str]]:
    """(option, value) of all that has to be given for these settings: the preset, the data, and what differs from the defaults."""
    data = {"preset": settings.preset, "text": settings.text, "tokens": settings.tokens}
    defaults = make_settings({**data, "steps": settings.steps})
    # Steps decide other defaults, and --save-every follows --eval-every.
    expected = {**asdict(defaults), "steps": PRESETS[settings.preset].steps, "save_every": settings.eval_every}
    options = [("--preset", settings.preset)]
    options += [("--text", pattern) for pattern in settings.text]
    options += [] if settings.tokens is None else [("--tokens", settings.tokens)]
    others = ((name, value) for name, value in asdict(settings).items() if name not in data)
    return options + [(_flag(name), str(value)) for name, value in others if value != expected[name]]


def is_settings_file(file: Path) -> bool:
    """Whether this is the settings.json of a run, of whatever version."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.keys() >= {"preset", "precision", "grad_accum", "seq_len"}


def as_sentence(text: str) -> str:
    """The text with one full stop at its end, for a remedy to follow."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _checked(settings: Settings) -> Settings:
    for name in _COUNTS:
        _check_count(name, getattr(settings, name))
    for name, choices in CHOICES.items():
        if getattr(settings, name) not in choices:
            raise InputError(f"{_flag(name)} must be one of {', '.join(choices)}, got {_cut(repr(getattr(settings, name)))}.")
    _check_numbers(settings)
    _check_sizes(settings)
    return settings


def _check_names(values: Mapping[str, Any]) -> None:
    # An empty name would stand for the working directory.
    for name in ("text", "tokens"):
        if "" in (values[name] if name == "text" else (values[name],)):
            raise InputError(f"{_flag(name)} is given an empty name. Give a file, or leave the option out.")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{_flag(name)} must be a whole number of at least 1, got {value}.")
    if value > _MAX_COUNT:
        raise InputError(f"{_flag(name)} must be at most {_MAX_COUNT}, got {_cut(str(value))}.")


def _check_numbers(settings: Settings) -> None:
    if not 0 < settings.lr <= sys.float_info.max:
        raise InputError(f"--lr must be a number above 0, got {_cut(str(settings.lr))}. Leave it out for the preset's.")
    if settings.warmup < 0 or settings.warmup > settings.steps:
        warmup = _cut(str(settings.warmup))
        raise InputError(f"--warmup must be from 0 to --steps ({settings.steps}), got {warmup}. Leave it out for a tenth.")
    if not 0 <= settings.seed < 1 << 63:
        raise InputError(f"--seed must be a whole number from 0 to 2**63 - 1, got {_cut(str(settings.seed))}.")


def _check_sizes(settings: Settings) -> None:
    if settings.seq_len % _TOKEN_MULTIPLE:
        below = max(_TOKEN_MULTIPLE, settings.seq_len // _TOKEN_MULTIPLE * _TOKEN_MULTIPLE)
        raise InputError(f"--seq-len must be a multiple of {_TOKEN_MULTIPLE}, which FP8 GEMMs need, got {settings.seq_len}. Try {below}.")
    if settings.batch_size % settings.grad_accum:
        raise InputError(
            f"--batch-size {settings.batch_size} cannot be split into --grad-accum {settings.grad_accum} equal microbatches. "
            "Make it a multiple: it counts the sequences of all microbatches together."
        )
    if settings.text and settings.tokens:
        raise InputError("--text and --tokens are both given. Choose one.")
    if settings.tokens is None and settings.vocab_size < 256:
        raise InputError(f"--vocab-size must be at least 256 for text, whose tokens are bytes, got {settings.vocab_size}.")
    if settings.tokens is None and settings.token_dtype != "auto":
        raise InputError(f"--token-dtype {settings.token_dtype} goes with --tokens, which is not given. Leave it out for text.")


def _slots_every(steps: int) -> int:
    # Some 200 rows, however long the run: enough to see a scale move, and a few hundred KB.
    return max(1, steps // 200)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and value != ()}


def _absolute(pattern: str) -> str:
    # A resumed run may be started from another directory.
    return str(Path(pattern).expanduser().absolute())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: object) -> str:
    return (" ".join(map(str, value)) or "(the default text)") if isinstance(value, tuple) else str(value)
