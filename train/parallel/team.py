"""The processes that torchrun started, as one team: who leads, who has which data, what all agree on."""

import contextlib
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from delta_trn.backends import machine
from delta_trn.train.parallel.rendezvous import join, leaders_word, wait_for_all
from delta_trn.train.settings.errors import ProcessLost
from delta_trn.train.settings.schema import RunConfig

T = TypeVar("T")

# How long the others wait while the leader prepares a corpus. Elsewhere distribution.timeout_minutes holds.
PATIENCE = timedelta(hours=12)
# How long a process whose work has failed waits for the others to say that theirs has, too.
SECONDS_TO_AGREE = 20.0

_ABOUT_OTHERS = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Ww]ait timeout|TCPStore"
)
_SOURCE = re.compile(r"^\[[^]]*\] ")  # gloo's own file and line
_HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Team:
    """This process among `world` processes. Alone, every method returns what it is given.

    data_rank, data_world   this process has share `data_rank` of the `data_world` shares of a step's
                            sequences. The processes of one tensor or context group have the same share.
    mesh                    [replica, tensor]; None alone. Gradients are averaged over `replica`, which counts
                            the context groups' processes too: each has its own tokens.
    context                 [data, context, tensor]; None where sequences are whole
    files                   group for writing files, on any thread, while other collectives go on
    patient                 group for `leader_first`
    hosts                   group for values in the hosts' memory, where the default group has only XLA's
    """

    rank: int = 0
    world: int = 1
    data_rank: int = 0
    data_world: int = 1
    mesh: DeviceMesh | None = None
    context: DeviceMesh | None = None
    files: ProcessGroup | None = None
    patient: ProcessGroup | None = None
    hosts: ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's folder and speaks."""
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean over all processes, the same on each; on the device, without waiting for it."""
        if self.world == 1:
            return x
        x = x.clone()
        dist.all_reduce(x)
        return x / self.world

    def largest(self, numbers: list[int]) -> list[int]:
        """Returns the largest of all processes' numbers, place by place. Waits for all."""
        if self.world == 1:
            return numbers
        largest = torch.tensor(numbers)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.hosts)
        return largest.tolist()

    def from_leader(self, value: T) -> T:
        """Returns the leader's value. Waits for it."""
        return self._broadcast(value, self.hosts)

    def agreed(self, work: Callable[[], T]) -> list[T]:
        """Returns what work() returns on each process, by rank. Waits for all.

        What it raises on one process, it raises on all: none goes on without the others, or waits for them.
        That holds only if work() waits for no other process itself: one that had raised before would leave
        the others waiting there. A collective in it is therefore a RuntimeError.
        """
        if self.world == 1:
            return [work()]
        result: T | None = None
        failure: Exception | None = None
        try:
            with _NoCollective():
                result = work()
        except Exception as error:
            failure = error
        outcomes: list[Any] = [None] * self.world
        dist.all_gather_object(outcomes, (result, failure and _picklable(failure)), group=self.files)
        if failure is not None:
            raise failure
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def leader_does(self, work: Callable[[], T]) -> T:
        """Returns what work() returns on the leader, which alone does it. Its error is raised on all."""
        return self.agreed(lambda: work() if self.leads else None)[0]  # type: ignore[return-value]

    def require_on_all(self, error: Exception) -> None:
        """Raises the error unless work that processes do together has failed on each of them.

        If it has, they can go on together. Else the others wait for what this process has not sent, until it
        ends: one that went on would take what they send for something else.
        """
        if self.world > 1:
            try:
                wait_for_all(timedelta(seconds=SECONDS_TO_AGREE))
            except (RuntimeError, TimeoutError):
                raise error from None

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Lets the leader through the block before the others enter it: it makes files, they find them."""
        if not self.leads:
            self._broadcast(None, self.patient)
        yield
        if self.leads:
            self._broadcast(None, self.patient)

    def _broadcast(self, value: T, group: ProcessGroup | None) -> T:
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]


class _NoCollective(TorchDispatchMode):
    """Within `with`, on this thread, a collective raises instead of waiting for other processes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with its local tensors and its collectives
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise RuntimeError(
                f"{func} waits for other processes inside work that `Team.agreed` was given: a process on "
                "which the work fails before would leave them waiting; call it outside"
            )
        return func(*args, **(kwargs or {}))


def _picklable(error: Exception) -> Exception:
    """Returns the error, or one of the same words where another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def ask_leader(look: Callable[[], T], minutes: float) -> T:
    """Returns what look() returns on the leader, before there is a team. Its error is raised on all.

    minutes     how long to wait for all processes
    """
    world = machine.processes().world
    if world == 1:
        return look()

    def say() -> str:
        try:
            return pickle.dumps((look(), None)).hex()
        except Exception as error:
            return pickle.dumps((None, _picklable(error))).hex()

    with _naming_the_lost(world, minutes):
        result, error = pickle.loads(bytes.fromhex(leaders_word(say, timedelta(minutes=minutes))))
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def assemble(config: RunConfig, device: torch.device) -> Iterator[Team]:
    """Joins the team of this run for as long as the block lasts. See `layout.require_divisible`.

    ProcessLost where a collective fails because another process has ended, or does not answer.
    """
    here = machine.processes()
    if here.world == 1:
        yield Team()
        return
    d = config.distribution
    timeout = timedelta(minutes=d.timeout_minutes)
    # over XLA's devices a mesh has no groups (torch 2.9); over the hosts it has the default group's kind
    kind = "cpu" if device.type == "xla" else device.type
    try:
        with _naming_the_lost(here.world, d.timeout_minutes):
            join(machine.collectives(device), timeout, device)
            replicas, shares = here.world // d.tensor, here.world // (d.tensor * d.context)
            mesh = init_device_mesh(kind, (replicas, d.tensor), mesh_dim_names=("replica", "tensor"))
            context = None
            if d.context > 1:
                shape, names = (shares, d.context, d.tensor), ("data", "context", "tensor")
                context = init_device_mesh(kind, shape, mesh_dim_names=names)
            share = here.rank // (d.tensor * d.context)
            files, patient = _hosts(timeout), _hosts(PATIENCE)
            hosts = _hosts(timeout) if device.type == "xla" else None
            yield Team(here.rank, here.world, share, shares, mesh, context, files, patient, hosts)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _naming_the_lost(world: int, minutes: float) -> Iterator[None]:
    """Maps the errors of a wait that another process did not answer to ProcessLost."""
    try:
        yield
    # what gloo and NCCL raise has no class of its own everywhere
    except (RuntimeError, TimeoutError) as error:
        if not _ABOUT_OTHERS.search(str(error)):
            raise
        raise ProcessLost(
            f"{_collective(error)} failed: another of the {world} processes has ended, which its own "
            f"output explains, or did not answer for distribution.timeout_minutes={minutes:g} "
            f"({_first_line(error)}); checkpoints on the disk are whole: resume the run, or have torchrun "
            "--max-restarts=N restart `run --or-resume`"
        ) from error


def _collective(error: Exception) -> str:
    """Returns what was waited for, and by whom, such as `all_reduce in train.team.largest`."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [f.name for f in frames if hasattr(dist, f.name) or f.name in ("backward", "full_tensor")]
    ours = [f"{Path(f.filename).stem}.{f.name}" for f in frames if _HERE in Path(f.filename).parents]
    return " in train.".join([*called[-1:], *ours[-1:]]) or "a collective"


def _first_line(error: Exception) -> str:
    return _SOURCE.sub("", str(error).splitlines()[0])


def _hosts(timeout: timedelta) -> ProcessGroup:
    """Returns another group of all processes, over the hosts' own network."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, ProcessGroup)  # the other is for those left out
    return group
