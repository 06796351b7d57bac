"""Plans one refit by every transport and scope and predicts each: the data behind the tables, the JSON and the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from refit_transport.layout.layout import LogicalParameter, SideDescription
from refit_transport.planning.classify import classify
from refit_transport.planning.cost import Bound, Prediction, lower_bound, predict
from refit_transport.planning.plan import Plan, PlanOptions
from refit_transport.planning.planner import plan_refit
from refit_transport.planning.presets.clusters import Cluster
from refit_transport.planning.presets.layouts import describe_generation, describe_training, domains_for, misfits
from refit_transport.planning.presets.models import Model
from refit_transport.planning.presets.parallel import Generation, Training
from refit_transport.planning.presets.whole import want_whole

SCOPES = ("ffn", "all")


@dataclass(frozen=True, slots=True)
class Job:
    """A refit to plan: the model, both layouts, the cluster, and whether both sides share their ranks."""

    model: Model
    training: Training
    generation: Generation
    cluster: Cluster
    colocated: bool = False
    options: PlanOptions = field(default_factory=PlanOptions)
    notes: tuple[str, ...] = ()
    """Assumptions that whoever made the job took on its behalf."""

    @property
    def trainers(self) -> range:
        return range(self.training.world)

    @property
    def generators(self) -> range:
        first = 0 if self.colocated else self.training.world
        return range(first, first + self.generation.world)

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        return domains_for(self.cluster, self.training.world, self.generation.world, self.colocated)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One transport and scope: its plan, how long planning took, and the prediction."""

    transport: str
    scope: str
    plan: Plan
    plan_seconds: float
    prediction: Prediction

    @property
    def title(self) -> str:
        return self.transport if self.transport == "gather_broadcast" else f"{self.transport}, scope {self.scope}"


@dataclass(frozen=True, slots=True)
class Study:
    """Outcomes for one job, first the one that the user asked about, and the bound that holds for all of them."""

    job: Job
    outcomes: tuple[Outcome, ...]
    bound: Bound
    assumptions: tuple[str, ...]

    @property
    def main(self) -> Outcome:
        return self.outcomes[0]


def study(job: Job, scopes: Sequence[str] = SCOPES, broadcast: bool = True) -> Study:
    """Plan and predict ``nccl_reshard`` for every scope, then ``gather_broadcast`` unless ``broadcast`` is False.

    Raises:
        JobError: the sizes do not fit the model; every violation at once.
        PlanError: the two sides cannot be joined.
    """
    source, shards = _describe(job)
    parameters = tuple(tensor.parameter for tensor in job.model.tensors)
    direct = {"ffn": classify(parameters).reshard, "all": frozenset(p.name for p in parameters)}
    outcomes = [_outcome(job, "nccl_reshard", scope, source, want_whole(shards, direct[scope]), parameters)
                for scope in scopes]  # fmt: skip
    if broadcast:
        outcomes.append(_outcome(job, "gather_broadcast", "all", source, want_whole(shards, ()), parameters))
    whole = next((o for o in outcomes if (o.transport, o.scope) == ("nccl_reshard", "all")), None)
    everything = whole.plan if whole else plan_refit(source, shards, parameters, job.domains, job.options)
    traffic = whole.prediction.traffic if whole else None
    bound = lower_bound(everything, job.cluster, source, job.trainers, traffic)
    return Study(job, tuple(outcomes), bound, _assumptions(job))


def _describe(job: Job) -> tuple[SideDescription, SideDescription]:
    if found := misfits(job.model, job.training, job.generation):
        raise JobError("\n".join(found))
    return (
        describe_training(job.model, job.training, job.trainers.start),
        describe_generation(job.model, job.generation, job.generators.start),
    )


class JobError(ValueError):
    """Every reason why the sizes do not fit the model, one per line."""


def _outcome(
    job: Job, transport: str, scope: str, source: SideDescription, sink: SideDescription,
    parameters: tuple[LogicalParameter, ...],
) -> Outcome:  # fmt: skip
    began = time.perf_counter()
    plan = plan_refit(source, sink, parameters, job.domains, job.options)
    seconds = time.perf_counter() - began
    prediction = predict(plan, job.cluster, senders=job.trainers, receivers=job.generators)
    return Outcome(transport, scope, plan, seconds, prediction)


def _assumptions(job: Job) -> tuple[str, ...]:
    notes = [*job.notes, *(f"Model: {note}." for note in job.model.assumed)]
    if job.cluster.assumed:
        notes.append(f"Cluster {job.cluster.name}: assumed, not public: {', '.join(job.cluster.assumed)}.")
    if not job.training.fsdp and job.model.layers % (job.training.pp * job.training.vpp):
        notes.append(
            f"{job.model.layers} layers do not divide over {job.training.pp * job.training.vpp} pipeline runs: "
            "the first runs hold one layer more."
        )
    notes.append("Trainers and inference ranks fill domains in rank order; nothing else uses the network meanwhile.")
    return tuple(notes)
