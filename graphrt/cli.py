"""The command line. Commands import what they need when they run, so that help and mistakes are answered quickly."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from graphrt.presets import PRESETS
from graphrt.settings import InputError, change_settings, make_settings

if TYPE_CHECKING:
    from graphrt.runfolder import RunFolder

__all__ = ["app", "main"]

_INPUT_EXIT_CODE = 2
_FAILURE_EXIT_CODE = 1
_ABORT_EXIT_CODE = 130
_PIPE_EXIT_CODE = 141


class _Stopped(Exception):
    """Ctrl-C where nothing else catches it. The command-line library would end with the exit code and no word."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Stopped from error


app = typer.Typer(
    cls=_Commands,
    name="graphrt",
    help="Train static-shape language models in FP8, the whole step as one CUDA graph.\n\nStart with: graphrt train --out runs/first",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TRAIN_HELP = """Train a Llama-style language model on text, in FP8.

Without options: the tiny preset on the documentation that ships with Python, a minute or two on two CPU cores.

Examples:

  graphrt train --out runs/first

  graphrt train --text docs/ --text 'src/**/*.py' --out runs/mine

  graphrt train --preset 1b --tokens corpus.bin --steps 20000 --out runs/1b

  graphrt train --out runs/1b --resume

  graphrt train --out runs/proof --check-parity 8

Ctrl-C stops after the current step with a checkpoint; --resume goes on from there, bit for bit. With other --steps it goes on along
the learning-rate schedule of that many steps, which is higher for more of them. The run folder holds settings.json,
metrics.jsonl, checkpoint.pt, slots.json, slots_history.jsonl, summary.json and loss.png; graphrt report shows it.
"""


_REPORT_HELP = """Show a run, finished or not: a summary, its worst FP8 slots, and a picture.

The picture has loss, gradient norm, step time, the share of the device's time between replays, and scale and amax of FP8 slots over
the steps. Shares of saturated and underflowed elements are sampled: one step, run eagerly when the run ends.

Examples:

  graphrt report runs/first

  graphrt report runs/first --slot 'blocks.0.*.grad_output' --slot '*.w2.input' --out grads.svg

  graphrt report runs/first --json
"""

_DOCTOR_HELP = """Say what works on this machine, what does not and why, in a form to paste into a bug report.

Prints versions, device and driver, then tries each thing for real, in a process of its own that is given up when it hangs: compiling
a kernel, capturing a CUDA graph, an FP8 GEMM, a captured training step against an eager one, profilers. Needs no GPU: what only a
GPU can do is listed as not here. Exit code 1 if something that should work here does not.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0; 1 for a failure on the way; 2 for bad input; 128 + n after a stop by signal n.
    """
    code = _dispatch(argv)
    try:
        sys.stdout.flush()
    except OSError as error:
        return _complain_about(error)
    return code


def _dispatch(argv: list[str] | None) -> int:
    try:
        return app(args=argv, prog_name="graphrt", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort, _Stopped):
        return _complain("Stopped by Ctrl-C.", _ABORT_EXIT_CODE)
    except OSError as error:
        return _complain_about(error)
    except InputError as error:
        return _complain(str(error), _INPUT_EXIT_CODE)
    except Exception as error:
        # The command-line library's own errors, whose base class has no public name, know how to say what was wrong.
        format_message: Callable[[], str] | None = getattr(error, "format_message", None)
        if format_message is None:
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "graphrt")
        return _complain(_one_line(format_message(), command), _INPUT_EXIT_CODE) if format_message() else _INPUT_EXIT_CODE


def _complain(message: str, exit_code: int) -> int:
    with contextlib.suppress(OSError):  # a terminal that was hung up
        print(f"graphrt: {message}", file=sys.stderr)
    return exit_code


def _complain_about(error: OSError) -> int:
    """Say which file failed; an error without a file's name is one of the output."""
    if error.filename is not None:
        return _complain(f"{error.filename} cannot be used: {error.strerror or error}.", _FAILURE_EXIT_CODE)
    _drop_output()
    exit_code = _PIPE_EXIT_CODE if isinstance(error, BrokenPipeError) else _FAILURE_EXIT_CODE
    return _complain(f"The output cannot be written: {error.strerror or error}.", exit_code)


def _drop_output() -> None:
    # What is left in the buffer would fail again when the interpreter ends.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(message: str, command: str) -> str:
    fact = " ".join(message.split()).rstrip(".")
    what = "commands" if command == "graphrt" else "options"
    return f"{fact}{'' if fact.endswith('?') else '.'} Run {command} --help for the {what}."


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from graphrt import __version__

        print(f"graphrt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)] = False,
) -> None:
    """Options before the command."""


@app.command()
def presets() -> None:
    """List the models that --preset names."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("preset")
    for name in ("layers", "width", "heads", "ffn", "vocab", "tokens/step", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, preset in PRESETS.items():
        shape = preset.shape
        sizes = (shape.num_layers, shape.width, shape.num_heads, shape.ffn, shape.vocab)
        tokens = f"{preset.batch_size}x{preset.seq_len}"
        table.add_row(name, *map(str, sizes), tokens, f"{shape.num_parameters / 1e6:.1f} M")
    console = Console()
    console.print(table)
    for name, preset in PRESETS.items():
        console.print(f"{name}: {preset.about}", highlight=False)


def _option(*names: str, help: str, default: str, metavar: str | None = None, panel: str = "Options") -> Any:
    # Defaults are words, not values: a resumed run must know which options were given.
    return typer.Option(*names, help=help, show_default=default, metavar=metavar, rich_help_panel=panel)


_DATA, _TRAINING, _RUNNING, _FOLDER = "Data", "Training", "How to run", "Run folder"


@app.command(help=_TRAIN_HELP)
def train(
    text: Annotated[
        list[str] | None,
        _option("--text", help="File, directory or glob of text; bytes are tokens. Repeatable.", default="Python's docs", panel=_DATA),
    ] = None,
    files: Annotated[
        list[str] | None, typer.Argument(help="More files for --text, as a shell's glob gives them.", show_default=False)
    ] = None,
    tokens: Annotated[
        str | None, _option("--tokens", help="File of bare token numbers, memory-mapped.", default="text", panel=_DATA)
    ] = None,
    token_dtype: Annotated[
        str | None,
        _option(help="Of --tokens; auto is uint16 up to a vocabulary of 65536.", default="auto", metavar="auto|uint16|uint32", panel=_DATA),
    ] = None,
    vocab_size: Annotated[int | None, _option(help="Number of tokens the model knows.", default="the preset's", panel=_DATA)] = None,
    preset: Annotated[
        str | None, _option("--preset", help="Model; `graphrt presets` lists them.", default="tiny", metavar="|".join(PRESETS))
    ] = None,
    steps: Annotated[
        int | None, _option(help="Optimizer steps in all, which shape the learning rate.", default="the preset's", panel=_TRAINING)
    ] = None,
    batch_size: Annotated[int | None, _option(help="Sequences per optimizer step.", default="the preset's", panel=_TRAINING)] = None,
    seq_len: Annotated[int | None, _option(help="Tokens per sequence, a multiple of 16.", default="the preset's", panel=_TRAINING)] = None,
    grad_accum: Annotated[int | None, _option(help="Microbatches a batch is split into.", default="1", panel=_TRAINING)] = None,
    lr: Annotated[float | None, _option(help="Highest learning rate; falls to a tenth.", default="the preset's", panel=_TRAINING)] = None,
    warmup: Annotated[
        int | None, _option(help="Steps over which the learning rate rises.", default="a tenth of the steps, at most 100", panel=_TRAINING)
    ] = None,
    seed: Annotated[int | None, _option(help="Of weights and batches.", default="0", panel=_TRAINING)] = None,
    precision: Annotated[
        str | None, _option(help="Of the blocks' linears.", default="fp8", metavar="fp8|bf16|fp32", panel=_RUNNING)
    ] = None,
    backward_accum: Annotated[
        str | None,
        _option(help="How FP8 products of gradients are added up.", default="accurate", metavar="accurate|fast", panel=_RUNNING),
    ] = None,
    weight_transpose: Annotated[
        str | None,
        _option(
            help="Keep weights' transposed FP8 copies, or make them again.",
            default="the preset's",
            metavar="kept|again",
            panel=_RUNNING,
        ),
    ] = None,
    checkpointing: Annotated[
        str | None, _option(help="Recompute each block in the backward.", default="none", metavar="none|block", panel=_RUNNING)
    ] = None,
    mode: Annotated[
        str | None,
        _option(help="Capture the step, or run it kernel by kernel.", default="auto", metavar="auto|graph|eager", panel=_RUNNING),
    ] = None,
    device: Annotated[str | None, _option(help="cpu, cuda or cuda:N.", default="cuda if there is one", panel=_RUNNING)] = None,
    out: Annotated[Path | None, _option("--out", help="Run folder; must be new.", default="runs/PRESET", panel=_FOLDER)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.", rich_help_panel=_FOLDER)] = False,
    eval_every: Annotated[int | None, _option(help="Steps between validations.", default="a fifth of the steps", panel=_FOLDER)] = None,
    save_every: Annotated[int | None, _option(help="Steps between checkpoints.", default="as --eval-every", panel=_FOLDER)] = None,
    slots_every: Annotated[
        int | None,
        _option(help="Steps between records of every FP8 slot's scale and amax.", default="a 200th of the steps", panel=_FOLDER),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard events to the run folder too.", rich_help_panel=_FOLDER)
    ] = False,
    all_slots: Annotated[bool, typer.Option("--all-slots", help="Show every FP8 slot at the end.", rich_help_panel=_FOLDER)] = False,
    parity: Annotated[
        int,
        typer.Option(
            "--check-parity", help="At the end, prove N captured steps equal to eager ones.", metavar="N", min=0, rich_help_panel=_RUNNING
        ),
    ] = 0,
) -> None:
    if files and not text:
        raise InputError(f"{files[0]!r} is not an option. Text files go after --text.")
    options = {
        "preset": preset, "text": tuple(text or ()) + tuple(files or ()), "tokens": tokens, "token_dtype": token_dtype,
        "vocab_size": vocab_size, "seq_len": seq_len, "batch_size": batch_size, "grad_accum": grad_accum, "steps": steps, "lr": lr,
        "warmup": warmup, "seed": seed, "precision": precision, "backward_accum": backward_accum,
        "weight_transpose": weight_transpose, "checkpointing": checkpointing,
        "mode": mode, "device": device,
        "eval_every": eval_every, "save_every": save_every, "slots_every": slots_every,
    }  # fmt: skip
    raise typer.Exit(_run_training(options, out or Path("runs") / (preset or "tiny"), resume, all_slots, parity, tensorboard))


@app.command(help=_REPORT_HELP)
def report(
    run: Annotated[Path, typer.Argument(help="A run folder: the --out of a graphrt train.", metavar="RUN", show_default=False)],
    slots: Annotated[
        list[str] | None,
        _option("--slot", help="Slots to show and draw, with * and ?. Repeatable.", default="the worst", metavar="PATTERN"),
    ] = None,
    out: Annotated[Path | None, _option("--out", help="The picture: .png, .svg or .pdf.", default="RUN/report.png", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    from rich.console import Console

    from graphrt.runreport import report_run

    report_run(run, Console(), patterns=slots or (), out=out, as_json=as_json)


@app.command(help=_DOCTOR_HELP)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    from graphrt.doctor import examine

    raise typer.Exit(examine(as_json=as_json))


_PROFILE_HELP = """Show where a training step's time goes: by module, direction, phase and kernel, captured and eager side by side.

RUN is the folder of a graphrt train run, whose settings and checkpoint are used, or a preset. Without one: the tiny preset. On a
machine without a GPU the times are those of CPU operations, replayed by the recorder. The run's checkpoint is left as it is.

Examples:

  graphrt profile

  graphrt profile runs/first --steps 5

  graphrt profile 125m --device cuda --out profile-125m

The folder gets profile.json (every row), trace.json (open it at ui.perfetto.dev), node_map.json, and with the plot extra profile.png.
"""


@app.command(help=_PROFILE_HELP)
def profile(
    run: Annotated[str | None, typer.Argument(help="Run folder or preset.", show_default="tiny", metavar="[RUN]")] = None,
    preset: Annotated[str | None, _option("--preset", help="Model, instead of RUN.", default="tiny", metavar="|".join(PRESETS))] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps to watch of each path.")] = 3,
    out: Annotated[Path | None, _option("--out", help="Folder for the files.", default="RUN/profile or runs/PRESET-profile")] = None,
    batch_size: Annotated[int | None, _option(help="Sequences per optimizer step.", default="the preset's")] = None,
    seq_len: Annotated[int | None, _option(help="Tokens per sequence, a multiple of 16.", default="the preset's")] = None,
    grad_accum: Annotated[int | None, _option(help="Microbatches a batch is split into.", default="1")] = None,
    precision: Annotated[str | None, _option(help="Of the blocks' linears.", default="fp8", metavar="fp8|bf16|fp32")] = None,
    backward_accum: Annotated[
        str | None, _option(help="How FP8 products of gradients are added up.", default="accurate", metavar="accurate|fast")
    ] = None,
    weight_transpose: Annotated[
        str | None,
        _option(help="Keep weights' transposed FP8 copies, or make them again.", default="the preset's", metavar="kept|again"),
    ] = None,
    checkpointing: Annotated[
        str | None, _option(help="Recompute each block in the backward.", default="none", metavar="none|block")
    ] = None,
    mode: Annotated[str | None, _option(help="eager leaves the captured path out.", default="graph", metavar="graph|eager")] = None,
    device: Annotated[str | None, _option(help="cpu, cuda or cuda:N.", default="cuda if there is one")] = None,
) -> None:
    options = {
        "preset": preset, "batch_size": batch_size, "seq_len": seq_len, "grad_accum": grad_accum, "precision": precision,
        "backward_accum": backward_accum, "weight_transpose": weight_transpose, "checkpointing": checkpointing, "mode": mode,
        "device": device,
    }  # fmt: skip
    raise typer.Exit(_run_profile(run, options, steps, out))


def _run_profile(target: str | None, options: dict[str, Any], num_steps: int, out: Path | None) -> int:
    import torch
    from rich.console import Console

    from graphrt.errors import GraphrtError
    from graphrt.profile_job import plan_profile, run_profile

    try:
        run_profile(plan_profile(target, options, num_steps, out), Console())
    except torch.OutOfMemoryError:
        return _complain("The GPU has too little memory for both paths. Use a smaller --batch-size.", _FAILURE_EXIT_CODE)
    except GraphrtError as error:
        return _complain(f"{type(error).__name__}: {error}", _FAILURE_EXIT_CODE)
    return 0


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="MODULE:FUNCTION; the function returns (trainer, batch).", metavar="MODULE:FUNCTION")],
) -> None:
    """Say whether a step can be captured, on this machine, with or without a GPU.

    Takes the step three times, two of them under observation, and puts everything back; the loss function is called once for each
    microbatch of a step, and once more for each microbatch where an FP8 model is calibrated first. What a CUDA graph cannot hold is
    named with its operation, file and line. Exit code 0 if the step can be captured, 1 if not, 2 if MODULE:FUNCTION cannot be used.

    Example: graphrt check train:make_trainer
    """
    raise typer.Exit(_run_check(target))


def _run_check(target: str) -> int:
    import importlib

    from graphrt.check import check_capture
    from graphrt.errors import GraphrtError, StaticInputError
    from graphrt.trainer import Trainer

    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise InputError(f"{target!r} is not MODULE:FUNCTION. For make_trainer in train.py write train:make_trainer.")
    sys.path.insert(0, os.getcwd())
    with _user_errors(f"{module_name} cannot be imported", module_name):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "is not there" if function is None else f"is of type {type(function).__name__}"
        raise InputError(f"{target} {found}, expected a function that returns (trainer, batch). Check the name.")
    with _user_errors(f"{target} cannot be called"):
        made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Trainer):
        raise InputError(f"{target} returned {_describe(made)}, expected (trainer, batch).")
    try:
        report = check_capture(*made)
    except StaticInputError as error:
        raise InputError(str(error)) from error
    except GraphrtError as error:
        return _complain(f"{type(error).__name__}: {error}", _FAILURE_EXIT_CODE)
    print(report)
    return 0 if report else _FAILURE_EXIT_CODE


@contextlib.contextmanager
def _user_errors(fact: str, module_name: str = "") -> Iterator[None]:
    """Say of an error in the user's code what it is and where it came through there, without anybody else's frames."""
    from graphrt.capture.record_location import locations_of

    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"{fact}: {error}. Run graphrt check where import {module_name} works.") from error
        places = [f"{place}: {place.source}" for place in locations_of(error)]
        words = str(error)
        if isinstance(error, SyntaxError):
            places.append(f"{os.path.relpath(error.filename or '?')}:{error.lineno}: {(error.text or '').strip()}")
            words = error.msg
        raise InputError("\n  ".join([f"{fact}: {type(error).__name__}: {words}", *places])) from error


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(item).__name__ for item in value) + ")"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _run_training(options: dict[str, Any], out: Path, resume: bool, all_slots: bool, parity: int, tensorboard: bool) -> int:
    if parity:
        # cuBLAS reads it when it starts; without it two runs of one step may differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from graphrt.errors import GraphrtError
    from graphrt.output import console_on, lost_output
    from graphrt.runfolder import RunFolder
    from graphrt.train import train as run

    folder, console = RunFolder(out), console_on(sys.stdout)
    settings = change_settings(folder.load_settings(), options) if resume else make_settings(options)
    try:
        code = run(settings, folder, console, resume=resume, show_all_slots=all_slots, num_parity_steps=parity, use_tensorboard=tensorboard)
    except KeyboardInterrupt:
        return _complain(f"Aborted. {_resume_remedy(folder)}", _ABORT_EXIT_CODE)
    except torch.OutOfMemoryError:
        remedy = "Use a smaller --batch-size, a larger --grad-accum, or --checkpointing block."
        return _complain(f"The GPU has too little memory for this run. {remedy}", _FAILURE_EXIT_CODE)
    except GraphrtError as error:
        return _complain(f"{type(error).__name__}: {error}", _FAILURE_EXIT_CODE)
    lost = lost_output(console)
    if lost is not None:
        _drop_output()
        return _complain(f"The output cannot be written: {lost.strerror or lost}. {_resume_remedy(folder)}", code)
    return code


def _resume_remedy(folder: "RunFolder") -> str:
    if folder.checkpoint_file.exists():
        return f"Run graphrt train --out {shlex.quote(str(folder.path))} --resume to go on from the last checkpoint."
    return f"There is no checkpoint yet. {folder.restart_remedy()}."
