"""The main job: train a language model, keep a run folder, stop and resume without losing a bit.

Batch i is a function of (seed, i) and the learning rate of (settings, i), so the trainer's state and a step number are all
that a checkpoint has to hold.
"""

import math
import resource
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from graphrt import __version__
from graphrt.bigram import bigram_loss
from graphrt.convert import quantization_state
from graphrt.data import Corpus, Split, Windows, load_default_text, load_text, load_tokens, sample_windows, split_corpus, validation_windows
from graphrt.interrupt import StopRequest
from graphrt.jobsetup import build_trainer, resolve_device
from graphrt.output import lost_output
from graphrt.parity import check_parity
from graphrt.progress import MetricsLog, RunProgress, make_progress, show_validation
from graphrt.ranges import listening
from graphrt.runfolder import RunFolder
from graphrt.runlock import FolderLock
from graphrt.settings import InputError, Settings, as_sentence
from graphrt.slothistory import SlotHistory
from graphrt.stepclock import ReplayClock
from graphrt.summary import Quality, SlotRow, next_commands, print_quality, print_slots, rows_to_json, slot_rows
from graphrt.tensorboard import EventLog, check_tensorboard
from graphrt.trainer import Trainer

__all__ = ["learning_rate", "load_corpus", "train"]

_MIN_EVALUATION_TOKENS = 1 << 13  # on the way: also at least as many as four steps see
_LEAST_EVALUATION_TOKENS = 1 << 11  # however short the run is
_FINAL_EVALUATION_TOKENS = 1 << 16
_EVALUATION_BATCH_TOKENS = 1 << 11  # at least: a microbatch may be tiny, and the host's work is the same for each
_FINAL_LR_FRACTION = 0.1


@dataclass
class Run:
    """A training run between its set-up and its summary."""

    settings: Settings
    folder: RunFolder
    console: Console
    corpus: Corpus
    split: Split
    device: torch.device
    trainer: Trainer
    step: int = 0  # optimizer steps done
    before: Settings | None = None  # of the run that is resumed
    progress: RunProgress | None = None  # the display that is open
    slots: SlotHistory | None = None
    events: EventLog | None = None
    wall_s_before: float = 0.0  # of the parts of the run that were resumed
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def unit(self) -> str:
        """What losses are shown in."""
        return "bits per byte" if self.corpus.is_bytes else "bits per token"


def train(
    settings: Settings,
    folder: RunFolder,
    console: Console,
    *,
    resume: bool = False,
    show_all_slots: bool = False,
    num_parity_steps: int = 0,
    use_tensorboard: bool = False,
) -> int:
    """Train to `settings.steps`, evaluate, and summarize.

    Args:
        settings: checked ones.
        folder: new, or the one to resume.
        console: where to show progress and the summary.
        resume: go on from the folder's checkpoint.
        show_all_slots: print every slot instead of the worst.
        num_parity_steps: at the end, compare that many captured steps with eager ones.
        use_tensorboard: write the metrics as TensorBoard events too; a resumed run goes on with those it has.

    Returns:
        The exit code: 0; 1 if the captured steps differ; after a clean stop 128 + n for signal n, 141 or 1 for a lost output.

    Raises:
        InputError: something given cannot be used; nothing was written.
    """
    with StopRequest(console.print, partial(lost_output, console)) as stop, FolderLock(folder.path) as lock:
        run = _prepare(settings, folder, console, lock, resume, use_tensorboard or (resume and folder.tensorboard_folder.is_dir()))
        with run.trainer, nullcontext() if run.events is None else closing(run.events):
            _introduce(run, resume)
            _train_steps(run, stop)
            _save(run)
            is_equal = True
            with stop.at_once():
                is_equal = _finish(run, stop, show_all_slots, num_parity_steps)
            if stop.is_set:
                return _report_stop(run, stop)
    return 0 if is_equal else 1


def _finish(run: Run, stop: StopRequest, show_all_slots: bool, num_parity_steps: int) -> bool:
    """What comes after the last checkpoint; whether captured steps equal eager ones, if that was asked."""
    loss = None if stop.is_set else _evaluate(run, _final_tokens(run.settings), stop)
    if loss is None:
        return True
    _summarize(run, loss, show_all_slots)
    is_equal = _check_parity(run, num_parity_steps) if num_parity_steps else True
    _suggest(run)
    return is_equal


def load_corpus(settings: Settings, run_folder: Path | None = None) -> Corpus:
    """The text or the tokens that the settings name, without what the run writes to its folder.

    Raises:
        InputError: they cannot be used.
    """
    if settings.tokens:
        return load_tokens(settings.tokens, settings.token_dtype, settings.vocab_size)
    return load_text(settings.text, run_folder) if settings.text else load_default_text()


def learning_rate(settings: Settings, step: int) -> float:
    """Learning rate of step `step`, counted from 0: a linear rise, then half a cosine down to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return settings.lr * (_FINAL_LR_FRACTION + (1 - _FINAL_LR_FRACTION) * cosine)


def _prepare(settings: Settings, folder: RunFolder, console: Console, lock: FolderLock, resume: bool, use_tensorboard: bool) -> Run:
    # The folder is made last, so that whatever is refused before leaves nothing behind.
    if resume:
        lock.acquire()
    else:
        folder.check_new()
    if use_tensorboard:
        check_tensorboard(folder.tensorboard_folder)
    corpus = load_corpus(settings, folder.path)
    split = split_corpus(corpus, settings.seq_len)
    device = resolve_device(settings)
    saved = folder.load_checkpoint(settings, corpus.fingerprint()) if resume else None
    if saved is not None and saved["step"] > settings.steps:
        raise InputError(f"The run has done {saved['step']} steps, more than --steps {settings.steps}. Give at least as many.")
    run = Run(settings, folder, console, corpus, split, device, build_trainer(settings, device))
    if saved is None:
        folder.create(settings, lock.acquire)
    else:
        _restore(run, saved)
    if run.trainer.state is not None:
        run.slots = SlotHistory(folder, run.trainer.state, settings.slots_every, settings.steps)
    if use_tensorboard:
        run.events = EventLog(folder.tensorboard_folder, run.step)
    return run


def _restore(run: Run, saved: dict) -> None:
    try:
        run.trainer.load_state_dict(saved["trainer"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        file = run.folder.checkpoint_file
        raise InputError(
            f"{file} does not fit the run's model: {as_sentence(_first_line(error))} Start a new run with another --out."
        ) from error
    run.step, run.before = saved["step"], run.folder.read_settings()
    run.wall_s_before = run.folder.read_summary().get("wall_s", 0.0)
    run.folder.drop_rows_after(run.step)
    run.folder.save_settings(run.settings)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _train_steps(run: Run, stop: StopRequest) -> None:
    settings = run.settings
    clock = ReplayClock() if run.device.type == "cuda" else None
    hearing: AbstractContextManager[None] = nullcontext() if clock is None else listening(clock)
    with _opened_progress(run) as progress, hearing:
        log = MetricsLog(
            partial(_record, run),
            progress,
            run.step,
            settings.steps,
            settings.tokens_per_step,
            num_skipped=run.trainer.num_skipped_steps,
            clock=clock,
        )
        while run.step < settings.steps and not stop.is_set:
            _train_step(run, log)
            if run.step % settings.eval_every == 0 and run.step < settings.steps:
                with log.paused():
                    loss = _evaluate(run, _tokens_on_the_way(settings), stop)
                if loss is not None:
                    log.add_evaluation(run.step, loss, run.unit)
            if run.step % settings.save_every == 0 and run.step < settings.steps:
                with log.paused():
                    _save(run)
        log.flush()


@contextmanager
def _opened_progress(run: Run) -> Iterator[RunProgress]:
    with make_progress(run.console) as progress:
        run.progress = progress
        try:
            yield progress
        finally:
            run.progress = None


def _train_step(run: Run, log: MetricsLog) -> None:
    lr = learning_rate(run.settings, run.step)
    for group in run.trainer.optimizer.param_groups:
        group["lr"] = lr
    result = run.trainer.step(_training_batch(run))
    run.step += 1
    if run.slots is not None:
        run.slots.take(run.step)
    log.add(run.step, lr, result)


def _record(run: Run, rows: list[dict[str, Any]]) -> None:
    """Write rows of metrics wherever they go, and the slots' values that came with them."""
    run.folder.append_metrics(rows)
    if run.events is not None:
        run.events.add_rows(rows)
    if run.slots is not None:
        run.slots.flush()


def _training_batch(run: Run) -> dict[str, Tensor]:
    settings = run.settings
    return _to_device(run, sample_windows(run.split.train, settings.seq_len, settings.batch_size, settings.seed, run.step))


def _to_device(run: Run, windows: Windows) -> dict[str, Tensor]:
    tensors = (torch.from_numpy(array.copy()) for array in windows)
    if run.device.type == "cuda":
        # From pinned memory the copy runs beside the step before it.
        tensors = (tensor.pin_memory().to(run.device, non_blocking=True) for tensor in tensors)
    return dict(zip(("tokens", "labels"), tensors, strict=True))


def _evaluate(run: Run, max_tokens: int, stop: StopRequest) -> float | None:
    """Mean validation loss in nats per token; None when a stop was asked for meanwhile."""
    batches = _validation_batches(run, max_tokens)
    losses, sizes = [], []
    with show_validation(run.console, run.progress, len(batches)) as advance:
        for windows in batches:
            if stop.is_set:
                return None
            losses.append(run.trainer.evaluate(_to_device(run, windows)))
            sizes.append(len(windows[0]))
            advance()
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float((torch.stack(losses).double().cpu() * weights).sum() / weights.sum())


def _tokens_on_the_way(settings: Settings) -> int:
    # A token costs a third of what it costs to train on: no more of them than are trained on between two validations.
    usual = max(_MIN_EVALUATION_TOKENS, 4 * settings.tokens_per_step)
    return max(_LEAST_EVALUATION_TOKENS, min(usual, settings.eval_every * settings.tokens_per_step))


def _final_tokens(settings: Settings) -> int:
    return max(_MIN_EVALUATION_TOKENS, min(_FINAL_EVALUATION_TOKENS, settings.steps * settings.tokens_per_step))


def _validation_batches(run: Run, max_tokens: int) -> list[Windows]:
    settings = run.settings
    tokens, labels = validation_windows(run.split.validation, settings.seq_len, max_tokens)
    size = max(settings.batch_size // settings.grad_accum, -(-_EVALUATION_BATCH_TOKENS // settings.seq_len))
    return [(tokens[start : start + size], labels[start : start + size]) for start in range(0, len(tokens), size)]


def _save(run: Run) -> None:
    run.folder.save_checkpoint(run.step, run.settings, run.corpus.fingerprint(), run.trainer.state_dict())
    run.folder.save_summary(_describe(run))


def _describe(run: Run) -> dict[str, Any]:
    """What summary.json holds of a run that may go on: where it runs, for how long, with how much memory."""
    is_cuda = run.device.type == "cuda"
    return {
        "step": run.step,
        "wall_s": round(run.wall_s_before + time.perf_counter() - run.start_s, 3),
        "device": torch.cuda.get_device_name(run.device) if is_cuda else "cpu",
        "mode": run.trainer.mode,
        "num_skipped_steps": run.trainer.num_skipped_steps,
        "peak_memory_bytes": torch.cuda.max_memory_reserved(run.device) if is_cuda else _peak_resident_bytes(),
        "graphrt": __version__,
        "torch": torch.__version__,
    }


def _peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _introduce(run: Run, resume: bool) -> None:
    settings = run.settings
    run.console.print(
        f"{'Resuming' if resume else 'Training'} [bold]{settings.preset}[/] ({settings.shape.num_parameters / 1e6:.1f} M parameters) in "
        f"{settings.arithmetic} on {run.device}: {escape(run.corpus.source)}, {len(run.split.train):,} tokens to train on, "
        f"{settings.tokens_per_step:,} a step."
    )
    if run.before is not None:
        _introduce_resumed(run, run.before)
    if run.corpus.left_out:
        run.console.print(f"Files left out of --text: {run.corpus.left_out}. Name a file itself to train on it.")
    if settings.precision == "bf16" and run.device.type == "cpu":
        run.console.print("Most CPUs emulate bf16, many times slower than --precision fp32.")


def _introduce_resumed(run: Run, before: Settings) -> None:
    settings = run.settings
    if settings.steps != before.steps:
        was, now = learning_rate(before, max(0, run.step - 1)), learning_rate(settings, run.step)
        run.console.print(
            f"--steps was {before.steps}, it is {settings.steps}: the learning rate was {was:.2e}, it goes on at {now:.2e}, as a run of "
            f"{settings.steps} steps has it after step {run.step}."
        )
    if run.step == settings.steps:
        more = f"--resume --steps {2 * settings.steps}"
        run.console.print(f"The run has already finished its {run.step} steps; only its summary is made again. {more} trains on.")


def _report_stop(run: Run, stop: StopRequest) -> int:
    run.console.print(f"Stopped after step {run.step} of {run.settings.steps}; the checkpoint is written. Go on with:")
    run.console.print(f"  graphrt train --out {shlex.quote(str(run.folder.path))} --resume", markup=False, highlight=False, soft_wrap=True)
    return stop.exit_code


def _summarize(run: Run, loss: float, show_all_slots: bool) -> None:
    finite_loss = loss if math.isfinite(loss) else None  # JSON has no NaN
    _record(run, [{"step": run.step, "val_loss": finite_loss}])
    quality = _measure_quality(run, loss)
    run.folder.save_summary({**_describe(run), "quality": {**asdict(quality), "model": finite_loss}})
    print_quality(run.console, quality)
    if run.settings.precision == "fp8":
        rows = _measure_slots(run)
        run.folder.save_slots(rows_to_json(rows))
        print_slots(run.console, rows, run.folder.slots_file, show_all_slots)
    if run.trainer.num_skipped_steps:
        run.console.print(f"{run.trainer.num_skipped_steps} steps had a non-finite gradient and were skipped. A smaller --lr may help.")
    run.console.print(run.folder.plot_loss(run.unit), markup=False, highlight=False, soft_wrap=True)


def _check_parity(run: Run, num_steps: int) -> bool:
    """Whether captured steps equal eager ones, from the model as trained; prints the report."""
    batches = []
    for i in range(num_steps):
        windows = sample_windows(run.split.train, run.settings.seq_len, run.settings.batch_size, run.settings.seed, run.step + i)
        batches.append(_to_device(run, windows))
    report = check_parity(run.trainer, batches)
    run.console.print(str(report), markup=False, highlight=False)
    return bool(report)


def _suggest(run: Run) -> None:
    run.console.print(f"Run folder: {escape(str(run.folder.path))}, after {time.perf_counter() - run.start_s:.0f} s. Next:")
    for command, purpose in next_commands(run.settings, run.folder.path, run.device.type):
        run.console.print(f"  {escape(command)}  [dim]# {purpose}[/]", highlight=False, soft_wrap=True)


def _measure_quality(run: Run, loss: float) -> Quality:
    tokens, labels = validation_windows(run.split.validation, run.settings.seq_len, _final_tokens(run.settings))
    baseline = bigram_loss(run.split.train, tokens, labels, run.corpus.num_symbols)
    return Quality(loss, baseline, labels.size, run.corpus.is_bytes)


def _measure_slots(run: Run) -> list[SlotRow]:
    # Only a training step casts all three kinds of tensor. The checkpoint is written by now, so one step more does no harm.
    state = quantization_state(run.trainer.model)
    with run.trainer.eager(), state.count_saturation() as counts:
        run.trainer.step(_training_batch(run))
    return slot_rows(state, counts)
