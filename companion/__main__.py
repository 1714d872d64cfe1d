"""The command line: ``python -m companion doctor``, ``trace`` and ``train``.

``train`` is also what torchrun runs; notebooks and terminals use the same command.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

# what a wrong argument, a missing file or a full disk raises: one sentence, no traceback
EXPECTED = (ValueError, TypeError, OSError, ArithmeticError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (143 after SIGTERM, 130 after Ctrl-C)."""
    arguments = parser().parse_args(argv)
    try:
        if not os.environ.get("TORCH_LOGS", "").isascii():
            raise ValueError(
                f"TORCH_LOGS is {os.environ['TORCH_LOGS']!r}, with typographic quotes, and torch "
                "cannot be imported: write it with plain ones"
            )
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # whoever read the output has gone; Python would complain again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (*EXPECTED, RuntimeError) as error:
        lacks_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        lacks_memory |= "out of memory" in str(error)
        if arguments.traceback or not (isinstance(error, EXPECTED) or lacks_memory):
            raise
        text = str(error)
        if lacks_memory:
            text = "there is not enough memory: choose a smaller preset, batch or --micro-batch"
        print(f"companion: {text}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="companion", description=__doc__.partition("\n")[0])
    top.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what is on this machine, and what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=run_doctor)

    trace = commands.add_parser("trace", help="what a profiler's trace says, on one page")
    trace.add_argument("paths", nargs="+", metavar="FILE", help="a trace, or a directory of ranks")
    trace.add_argument("--html", metavar="OUT", help="write the timeline of FILE as a page")
    trace.set_defaults(run=run_trace)

    train = commands.add_parser("train", help="train a preset on real text")
    what = train.add_argument_group("what is trained (must match when a run is resumed)")
    what.add_argument("--preset", default="tiny")
    what.add_argument("--corpus", help="directory or file of text; default: Python's own source")
    what.add_argument("--total-steps", type=int, help="schedule horizon; default: --steps")
    what.add_argument("--seed", type=int)
    what.add_argument("--sequence", type=int, help="tokens in a sample")
    what.add_argument("--global-batch", type=int, help="samples in a step, over all ranks")
    what.add_argument("--learning-rate", type=float)
    what.add_argument("--dropout", type=float, default=0.0)
    how = train.add_argument_group("how it is executed (may change)")
    how.add_argument("--device", default="auto")
    how.add_argument("--strategy", default="none", choices=("none", "ddp"))
    how.add_argument("--compile", action="store_true")
    how.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    how.add_argument("--micro-batch", type=int)
    now = train.add_argument_group("this call")
    now.add_argument("--steps", type=int, default=200, help="optimizer steps to train now")
    now.add_argument("--log-every", type=int, default=20)
    now.add_argument("--eval-every", type=int, default=0, help="0 evaluates at the end only")
    now.add_argument("--tensorboard", metavar="DIR", help="write scalars there")
    train.set_defaults(run=run_train)
    return top


def run_doctor(arguments: argparse.Namespace) -> int:
    from companion import device

    findings = device.doctor()
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(device.doctor_report(findings))
    return 0 if all(finding.ok or not finding.needed for finding in findings) else 1


def run_trace(arguments: argparse.Namespace) -> int:
    from companion import trace

    if arguments.html and len(arguments.paths) != 1:
        raise ValueError("--html takes one trace: give one file or one directory of ranks")
    for path in arguments.paths:
        read = trace.read(path)
        print(trace.report(read))
        if arguments.html:
            from companion.classroom.timeline import Timeline

            Timeline(read, verdict=trace.diagnose(read)).save_html(arguments.html)
            print(f"the timeline is in {arguments.html}")
    return 0


def run_train(arguments: argparse.Namespace) -> int:
    from companion import corpus, device, launch, parallel
    from companion.loop import build, evaluate, stop_requested, train
    from companion.state import Execution, RunConfig

    if arguments.steps < 0:
        raise ValueError(f"--steps is {arguments.steps}: give 0 or more")
    for name in ("log_every", "eval_every"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} is negative: give 0 or more")
    changes: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("corpus", "seed", "sequence", "global_batch", "learning_rate")
        if getattr(arguments, name) is not None
    }
    horizon = arguments.total_steps
    if horizon is None:
        horizon = max(arguments.steps, 1)
    run = RunConfig.preset(
        arguments.preset, dropout=arguments.dropout, total_steps=horizon, **changes
    )
    how = Execution(
        device=arguments.device,
        strategy=arguments.strategy,
        compile=arguments.compile,
        precision=arguments.precision,
        micro_batch=arguments.micro_batch,
    )
    on_cpu = device.choose(how.device).type == "cpu"
    if how.compile and on_cpu and device.cpp_compiler() is None:
        raise ValueError(
            "--compile needs a C++ compiler on a CPU and none works here: "
            "`python -m companion doctor` says what to install, or leave --compile out"
        )
    with parallel.session(how) as mesh, stop_requested() as stop:
        state = build(run, how, mesh)
        say = launch.say if mesh.rank == 0 else lambda text: None
        with scalars(arguments.tensorboard if mesh.rank == 0 else None) as write:
            say(
                f"{arguments.preset} on {mesh.device}, {mesh.world} rank(s), "
                f"{run.global_batch} × {run.sequence} tokens a step"
            )
            for record in train(state, arguments.steps):
                if arguments.log_every and record.step % arguments.log_every == 0:
                    row = record.row()
                    say(
                        f"step {record.step:5d}  loss {record.loss:.4f}  "
                        f"lr {record.learning_rate:.2e}  {row['tokens_per_second']:,.0f} tokens/s"
                    )
                    write(row)
                if arguments.eval_every and record.step % arguments.eval_every == 0:
                    loss = evaluate(state)
                    say(f"step {record.step:5d}  held-out loss {loss:.4f}")
                    write({"step": record.step, "held_out_loss": loss})
                if stop:
                    break
            # one rank's signal ends the loop on all, and none may wait for it in evaluate
            if parallel.any_rank(bool(stop), mesh):
                name = signal.Signals(stop.signal).name if stop.signal else "another rank"
                say(f"stopped by {name} after step {state.step}; nothing was saved")
                return 128 + (stop.signal or signal.SIGTERM)
            loss = evaluate(state)
            say(f"step {state.step:5d}  held-out loss {loss:.4f}")
            write({"step": state.step, "held_out_loss": loss})
            if stop.signal:
                return 128 + stop.signal
            if mesh.rank == 0:
                known = corpus.reference_losses(corpus.prepare(run.corpus))
                say(
                    f"to beat: bigram {known.bigram:.4f}, unigram {known.unigram:.4f}, "
                    f"uniform {known.uniform:.4f} (nats per byte)"
                )
            launch.report(held_out_loss=loss, step=state.step, position=state.position)
    return 0


@contextlib.contextmanager
def scalars(directory: str | None) -> Iterator[Any]:
    """A function that writes a row of numbers to TensorBoard, or does nothing."""
    if directory is None:
        yield lambda row: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "TensorBoard is not installed: pip install tensorboard, or leave --tensorboard out"
        ) from None
    try:
        made = SummaryWriter(directory)
    except OSError as error:
        raise OSError(
            f"--tensorboard {directory} cannot be written ({error.strerror}); give a directory"
        ) from None
    with made as writer:

        def write(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name, value, row["step"])

        yield write


if __name__ == "__main__":
    sys.exit(main())
