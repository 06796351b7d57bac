"""Keeps the engines' weights at the trainer's version: refits only when they are stale, and checks what came of it."""

from __future__ import annotations

from refit_transport.rl.protocols import Completion, Generation, Refit, RefitReport, Reporter
from refit_transport.rl.timing import StepTimer

FIRST_VERSION = 1
"""Version of the weights training starts from; 0 is left to what an engine loads by itself."""


class WeightFreshness:
    """Trainer version, and whether the engines are behind it."""

    def __init__(self, refit: Refit, generation: Generation, reporter: Reporter, timer: StepTimer) -> None:
        self._refit = refit
        self._generation = generation
        self._reporter = reporter
        self._timer = timer
        self.version = FIRST_VERSION
        self.engine_version: int | None = None
        """What the engines serve since the last refit."""
        self.stale = True

    def resume_at(self, version: int) -> None:
        self.version = version
        self.stale = True

    def weights_changed(self) -> None:
        """The trainer made a new version."""
        self.version += 1
        self.stale = True

    def prepare_generation(self) -> None:
        """Refits when stale, otherwise only wakes the engines. Raises RuntimeError when an engine then serves another
        version than the trainer's."""
        with self._timer.phase("prepare_for_generation/total"):
            if self.stale:
                with self._timer.phase("prepare_for_generation/transfer_and_update_weights"):
                    report = self._refit.refit(self.version)
                self._check_engines(report)
                self.stale = False
                self.engine_version = self.version
                self._reporter.refit_done(report)
            self._generation.prepare_for_generation()

    def _check_engines(self, report: RefitReport) -> None:
        served = self._generation.weight_versions()
        behind = {engine: version for engine, version in enumerate(served) if version != self.version}
        if report.version != self.version or behind or not served:
            raise RuntimeError(
                f"refit: the trainer is at version {self.version}, the refit reports {report.version}, and engines "
                f"serve {served}; every engine must serve the trainer's version before it generates"
            )

    def check_completions(self, completions: list[Completion]) -> None:
        """Raises RuntimeError when a completion was generated with other weights than those of the last refit."""
        for index, completion in enumerate(completions):
            if tuple(completion.weight_versions) != (self.engine_version,):
                raise RuntimeError(
                    f"generation: completion {index} was made with weight versions {completion.weight_versions}, the "
                    f"last refit brought version {self.engine_version}"
                )
