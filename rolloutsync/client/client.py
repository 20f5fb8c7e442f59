"""Making samples, and what a client is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rolloutsync.batch import BatchRules, check_fields
from rolloutsync.client.between import BetweenSteps
from rolloutsync.client.members import Members
from rolloutsync.client.routed import Routed
from rolloutsync.collect import Plan
from rolloutsync.config import (
    GIB,
    ClientConfig,
    RetryPolicy,
    Timeouts,
    check_bool,
    check_count,
    check_has,
    check_number,
    check_switch,
    parse_urls,
)
from rolloutsync.core import Core, Request
from rolloutsync.dialects.every import NAMES
from rolloutsync.episodes import EpisodeRun, check_episode
from rolloutsync.errors import shown
from rolloutsync.jobs import Job, check_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor, Future
    from types import TracebackType

    import requests

    from rolloutsync.collected import Collected
    from rolloutsync.dialects.base import Vocabulary
    from rolloutsync.episodes import Episode
    from rolloutsync.sample import Sample
    from rolloutsync.turn import Turn

C = TypeVar("C", bound="RolloutClient")


class RolloutClient(BetweenSteps, Members, Routed):
    """Drives rollout engines from synchronous code. Thread-safe.

    The constructor does no network I/O and starts no thread; the first verb does. Use it as a context manager, or call
    ``close``. It pickles (settings travel; sockets and threads do not) and works in a forked child, where it starts
    anew.

    Args:
        urls: One base URL or several: ``http(s)://host[:port][/prefix]``. Duplicates are one engine.
        dialect: "auto" asks each engine what it is; "sglang" or "vllm" holds for all of them.
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
        if dialect not in NAMES:
            raise ValueError(f"dialect must be one of {NAMES}, got {shown(dialect)}")
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
        return Core([], self._config, self._session)

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
        keep_partials: bool = True,
        **request_fields: Any,
    ) -> list[Sample]:
        """Make ``n`` samples of each prompt. Blocks until every one has ended.

        A failed sample never loses the others. An abort is a result: ``status`` ABORTED, a partial.

        Args:
            batch: A list of text, token ids (list, tuple, numpy, torch), dicts in the engine's own words
                (``text``/``prompt``, ``input_ids``/``prompt_token_ids``, ``messages``, ``sampling_params``,
                ``image_data``, ``metadata``, further fields are sent through), ``Prompt`` and ``Sample`` in any mix.
                A finished sample is returned untouched. A partial goes on where it was cut: its tokens are sent as part
                of the prompt, with what is left of its budget; its own parameters and fields hold. A failed one, or one
                without any token, starts anew.
            sampling_params: A dict or an object with such attributes, in the engine's words; never changed. An item's
                own override it key by key.
            n: Samples of each prompt; each is a request of its own.
            timeout: Seconds for the whole call; pauses by this client do not count. Samples that are not done by then
                are FAILED with ``DeadlineExceededError``.
            on_error: "auto": return all, warn of failed ones, raise only if all failed; "return": never raise;
                "raise": raise on any.
            progress: A tqdm bar; None takes the client's default.
            keep_partials: False starts partials over from their bare prompts.
            **request_fields: Sent with every request: ``return_logprob`` (True unless given), ``logprob_start_len``,
                ``top_logprobs_num``, ``return_routed_experts``, ``return_hidden_states``, ``priority`` (higher first,
                here too), ``session_id`` (all requests that bear the same go to one engine while it is live),
                ``lora_path``, ...

        Returns:
            ``len(batch) * n`` samples, prompt-major, in input order.

        Raises:
            ValueError, TypeError: Bad input, named; nothing was sent. So is a partial that cannot be continued
                exactly: one with a grammar, or of a text whose token ids the engine did not tell.
            BatchError: See ``on_error``; ``.samples`` is the complete list.
            ClientClosedError: Closed.
        """
        self._open().quiet.check_not_mine("generate()")
        job = self.start(
            batch,
            sampling_params,
            n=n,
            timeout=timeout,
            on_error=on_error,
            progress=progress,
            keep_partials=keep_partials,
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
        keep_partials: bool = True,
        **request_fields: Any,
    ) -> Job:
        """``generate`` without waiting: a ``Job`` to iterate over, to ask for groups or the result, or to abort.

        Blocks only while new engines are asked what they are. Arguments and errors as for ``generate``.
        """
        core = self._open()
        check_on_error(on_error)
        check_count("n", n)
        limit = _seconds(timeout)
        bar = self._bar(progress)
        check_bool("keep_partials", keep_partials)
        rules = self._rules(core.vocabulary, sampling_params, request_fields, n)
        items = core.read(batch, replace(rules, keep_partials=keep_partials))
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
        items = core.read([prompt], self._rules(core.vocabulary, sampling_params, request_fields, 1))
        return core.submit(Request(items=items, n=1, timeout=limit, on_error="return", progress=False))

    def collect(
        self,
        prompts: Iterable[Any],
        sampling_params: Any = None,
        *,
        n: int,
        target: int,
        accept: Callable[[list[Sample]], object] | None = None,
        oversample: float = 1.5,
        in_flight: int | None = None,
        executor: Executor | None = None,
        timeout: float | None = None,
        progress: bool | None = None,
        keep_partials: bool = True,
        **request_fields: Any,
    ) -> Collected:
        """Make groups of ``n`` samples until ``target`` of them are accepted, then abort the rest. Blocks until then.

        A little more is in flight than is missing, so that nobody waits for the longest; a rejected group is replaced.
        The end touches this call's own requests alone. Nothing is lost: finished groups that are not needed come back
        as ``surplus``, unfinished ones as ``partials``. Which groups come first depends on their length: what is
        always cut short is the long ones, unless ``partials`` go on in the next call::

            stream = iter(dataset)
            while True:
                got = client.collect(itertools.chain(carried, stream), params, n=8, target=128, accept=mixed)
                carried = got.partials

        Args:
            prompts: A list or an iterator (it may be endless) of what ``generate`` takes as items; read no further
                than needed. An item may also be a list of ``n`` samples, a group of an earlier call: its finished
                members are kept, the others go on (failed ones, and those without tokens, start anew).
            sampling_params: As for ``generate``.
            n: Samples of each group.
            target: Groups that are to be accepted.
            accept: Judges a whole group, its n samples by member, as soon as it has finished; anything true accepts.
                It may replace samples in the list that it gets, by such with a ``reward``. Called in this thread, one
                group at a time. Groups with a FAILED member are rejected unasked. None accepts every other group.
            oversample: Groups in flight (or being judged) for each one that is missing; at least 1.
            in_flight: Groups in flight whatever is missing; takes the place of ``oversample``.
            executor: A ``concurrent.futures.Executor`` in which ``accept`` runs instead, several at a time. It is not
                waited for at the end: groups whose verdict is late are surplus.
            timeout: Seconds; pauses by this client do not count. What is there by then is returned, and flagged.
            progress: A tqdm bar of accepted groups; None takes the client's default.
            keep_partials: False: unfinished samples in ``prompts`` lose their tokens and start anew.
            **request_fields: As for ``generate``.

        Returns:
            Groups, surplus, rejected, partials; ``ended`` says why it ended. ``complete`` is False, and a WARNING
            says so, where the prompts or the time ran out before the target, or (without a WARNING) where somebody
            aborted its requests: a drain, ``close``.

        Raises:
            ValueError, TypeError: A bad argument, or bad first items, named; nothing was sent.
            CollectError: ``accept``, the iterator or a later item raised (``__cause__``), or every sample of many
                groups in a row failed; ``.collected`` has all that is there.
            ClientClosedError: Closed before anything was sent.
        """
        core = self._open()
        core.quiet.check_not_mine("collect()")
        plan = Plan(
            prompts=prompts,
            n=n,
            target=target,
            accept=accept,
            oversample=oversample,
            in_flight=in_flight,
            executor=executor,
            timeout=timeout,
            progress=self._bar(progress),
            keep_partials=keep_partials,
        )
        return core.collect(plan, self._rules(core.vocabulary, sampling_params, request_fields, n))

    def map(
        self,
        episode: Callable[[Turn, Any], Any],
        items: Iterable[Any],
        *,
        sampling_params: Any = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        on_error: str = "auto",
        progress: bool | None = None,
        **request_fields: Any,
    ) -> list[Episode]:
        """Multi-turn rollouts: call ``episode(turn, item)`` for each item, each in a thread. Blocks until all ended.

        An episode is plain blocking code; each ``turn.generate`` in it is one request::

            def episode(turn, question):
                ids = tokenize(question)
                call = turn.generate(ids)
                ids = [*ids, *call.output_ids, *tokenize(run_tool(call.text))]
                return score(turn.generate(ids, {"max_new_tokens": 64}))

        Its turns stay on one engine and DP rank (for the prefix cache), also while others are less busy; they move when
        that engine dies, leaves or refuses a turn. A slow tool keeps nobody but its own episode waiting. An exception
        fails its item alone.

        ``close`` and everything that aborts engine-wide (``abort_until_idle``, ``pause``, ``quiesced`` and weight
        updates in mode "abort") in another thread interrupt every episode of the map: at once in a turn, else at its
        next one, or before it begins. ``turn.generate`` then raises ``EpisodeInterrupt``, which is no ``Exception``; an
        episode that swallows it gets it again at each turn, and is INTERRUPTED whatever it returns. Ctrl-C does the
        same and ends within two seconds. Where an episode is still busy with other things 5 s after ``close`` or the
        end of ``timeout``, its item is answered without it; its thread, a daemon, is named in a WARNING.

        Args:
            episode: The function. It runs in many threads at once.
            items: Anything; one episode each.
            sampling_params: Defaults for all turns; a turn's own override them key by key. A seed is the first turn's,
                and one more for each further turn.
            concurrency: Episodes at once, each a thread. None: as many as the engines take requests, at least 64 and
                at most 1024.
            timeout: Seconds for the whole call; pauses by this client do not count. Turns fail from then on.
            on_error: As for ``generate``, of episodes: a FAILED one is one whose function raised.
            progress: A tqdm bar of episodes; None takes the client's default.
            **request_fields: Defaults for all turns.

        Returns:
            One ``Episode`` for each item, in input order: value, status, error, and a transcript whose ``segments``
            are training samples.

        Raises:
            ValueError, TypeError: A bad argument, named; no episode began.
            EpisodeError: See ``on_error``; ``.episodes`` is the complete list.
            ClientClosedError: Closed before it began.
        """
        core = self._open()
        core.quiet.check_not_mine("map()")
        check_on_error(on_error)
        check_episode(episode)
        if concurrency is not None:
            check_count("concurrency", concurrency)
        limit, bar = _seconds(timeout), self._bar(progress)
        rules = self._rules(core.vocabulary, sampling_params, request_fields, 1)
        stage = core.stage(rules, limit)
        run = EpisodeRun(stage, episode, list(items), concurrency=core.episodes_at_once(concurrency), progress=bar)
        return run.result(on_error)

    def _bar(self, progress: Any) -> bool | None:
        check_switch("progress", progress)
        return self._config.progress if progress is None else progress

    def _rules(self, words: Vocabulary, sampling_params: Any, request_fields: dict[str, Any], n: int) -> BatchRules:
        check_fields(request_fields)
        sampling = words.check_sampling(sampling_params)
        self._check_kept(request_fields, sampling)
        return BatchRules(
            vocabulary=words,
            sampling=sampling,
            fields={"return_logprob": True, **request_fields},
            n=n,
            tokenizer=self._tokenizer,
        )

    # --- the end: ``close`` is the owner's ---

    def __enter__(self: C) -> C:  # noqa: PYI019 - typing.Self is 3.11
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
