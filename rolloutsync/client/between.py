"""The verbs between steps: drains, pauses, memory, weights, anything that an engine can be told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Deadline
from rolloutsync.config import check_count, check_number
from rolloutsync.controls import control_call
from rolloutsync.errors import shown
from rolloutsync.owner import CoreOwner
from rolloutsync.weight_update import DEFAULT_GROUP
from rolloutsync.weights import VERIFY

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from rolloutsync.idle import DrainReport
    from rolloutsync.weight_groups import WeightGroup
    from rolloutsync.weight_report import UpdateReport
    from rolloutsync.weight_update import WeightUpdate

_SCOPES = ("engine", "own")
_LEARN_BEFORE_DRAIN_S = 2.0


class BetweenSteps(CoreOwner):
    """Verbs that concern whole engines. Thread-safe."""

    def abort_until_idle(
        self,
        timeout: float = 60.0,
        *,
        scope: str = "engine",
        keep_closed: bool = False,
        raise_on_timeout: bool = True,
    ) -> DrainReport:
        """Abort everything and prove that the engines are idle, by their own word. Blocks until then.

        No new request leaves meanwhile; ``generate`` calls of other threads get their partials, samples that still
        wait for an engine end ABORTED. Calls that overlap are one drain.

        Args:
            timeout: Seconds; then the sockets of what is left are shut, on which engines abort.
            scope: "engine": everything that runs there, whoever sent it. "own": this client's requests alone, and no
                proof beyond their answers.
            keep_closed: Leave the gate closed when idle: requests wait until ``resume()``.
            raise_on_timeout: False returns the report instead of raising.

        Returns:
            What was found, engine by engine; ``print`` shows a table. Where an engine's load alone proves nothing
            (vLLM's is that of its last step), ``basis`` says what else its idleness rests on.

        Raises:
            NotIdleError: Not proven idle in time; names each engine and what remained, carries the report.
            RolloutError: ``quiesced`` or a weight update holds the engines; the same goes for ``pause`` and ``resume``.
        """
        _check_scope(scope)
        check_number("timeout", timeout)
        core = self._open()
        with core.quiet.guest("abort_until_idle()"):
            deadline = Deadline.after(core.clock, timeout)
            core.ready(deadline.within(_LEARN_BEFORE_DRAIN_S))
            drain = core.drainer.drain_own if scope == "own" else core.drainer.drain
            token = core.controls.kept_closed if keep_closed else None
            return drain(deadline.within(timeout), keep_closed=token, raise_on_timeout=raise_on_timeout)

    def pause(self, mode: str = "abort") -> None:
        """Pause every engine; this client's requests wait until ``resume``.

        Args:
            mode: "abort": running requests end. "in_place" (vLLM: also "keep"): they stand still. "retract" (SGLang):
                they go back into the queue. "wait" (vLLM): they end first.

        Raises:
            ValueError: Some engine knows no such mode; nothing was sent.
            ControlError: Some engine did not answer, or refused; the gate stays closed until ``resume``.
        """
        core = self._ready()
        with core.quiet.guest("pause()"):
            core.controls.pause(mode)

    def resume(self) -> None:
        """Continue every engine and let requests leave again, also after ``abort_until_idle(keep_closed=True)``.

        Raises:
            ControlError: Some engine did not answer, or refused; requests still wait.
        """
        core = self._ready()
        with core.quiet.guest("resume()"):
            core.controls.resume()

    def quiesced(self, mode: str = "abort", *, timeout: float = 60.0) -> AbstractContextManager[DrainReport | None]:
        """Keep every engine quiet within a ``with`` block. Entering blocks until they are.

        This client's requests wait meanwhile, and their deadlines stand still. Leaving the block, however that
        happens, continues the engines and lets requests leave; one that does not answer then gets no traffic until
        ``resume()`` reaches it. Blocks nest, also over threads: the last one out continues. ``pause``, ``resume`` and
        ``abort_until_idle`` are refused inside.

        Args:
            mode: "abort": aborted, proven idle, then paused; ``release_memory`` may follow. "hold": running requests
                stand still where they are and go on after. "retract" (SGLang): they go back into the queue, without
                their cache. "wait" (vLLM): they end first, what is queued waits. Engines that ``pause()`` holds
                already stay as they are in all but the first, also after the block.
            timeout: Seconds for the drain of mode "abort".

        Returns:
            A context manager; with mode "abort" its value is the ``DrainReport``, else None.

        Raises:
            NotIdleError: On entering: a live engine could not be proven idle.
            ControlError: On entering: a live engine could not be paused.
            ValueError: A mode that some engine does not know, or another mode inside a block that is not of "abort".
        """
        check_number("timeout", timeout)
        core = self._ready()
        core.check_mode(mode)
        return core.quiet.block(mode, timeout)

    # --- weights ---

    def weight_update(
        self,
        version: str | int | None = None,
        mode: str = "abort",
        *,
        verify: str | None = None,
        raise_on_stale: bool = True,
        timeout: float = 60.0,
    ) -> AbstractContextManager[WeightUpdate]:
        """Give every engine new weights, in any number of buckets, within a ``with`` block.

        Entering makes the engines quiet, as ``quiesced(mode)`` does; leaving awaits the buckets, empties the caches
        once, names the weights, reads the name back, and lets the engines go on. From then on only engines with these
        weights get traffic. An engine that failed is quarantined as stale; the others go on. A broadcast that does not
        reach one engine makes all of them stale, and its group is destroyed. They all take part in the next update; one
        that got its weights is back when it is proven idle, some seconds later.

        An exception in the block goes on its way after the engines were continued; engines that had been sent
        anything are stale. Weight calls may take ``Timeouts.long_control_s`` each and are never re-sent. One update at
        a time; the update itself may be used from several threads.

        Args:
            version: The label of these weights; None counts on from the highest number that is known.
            mode: See ``quiesced``. With "hold" and "wait", caches that requests stand on cannot be emptied.
            verify: "checksum": engines of the same make must have equal sums over their weights, by their own word;
                without a majority all of those are stale. None trusts them.
            raise_on_stale: False leaves stale engines to ``update.report``.
            timeout: Seconds for the drain of mode "abort".

        Returns:
            A context manager of a ``WeightUpdate``: ``from_distributed``, ``from_tensor``, ``from_disk``, ``report``.

        Raises:
            WeightUpdateError: On leaving: some engine is stale; ``.report`` says why. On entering: another update runs.
            NotIdleError, ControlError, ValueError: On entering, as for ``quiesced``.
            EngineUnavailableError: On entering: there is no engine to be updated.
        """
        check_number("timeout", timeout)
        _check_verify(verify)
        core = self._ready()
        core.check_mode(mode)
        return core.weights.update(version, mode, verify=verify, raise_on_stale=raise_on_stale, timeout=timeout)

    def update_weights_from_disk(
        self,
        path: str | os.PathLike[str],
        version: str | int | None = None,
        mode: str = "abort",
        *,
        verify: str | None = None,
        raise_on_stale: bool = True,
        timeout: float = 60.0,
        **fields: Any,
    ) -> UpdateReport:
        """Make every engine load a checkpoint: a ``weight_update`` with one bucket. Blocks until they go on.

        Args:
            path: As the engines see it.
            version: As for ``weight_update``, like what follows.
            mode: See ``quiesced``.
            verify: None or "checksum".
            raise_on_stale: False returns the report instead of raising.
            timeout: Seconds for the drain of mode "abort".
            **fields: Sent through, such as ``load_format``.

        Returns:
            What it came to, engine by engine; ``print`` shows a table.

        Raises:
            As ``weight_update``.
        """
        with self.weight_update(version, mode, verify=verify, raise_on_stale=raise_on_stale, timeout=timeout) as update:
            update.from_disk(path, **fields)
        assert update.report is not None
        return update.report

    def weight_versions(self) -> dict[str, str | None]:
        """Ask every engine what it calls its weights, by URL. Blocks for at most ``Timeouts.control_s``.

        None where an engine does not answer or does not say.
        """
        return self._ready().weights.versions()

    def init_group(
        self, master_address: str, master_port: int, *, group_name: str = DEFAULT_GROUP, backend: str = "nccl"
    ) -> WeightGroup:
        """Make every engine join a process group with the caller, who is rank 0. Does not wait for them.

        They answer once all ranks are there, so join as rank 0 with ``world_size`` of what this returns, then
        ``wait()``. Each engine gets as many ranks as its tensor-parallel size, from 1 on, in the fleet's order.

        Args:
            master_address: Of the rendezvous, as the engines reach it.
            master_port: Of the rendezvous.
            group_name: To be named by ``from_distributed``. A vLLM engine has a single group, whatever it is called.
            backend: "nccl" or "gloo"; vLLM's is the one that the server was started with.

        Returns:
            The group: ``world_size``, ``rank_offsets`` by URL, ``wait(timeout)``, which raises a ``WeightUpdateError``
            where an engine could not join.

        Raises:
            WeightUpdateError: There is such a group, or the fleet is mixed: engines of two kinds cannot share one.
            ProtocolError: An engine does not say its tensor-parallel size.
        """
        check_count("master_port", master_port)
        return self._ready().weights.groups.init(master_address, master_port, group_name, backend)

    def destroy_group(self, group_name: str = DEFAULT_GROUP) -> None:
        """Make every engine leave a group; no error where there is none. Blocks for at most ten seconds.

        Raises:
            WeightUpdateError: Some engine did not answer, or refused.
        """
        self._ready().weights.groups.destroy(group_name)

    # --- single calls ---

    def flush_cache(self) -> None:
        """Empty every engine's prefix cache. A busy engine refuses.

        Raises:
            ControlError: Some engine did not answer, or refused.
        """
        self._ready().controls.everywhere("flush_cache", lambda engine: engine.dialect.flush, gone_ok=True, strict=True)

    def release_memory(self, tags: Iterable[str] | None = None) -> None:
        """Make every engine give GPU memory back ("weights", "kv_cache", ...; None: all).

        vLLM gives its weights only together with its cache.

        Raises:
            ValueError: Some engine cannot release these alone; nothing was sent.
            NotIdleError: Not proven idle behind a closed gate: a busy engine dies of it.
            ControlError: Some engine did not answer, or refused.
        """
        self._ready().controls.release_memory(tags)

    def resume_memory(self, tags: Iterable[str] | None = None) -> None:
        """Make every engine take GPU memory again.

        Raises:
            ControlError: Some engine did not answer, or refused.
        """
        self._ready().controls.resume_memory(tags)

    def control(self, path: str, json: Any = None, *, method: str = "POST") -> dict[str, Any]:
        """Call any endpoint of every engine, with the admin key where there is one. Never re-sent.

        Args:
            path: Such as "/load_lora_adapter".
            json: The request body; None sends ``{}`` with POST.
            method: "POST" or "GET".

        Returns:
            The answers by URL: JSON, or text where it is not JSON.

        Raises:
            ControlError: It failed at some engine; the others' answers are in it.
        """
        call = control_call(path, json, method)
        return self._ready().controls.everywhere(f"{method} {path}", lambda _: call)


def _check_scope(scope: Any) -> None:
    if scope not in _SCOPES:
        raise ValueError(f"scope must be one of {_SCOPES}, got {shown(scope)}")


def _check_verify(verify: Any) -> None:
    if verify not in VERIFY:
        raise ValueError(f"verify must be one of {VERIFY}, got {shown(verify)}")
