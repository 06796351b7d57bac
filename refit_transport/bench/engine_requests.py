"""Requests that keep an engine busy while it is refitted."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import Any


class Requests:
    """Requests that start again whenever they end, and the number of tokens they got."""

    def __init__(self, engine: Any, requests: int, tokens: int, timeout_seconds: float) -> None:
        self._engine, self._requests, self._tokens = engine, requests, tokens
        self._timeout = timeout_seconds
        self._numbers = count()
        self._tasks: list[asyncio.Task] = []
        self.tokens = 0

    async def __aenter__(self) -> Requests:
        self._tasks = [asyncio.create_task(self._always()) for _ in range(self._requests)]
        await self.progress()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def progress(self) -> None:
        """Return once the engine has put out as many tokens since the call as there are requests. Raises what ended a
        request, TimeoutError when none come."""
        wanted, deadline = self.tokens + self._requests, time.monotonic() + self._timeout
        while self.tokens < wanted:
            if broken := [task for task in self._tasks if task.done()]:
                await broken[0]
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the engine put out {self.tokens + self._requests - wanted} of {self._requests} tokens within "
                    f"{self._timeout:g} s"
                )
            await asyncio.sleep(0.001)

    async def _always(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=self._tokens, ignore_eos=True, temperature=1.0, output_kind=RequestOutputKind.DELTA
        )
        while True:
            name = f"load-{next(self._numbers)}"
            async for output in self._engine.generate({"prompt_token_ids": [1, 2, 3]}, sampling, name):
                self.tokens += len(output.outputs[0].token_ids)
