"""The training loop, the same on every device: after which step to evaluate, save, log or stop."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.train.checkpoints.contents import REMEDY
from delta_trn.train.checkpoints.saver import Saver
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.neuron.watchdog import Watchdog
from delta_trn.train.run.evaluate import Evaluation, Interrupted, evaluate, held_out_crops
from delta_trn.train.run.optimizer import learning_rate
from delta_trn.train.run.sample import continue_text
from delta_trn.train.run.setup import Run
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.run.stopping import StopRequest
from delta_trn.train.settings.errors import Diverged, OutOfMemory
from delta_trn.train.watch.display import Display, attempt
from delta_trn.train.watch.metrics import Line
from delta_trn.train.watch.trackers import Tracker

T = TypeVar("T")
# looks into a model after an evaluation and changes nothing: what metrics.jsonl is to have, by name
Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Outcome:
    """How training ended. `stopped`: why before the last step, or None;
    `signal`: the one that asked.
    """

    step: int
    stopped: str | None = None
    signal: int | None = None


@dataclass(frozen=True)
class _Pending:
    """A finished step whose numbers are still on the device."""

    step: int
    tokens: int
    lr: float
    loss: Tensor
    norm: Tensor


def train(run: Run, display: Display, probe: Probe | None = None) -> Outcome:
    """Trains from where the run stands to its last step, or until asked to stop, and saves a
    checkpoint.

    Raises Diverged when a loss or a gradient is not finite, DiskFull when a checkpoint or
    metrics.jsonl cannot be written; the checkpoints from before stay as they are. A sample, a
    tracker, a probe or the display that fails is left out, and a line says so.
    """
    with StopRequest(run.config.max_minutes) as stop:
        loop = _Loop(run, display, probe)
        try:
            return loop.until_the_end(stop)
        except BaseException as error:
            loop.watchdog.leave()
            if not _is_out_of_memory(error):
                raise
            why = (str(error).splitlines() or ["no memory is left"])[0]
            size = f"{loop.step.micro} x {run.config.batch.length} tokens at once"
            raise OutOfMemory(
                f"{run.device} has too little memory for {size} ({why}); "
                "resume with a smaller batch.micro or gradient_checkpointing=true"
            ) from error
        finally:
            loop.close()


def _is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device, or the host, has too little memory; on a CPU, torch has no class
    for it.
    """
    words = str(error)
    on_host = "DefaultCPUAllocator" in words and (
        "allocate memory" in words or "not enough" in words
    )
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or on_host


class _Loop:
    def __init__(self, run: Run, display: Display, probe: Probe | None):
        self.run, self.display, self.probe = run, display, probe
        c = run.config
        self.loss = loss_function(run.sharding, c, run.device)
        self.step = TrainingStep(
            self.loss,
            run.optimizer,
            run.sharding,
            micro=run.layout.micro,
            clip=c.optimizer.clip,
        )
        self.crops = held_out_crops(c, run.dataset, run.layout)
        self.tracker = Tracker(c, run.origin, run.folder, display.tell) if run.team.leads else None
        self.saver = Saver(run)
        # of one process, and on other devices, nothing waits without end
        hangs = neuron.serves(run.device) and run.team.world > 1
        minutes = c.distribution.timeout_minutes if hangs else 0.0
        self.watchdog = Watchdog(minutes, run.team.world)
        self.pending: list[_Pending] = []
        self.clock = self.counted = time.monotonic()

    def until_the_end(self, stop: StopRequest) -> Outcome:
        c, state = self.run.config, self.run.state
        machine.spare_host(self.run.device)
        last, reason = state.step == c.steps, None
        while state.step < c.steps or state.owes:
            if not state.owes:
                self._one_step()
                state.owes = state.step % c.evaluation.every == 0 or state.step == c.steps
            at = state.step
            last, reason = at == c.steps, self._reason(stop)
            saving = at % c.checkpoint.every == 0 or last or reason is not None
            if state.owes or saving or at % c.log.every == 0:
                # before anything is saved: a loss that is not finite must not get into a checkpoint
                self._fetch()
            if saving:
                # before the evaluation, which the checkpoint owes: whatever happens there, the step
                # is saved
                self._save()
            if state.owes:
                found = self._evaluate(stop)
                better = found is not None and state.improves(found.loss)
                if found is None:  # a signal ended it
                    last, saving, reason = False, True, stop.reason
                if found is None or (better and c.checkpoint.keep_best):
                    self._save()
                self.saver.tidy()
                if found is not None:
                    self._report_evaluation(found, better)
                self.clock = time.monotonic()  # tokens/s is of training alone
            elif saving:
                self.saver.tidy()
                self.clock = time.monotonic()
            if reason is not None and not last:
                break
        return Outcome(state.step, None if last else reason, None if last else stop.signal)

    def _reason(self, stop: StopRequest) -> str | None:
        """Returns why to stop now, None to go on. Processes decide together,
        after the same step.
        """
        signal, is_over = self.run.team.largest([stop.signal or 0, int(stop.is_over)])
        return stop.reason_for(signal, bool(is_over))

    def close(self) -> None:
        self.watchdog.close()
        self.run.folder.metrics.close()
        if self.tracker is not None:
            self.tracker.close()

    def _one_step(self) -> None:
        state = self.run.state
        lr = learning_rate(self.run.config, state.step)
        with self.watchdog.over("step"):
            loss, norm = self.step(self.run.batches.next_batch(), lr)
        state.step += 1
        state.tokens += self._tokens_in_a_step()
        self.pending.append(_Pending(state.step, state.tokens, lr, loss, norm))

    def _fetch(self) -> None:
        """Waits for the device, and reports every step since the last fetch."""
        if not self.pending:
            return
        steps, self.pending = self.pending, []
        # the first item() waits for all of them; the others find their numbers done
        with self.watchdog.over("fetch"):
            numbers = [(p.loss.item(), p.norm.item()) for p in steps]
        self._count_seconds()
        before = steps[0].tokens - self._tokens_in_a_step()
        rate = (steps[-1].tokens - before) / max(time.monotonic() - self.clock, 1e-9)
        self.clock = time.monotonic()
        lines: list[Line] = []
        for p, (loss, norm) in zip(steps, numbers, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._report(lines)
                what = f"loss is {loss}"
                if math.isfinite(loss):
                    what = f"gradient norm is {norm} at a loss of {loss:.4f}"
                raise Diverged(f"{what} at step {p.step} (lr {p.lr:.3g}); {self._way_back()}")
            lines.append(
                {
                    "step": p.step,
                    "split": "train",
                    "loss": loss,
                    "tokens": p.tokens,
                    "seconds": round(self.run.state.seconds, 3),
                    "lr": p.lr,
                    "grad_norm": norm,
                    "tokens_per_s": round(rate, 1),
                }
            )
        self._report(lines)
        self._attempt(
            "progress line", lambda: self.display.update(steps[-1].step, lines[-1]["loss"], rate)
        )

    def _evaluate(self, stop: StopRequest) -> Evaluation | None:
        """Returns the loss on held-out crops; None where a signal ended it:
        a resumed run begins with it.
        """
        run, state = self.run, self.run.state

        def is_to_stop() -> bool:
            self.watchdog.beat()
            (signal,) = run.team.largest([stop.signal or 0])
            return bool(signal and stop.reason_for(signal, False))

        run.model.eval()
        try:
            with self.watchdog.over("evaluation"):
                evaluation = evaluate(self.loss, self.crops, run.device, run.team, is_to_stop)
        except Interrupted:
            return None
        finally:
            run.model.train()
        if not math.isfinite(evaluation.loss):
            raise Diverged(
                f"validation loss at step {state.step} is {evaluation.loss}; {self._way_back()}"
            )
        return evaluation

    def _report_evaluation(self, evaluation: Evaluation, better: bool) -> None:
        """Reports an evaluation and a sample. The line in metrics.jsonl is last:
        with it, nothing is owed.
        """
        run, state = self.run, self.run.state
        self._count_seconds()
        bits = run.dataset.bits_per_byte(evaluation.loss)
        told = (
            f"step {state.step}/{run.config.steps}  val loss {evaluation.loss:.4f}  perplexity "
            f"{evaluation.perplexity:,.2f}"
            f"{'' if bits is None else f'  bits/byte {bits:.4f}'}{'  best' if better else ''}"
        )
        self._attempt("message", lambda: self.display.tell(told))
        line: Line = {
            "step": state.step,
            "split": "val",
            "loss": evaluation.loss,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 3),
            "memory": machine.peak_memory(run.device),
            "perplexity": evaluation.perplexity,
            "bits_per_byte": bits,
        }
        if self.probe is not None and (probes := self._attempt("probes", self.probe)):
            line["probes"] = probes
        self._sample()
        self._report([line])
        state.owes = False

    def _sample(self) -> None:
        """Writes a sample, on the leader alone: it waits for no other process."""
        run, sample, prompt = self.run, self.run.config.sample, self.run.config.sample.prompt
        if not sample.tokens or not run.team.leads or run.sharding.is_divided:
            return

        def draw() -> None:
            text = continue_text(
                run.model, run.dataset.tokenizer, prompt, sample, seed=run.config.seed
            )
            run.folder.add_sample(run.state.step, prompt + text)

        self._attempt("sample", draw)

    def _attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Returns what work() returns. Where it fails, says so in one line and returns None."""
        return attempt(f"{what} at step {self.run.state.step}", work, self.display.tell)

    def _save(self) -> None:
        self._count_seconds()
        with self.watchdog.over("checkpoint"):
            self.saver.save()

    def _report(self, lines: Sequence[Line]) -> None:
        if self.tracker is not None:
            self.run.folder.metrics.append(lines)
            self.tracker.log(lines)

    def _count_seconds(self) -> None:
        now = time.monotonic()
        self.run.state.seconds += now - self.counted
        self.counted = now

    def _tokens_in_a_step(self) -> int:
        return self.run.config.batch.sequences * self.run.config.batch.length

    def _way_back(self) -> str:
        steps = [step for step in self.run.folder.checkpoints.steps() if step < self.run.state.step]
        state = (
            f"the checkpoint of step {steps[-1]} is intact"
            if steps
            else "there is no checkpoint yet"
        )
        return f"{state}: {REMEDY} in a new run"
