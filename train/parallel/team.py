"""The processes that torchrun started, as one team: who leads,
who has which data, what all agree on.
"""

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from delta_trn.backends import machine
from delta_trn.train.parallel.rendezvous import join, leaders_word
from delta_trn.train.settings.errors import ConfigError, ProcessLost
from delta_trn.train.settings.schema import RunConfig

S = TypeVar("S")
T = TypeVar("T")

# How long the others wait while the leader prepares a corpus. Elsewhere
# distribution.timeout_minutes holds.
PATIENCE = timedelta(hours=12)

_ABOUT_OTHERS = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Ww]ait timeout|TCPStore"
)


@dataclass(frozen=True)
class Team:
    """This process among `world` processes. Alone, every method returns what it is given.

    data_rank, data_world   this process has share `data_rank` of the `data_world` shares of a
                            step's sequences. The processes of one tensor or context group have the
                            same share.
    mesh                    [replica, tensor]; None alone. Gradients are averaged over `replica`,
                            which counts the context groups' processes too: each has its own tokens.
    context                 [data, context, tensor]; None where sequences are whole
    hosts                   group for values in the hosts' memory
    patient                 the same, for `leader_first`
    """

    rank: int = 0
    world: int = 1
    data_rank: int = 0
    data_world: int = 1
    mesh: DeviceMesh | None = None
    context: DeviceMesh | None = None
    hosts: ProcessGroup | None = None
    patient: ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's folder and speaks."""
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean over all processes, the same on each; on the device,
        without waiting for it.
        """
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

    def from_leader(self, value: T, group: ProcessGroup | None = None) -> T:
        """Returns the leader's value. Waits for it, as long as `group` does; None: `hosts`."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group or self.hosts)
        return box[0]

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Returns what work() returns on each process, by rank. Waits for all.

        What it raises on one process, it raises on all: none goes on without the others, or waits
        for them. That holds only if work() waits for no other process itself: one that had raised
        before would leave the others waiting there.
        """
        if self.world == 1:
            return [work()]
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        outcomes: list[Any] = [None] * self.world
        dist.all_gather_object(outcomes, (result, failure and picklable(failure)), group=self.hosts)
        if failure is not None:
            raise failure
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def leader_does(self, work: Callable[[], T]) -> T:
        """Returns what work() returns on the leader, which alone does it.
        Its error is raised on all.
        """
        return self.agree(lambda: work() if self.leads else None)[0]  # type: ignore[return-value]

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Lets the leader through the block before the others enter it:
        it makes files, they find them.
        """
        if not self.leads:
            self.from_leader(None, self.patient)
        yield
        if self.leads:
            self.from_leader(None, self.patient)


def picklable(error: Exception) -> Exception:
    """Returns the error, or one of the same words where another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def ask_leader(question: str, look: Callable[[], T], minutes: float) -> T:
    """Returns what look() returns on the leader, before there is a team.
    Its error is raised on all.
    """
    return consult(question, None, lambda said: look(), minutes)


def consult(question: str, said: S, judge: Callable[[list[S]], T], minutes: float) -> T:
    """Returns what judge() returns on the leader of what all have said, by rank, before there is a
    team.

    Waits for all. What judge() raises is raised on all. So is a ConfigError where the question, a
    few words, is not the same on all: then they run different commands.
    """
    world = machine.processes().world
    if world == 1:
        return judge([said])

    def say(words: list[str]) -> str:
        try:
            heard = [_unpacked(word) for word in words]
            _require_one_question([asked for asked, _ in heard])
            return _packed((judge([x for _, x in heard]), None))
        except Exception as error:
            return _packed((None, picklable(error)))

    with _naming_the_lost(world, minutes):
        word = leaders_word(_packed((question, said)), say, timedelta(minutes=minutes))
    result, error = _unpacked(word)
    if error is not None:
        raise error
    return result


def _require_one_question(asked: list[str]) -> None:
    """ConfigError where processes that meet do not want to know the same."""
    other = next((rank for rank, question in enumerate(asked) if question != asked[0]), None)
    if other is not None:
        raise ConfigError(
            f"{len(asked)} processes run different commands: rank 0 asks {asked[0]}, rank {other} "
            f"{asked[other]}; give every process the same command"
        )


def _packed(value: object) -> str:
    return pickle.dumps(value).hex()


def _unpacked(word: str) -> Any:
    return pickle.loads(bytes.fromhex(word))


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
    # over XLA's devices a mesh has no groups (torch 2.9); over the hosts it has the default group's
    # kind
    kind = "cpu" if device.type == "xla" else device.type
    try:
        with _naming_the_lost(here.world, d.timeout_minutes):
            join(machine.collectives(device), timeout, device)
            replicas, shares = here.world // d.tensor, here.world // (d.tensor * d.context)
            mesh = init_device_mesh(
                kind, (replicas, d.tensor), mesh_dim_names=("replica", "tensor")
            )
            context = None
            if d.context > 1:
                shape, names = (shares, d.context, d.tensor), ("data", "context", "tensor")
                context = init_device_mesh(kind, shape, mesh_dim_names=names)
            share = here.rank // (d.tensor * d.context)
            hosts, patient = _hosts(timeout), _hosts(PATIENCE)
            yield Team(here.rank, here.world, share, shares, mesh, context, hosts, patient)
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
            f"another of the {world} processes has ended, which its own output explains, or did "
            f"not answer for distribution.timeout_minutes={minutes:g} "
            f"({str(error).splitlines()[0]}); checkpoints on the disk are whole: resume the run, "
            "or have torchrun --max-restarts=N restart `run --or-resume`"
        ) from error


def _hosts(timeout: timedelta) -> ProcessGroup:
    """Returns another group of all processes, over the hosts' own network."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, ProcessGroup)  # the other is for those left out
    return group
