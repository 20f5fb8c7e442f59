"""Making samples, and what a client is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.batch import BatchRules, check_fields
from rolloutsync.client.between import BetweenSteps
from rolloutsync.client.members import Members
from rolloutsync.config import (
    GIB,
    ClientConfig,
    RetryPolicy,
    Timeouts,
    check_count,
    check_has,
    check_number,
    check_switch,
    parse_urls,
)
from rolloutsync.core import Core, Request
from rolloutsync.jobs import Job, check_on_error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from types import TracebackType

    import requests

    from rolloutsync.dialects.base import Dialect
    from rolloutsync.sample import Sample

_DIALECTS = ("auto", "sglang")


class RolloutClient(BetweenSteps, Members):
    """Drives rollout engines from synchronous code. Thread-safe.

    The constructor does no network I/O and starts no thread; the first verb does. Use it as a context manager, or call
    ``close``. It pickles (settings travel; sockets and threads do not) and works in a forked child, where it starts
    anew.

    Args:
        urls: One base URL or several: ``http(s)://host[:port][/prefix]``. Duplicates are one engine.
        dialect: "auto" or "sglang".
        engine_concurrency: Requests in flight at each engine. None: 1.25 times the engine's own running limit over
            all its ranks, at most 512; 256 where it does not say.
        retry: How often and how patiently a sample is tried again.
        timeouts: How long things may take, in seconds.
        body_budget_bytes: Large answers in memory at once; TCP holds the rest back.
        session: A ``requests.Session`` to honour: its headers, auth, TLS settings, proxies, adapters. Never changed.
        api_key: Sent as ``Authorization: Bearer``.
        admin_api_key: The same for control endpoints, where the engine has a key of their own.
        tokenizer: Anything with ``apply_chat_template``; needed for items with ``messages``.
        routed_experts_shape: (layers, topk), where the model's ``config.json`` cannot be read here.
        routed_experts_dtype: "auto" (the narrowest that holds the model's expert count), "uint8", "uint16", "int32".
        progress: Default for ``generate``: True, False, or None for a bar on a terminal after two seconds.

    Raises:
        ValueError, TypeError: An argument is wrong; names it and its value.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        dialect: str = "auto",
        engine_concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        body_budget_bytes: int = 2 * GIB,
        session: requests.Session | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        tokenizer: Any = None,
        routed_experts_shape: tuple[int, int] | None = None,
        routed_experts_dtype: str = "auto",
        progress: bool | None = None,
    ) -> None:
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect must be one of {_DIALECTS}, got {dialect!r}")
        check_has("session", session, "request")
        check_has("tokenizer", tokenizer, "apply_chat_template")
        config = ClientConfig(
            dialect=dialect,
            engine_concurrency=engine_concurrency,
            retry=RetryPolicy() if retry is None else retry,
            timeouts=Timeouts() if timeouts is None else timeouts,
            body_budget_bytes=body_budget_bytes,
            api_key=api_key,
            admin_api_key=admin_api_key,
            routed_experts_shape=routed_experts_shape,
            routed_experts_dtype=routed_experts_dtype,
            progress=progress,
        )
        super().__init__(parse_urls(urls), config, session, tokenizer)

    def _make_core(self) -> Core:
        return Core(self._urls, self._config, self._session)

    # --- making samples ---

    def generate(
        self,
        batch: Any,
        sampling_params: Any = None,
        *,
        n: int = 1,
        timeout: float | None = None,
        on_error: str = "auto",
        progress: bool | None = None,
        **request_fields: Any,
    ) -> list[Sample]:
        """Make ``n`` samples of each prompt. Blocks until every one has ended.

        A failed sample never loses the others. An abort is a result: ``status`` ABORTED, a partial.

        Args:
            batch: A list of text, token ids (list, tuple, numpy, torch), dicts in the engine's own words
                (``text``/``prompt``, ``input_ids``/``prompt_token_ids``, ``messages``, ``sampling_params``,
                ``image_data``, ``metadata``, further fields are sent through), ``Prompt`` and ``Sample`` in any mix.
                A finished sample is returned untouched; a failed one, or one without any token, starts anew.
            sampling_params: A dict or an object with such attributes, in the engine's words; never changed. An item's
                own override it key by key.
            n: Samples of each prompt; each is a request of its own.
            timeout: Seconds for the whole call; pauses by this client do not count. Samples that are not done by then
                are FAILED with ``DeadlineExceededError``.
            on_error: "auto": return all, warn of failed ones, raise only if all failed; "return": never raise;
                "raise": raise on any.
            progress: A tqdm bar; None takes the client's default.
            **request_fields: Sent with every request: ``return_logprob`` (True unless given), ``logprob_start_len``,
                ``top_logprobs_num``, ``return_routed_experts``, ``return_hidden_states``, ``priority`` (higher first,
                here too), ``session_id``, ``lora_path``, ...

        Returns:
            ``len(batch) * n`` samples, prompt-major, in input order.

        Raises:
            ValueError, TypeError: Bad input, named; nothing was sent.
            BatchError: See ``on_error``; ``.samples`` is the complete list.
            ClientClosedError: Closed.
        """
        job = self.start(
            batch,
            sampling_params,
            n=n,
            timeout=timeout,
            on_error=on_error,
            progress=progress,
            **request_fields,
        )
        with job:
            return job.result()

    def start(
        self,
        batch: Any,
        sampling_params: Any = None,
        *,
        n: int = 1,
        timeout: float | None = None,
        on_error: str = "auto",
        progress: bool | None = None,
        **request_fields: Any,
    ) -> Job:
        """``generate`` without waiting: a ``Job`` to iterate over, to ask for groups or the result, or to abort.

        Blocks only while new engines are asked what they are. Arguments and errors as for ``generate``.
        """
        core = self._open()
        check_on_error(on_error)
        check_count("n", n)
        limit = _seconds(timeout)
        check_switch("progress", progress)
        bar = self._config.progress if progress is None else progress
        items = core.read(batch, self._rules(core.dialect, sampling_params, request_fields, n))
        return core.start(Request(items=items, n=n, timeout=limit, on_error=on_error, progress=bar))

    def submit(
        self, prompt: Any, sampling_params: Any = None, *, timeout: float | None = None, **request_fields: Any
    ) -> Future[Sample]:
        """Make one sample. Does not wait for it.

        Args:
            prompt: One item of what ``generate`` takes as a batch.
            sampling_params: As for ``generate``.
            timeout: Seconds.
            **request_fields: As for ``generate``.

        Returns:
            A future of the sample, also of a failed one. ``cancel()`` aborts it; its result is then the partial.
        """
        core, limit = self._open(), _seconds(timeout)
        items = core.read([prompt], self._rules(core.dialect, sampling_params, request_fields, 1))
        return core.submit(Request(items=items, n=1, timeout=limit, on_error="return", progress=False))

    def _rules(self, dialect: Dialect, sampling_params: Any, request_fields: dict[str, Any], n: int) -> BatchRules:
        check_fields(request_fields)
        return BatchRules(
            dialect=dialect,
            sampling=dialect.check_sampling(sampling_params),
            fields={"return_logprob": True, **request_fields},
            n=n,
            tokenizer=self._tokenizer,
        )

    # --- the end: ``close`` is the owner's ---

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RolloutClient({self._urls!r})"


def _seconds(timeout: Any) -> float | None:
    if timeout is not None:
        check_number("timeout", timeout, open_end=True)
    return timeout  # type: ignore[no-any-return]  # checked above
