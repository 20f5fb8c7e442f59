"""One URL: what can be asked of one engine, over its two lanes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import Call, LoadKind, LoadReading, unknown_load
from rolloutsync.endpoint import Endpoint
from rolloutsync.errors import (
    Cut,
    EngineHTTPError,
    Phase,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
)
from rolloutsync.order import new_rid
from rolloutsync.transport import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rolloutsync.order import Group
    from rolloutsync.sample import Prompt, Segment
    from rolloutsync.transport import Landed, Pending, Reply

_CONTINUE_S = 2.0
_BAD_REQUEST = 400
_SHORT = 2048  # ids, or letters, which make no large request
_CALLS_EACH = (
    3  # by chance one of four front ends is missed by three in a hundred drains, and then the next sweep finds it
)
_BROKEN = {Phase.RACE, Phase.SENT, Phase.BODY}


class Flight(NamedTuple):
    """A generate that was sent, or could not be, and whose answer no thread waits for yet."""

    routes: Sequence[str]
    route: str
    call: Call
    pending: Pending


class Engine(Endpoint):
    """One inference server; see ``Endpoint``. Thread-safe."""

    # --- generate: the data lane ---

    def generate(
        self,
        prompt: Prompt,
        rid: str,
        *,
        deadline: Deadline,
        dp_rank: int | None = None,
        fresh: bool = False,
        group: Group | None = None,  # noqa: ARG002 - a router wants to know what belongs together
        flight: Flight | None = None,
    ) -> Segment:
        """Generate one sample's tokens; blocks until the engine has them all, or ``deadline``.

        Where the engine lacks the best way it is asked by the next, also from then on. With the ``flight`` of a request
        that ``send_off`` has sent, nothing more is sent at first.
        """
        while True:
            routes, route = self._routes(prompt) if flight is None else (flight.routes, flight.route)
            try:
                if flight is None:
                    call = self.dialect.encode_generate(prompt, rid, facts=self.facts, dp_rank=dp_rank, route=route)
                    reply = self._exchange(call, Lane.DATA, deadline, rid=rid, fresh=fresh)
                else:
                    call, reply, flight = flight.call, self._transport.finish(flight.pending), None
                with reply, self._transport.turn_for(reply):
                    return self._read(call, reply, prompt, rid)
            except EngineHTTPError as error:
                if not self._finds_another_way(routes, route, error):
                    error.engine, error.rid = self.url, rid
                    raise

    def _routes(self, prompt: Prompt) -> tuple[Sequence[str], str]:
        """The ways to ask for a prompt's tokens, and the best that the engine is not known to lack."""
        routes = self.dialect.generate_routes(prompt, self.facts)
        return routes, routes[0] if not self._lacking else self._first_there(routes)

    def parks(self, prompt: Prompt, *, block: bool) -> bool:
        """Whether it is of any use to ask for ``send_off``. Cheap."""
        asked = prompt.text if prompt.input_ids is None else prompt.input_ids
        large = prompt.image_data is not None or asked is None or len(asked) > _SHORT
        return (block or not large) and self._transport.parks(self.url)

    def send_off(
        self,
        prompt: Prompt,
        rid: str,
        *,
        deadline: Deadline,
        dp_rank: int | None,
        relieve: Callable[[], None] | None,
    ) -> Flight | None:
        """Send what ``generate`` would send at first, and read the answer later; see ``Transport.send_off``.

        Only where ``parks`` says so.

        Raises:
            RolloutError: It cannot be sent; nothing was.
        """
        routes, route = self._routes(prompt)
        call = self.dialect.encode_generate(prompt, rid, facts=self.facts, dp_rank=dp_rank, route=route)
        pending = self._transport.send_off(
            url=self.url + call.path,
            headers=self._headers(call),
            body=call.body or b"",
            engine=self.url,
            deadline=deadline,
            rid=rid,
            relieve=relieve,
        )
        return None if pending is None else Flight(routes, route, call, pending)

    def park(self, flight: Flight, landed: Landed) -> bool:
        """See ``Transport.park``."""
        return self._transport.park(flight.pending, landed)

    def take_in(self, flight: Flight, prompt: Prompt, rid: str) -> Segment:
        """The segment in an answer that has come whole, see ``Transport.park``. Does not block."""
        with self._transport.finish(flight.pending) as reply:
            return self._read(flight.call, reply, prompt, rid)

    def _first_there(self, routes: Sequence[str]) -> str:
        return next((route for route in routes if route not in self._lacking), routes[-1])

    def _finds_another_way(self, routes: Sequence[str], route: str, error: EngineHTTPError) -> bool:
        """Whether an error answer says that the engine has no such route, and there is another one for this prompt."""
        if not self.dialect.lacks(Call(method="POST", path=route), error.status, error.message):
            return False
        if self._is_another(None):  # there was a gateway when it was asked what it is, or another server came since
            return True
        if route != routes[-1]:
            self._lacking |= {route}
            return True
        return False

    def _is_another(self, deadline: Deadline | None) -> bool:
        """Whether what answers here speaks otherwise than we thought; from now on it is spoken to accordingly."""
        before = self.dialect
        with contextlib.suppress(TransportError):
            self._recognise(deadline)
            if self.dialect is not before:
                self.learn()
        return self.dialect is not before

    def _read(self, call: Call, reply: Reply, prompt: Prompt, rid: str) -> Segment:
        self._check_status(call, reply, rid)
        dtype = self._config.routed_experts_dtype
        try:
            answer = self._json(call, reply, self.dialect.large_fields(prompt, self.facts, dtype))
            return self.dialect.decode_generate(answer, prompt, rid, self.facts, dtype)
        except ProtocolError as error:
            reply.distrust()
            error.engine, error.rid = self.url, rid
            raise

    def cut(self, reason: Cut, *, rid: str | None = None) -> int:
        """Shut the sockets of our generates here (of one rid, or all), which wakes their threads."""
        return self._transport.cut(
            lambda e: e.engine == self.url and e.lane is Lane.DATA and rid in {None, e.rid}, reason
        )

    def cut_control(self, reason: Cut) -> int:
        """Shut the sockets of our control calls here."""
        return self._transport.cut(lambda e: e.engine == self.url and e.lane is Lane.CONTROL, reason)

    # --- everything else: the control lane ---

    def abort(self, rid: str | None, *, deadline: Deadline | None = None) -> None:
        """Abort one request, or all with None. The answer proves receipt, not the end.

        Raises:
            UnsupportedError: It has no way to do so. One request then ends by its socket, where that is as good.
        """
        self.know(deadline)
        ways, by_socket = self.dialect.abort_ways(rid), rid is not None and self.dialect.ends_on_disconnect
        there = [way for way in ways if way[0].path not in self._lacking]
        for way in there if there or by_socket else ways[-1:]:
            try:
                self._go(way, rid, deadline)
            except EngineHTTPError as error:
                if not self.dialect.lacks(way[0], error.status, error.message) or not (
                    by_socket or way is not ways[-1]
                ):
                    raise
                if error.status != _BAD_REQUEST:  # one that takes ids only is no use for all, but for one
                    self._lacking |= {way[0].path}
            else:
                return
        if not self.cut(Cut.ABORT, rid=rid):
            self.call(self.dialect.reach_call(), deadline=deadline)  # whose connection broke: is it still there?

    def _go(self, way: Sequence[Call], rid: str | None, deadline: Deadline | None) -> None:
        """Make the calls of one way to abort. What the first one began is ended by the others, whatever came of it."""
        if len(way) > 1 and self._is_paused(deadline):
            way = way[:1]  # by somebody who counts on it
        try:
            self._abort_by(way[0], rid, deadline)
        except UnsupportedError:
            raise
        except RolloutError:
            with contextlib.suppress(RolloutError):
                self._end_of(way)
            raise
        self._end_of(way)

    def _is_paused(self, deadline: Deadline | None) -> bool:
        if self.dialect.asks_paused is None:
            return False
        with contextlib.suppress(UnsupportedError):
            answer = self.call(self.dialect.asks_paused, deadline=deadline)
            return isinstance(answer, dict) and answer.get("is_paused") is True
        return False

    def _end_of(self, way: Sequence[Call]) -> None:
        self.owed = tuple(way[1:])
        self._pay(None)

    def _pay(self, deadline: Deadline | None) -> None:
        """End what an abort began: an engine that it left paused would take requests and never answer them."""
        for call in self.owed:
            seconds = _CONTINUE_S if deadline is None else deadline.within(_CONTINUE_S)
            self.call(call, deadline=Deadline.after(self._clock, seconds))
        self.owed = ()

    def _abort_by(self, call: Call, rid: str | None, deadline: Deadline | None) -> None:
        """The abort of one request is sent a second time where its connection broke: it can do no harm twice."""
        try:
            self._at_each_front_end(call, deadline)
        except TransportError as error:
            if rid is None or error.cut is not None or error.phase not in _BROKEN:
                raise
            self.call(call, deadline=deadline, fresh=True)

    def _at_each_front_end(self, call: Call, deadline: Deadline | None) -> list[Any]:
        """Make a call; where there are several front ends, on so many new connections that each most likely gets it."""
        several = (self.facts.front_ends or 1) > 1
        calls = _CALLS_EACH * (self.facts.front_ends or 1) if several else 1
        return [self.call(call, deadline=deadline, fresh=several) for _ in range(calls)]

    def load(self, *, deadline: Deadline | None = None) -> LoadReading:
        """Read the load. An answer that makes no sense is an UNKNOWN reading; only transport errors raise."""
        self.know(deadline)
        self._pay(deadline)
        calls = self.dialect.load_calls()
        for number in range(min(self._load_call, len(calls) - 1), len(calls)):
            try:
                answer = self.call(calls[number], deadline=deadline)
            except UnsupportedError:
                continue
            except EngineHTTPError as error:
                return unknown_load(str(error))
            self._load_call = number
            reading = self.dialect.read_load(calls[number], answer, self.facts.dp_size or 1)
            return reading if reading.kind is not LoadKind.ZERO else self._work(reading, deadline)
        if self._is_another(deadline):
            return self.load(deadline=deadline)
        return unknown_load(f"this engine has none of {[call.path for call in calls]}")

    def _work(self, reading: LoadReading, deadline: Deadline | None) -> LoadReading:
        """A reading of zero, or what shows that there is work all the same."""
        for call in self.dialect.work_calls():
            with contextlib.suppress(RolloutError):
                more = self.dialect.read_load(call, self.call(call, deadline=deadline), 1)
                if more.kind is LoadKind.BUSY:
                    return more
        return reading

    def held(self, *, deadline: Deadline | None = None) -> int | None:
        """Abort everything where that does an idle engine no harm; how much there was, or None if it does not tell."""
        call = self.dialect.census
        if call is None or call.path in self._lacking:
            return None
        try:
            counts = [self.dialect.read_census(said) for said in self._at_each_front_end(call, deadline)]
        except EngineHTTPError as error:
            if not self.dialect.lacks(call, error.status, error.message):
                raise
            if isinstance(error, UnsupportedError):
                self._lacking |= {call.path}
            return None  # it is not there, or takes ids only
        return None if None in counts else sum(count for count in counts if count is not None)

    def ask_scheduler(self, deadline: Deadline) -> bool:
        """Make a call that goes through the scheduler; False if this engine has none. No answer is an error."""
        for call in self.dialect.scheduler_calls():
            with contextlib.suppress(UnsupportedError):
                self.call(call, deadline=deadline)
                return True
        return False

    def pass_through(self, deadline: Deadline) -> None:
        """Have the core end a step, on one that answers no question; no answer is an error."""
        call = self.dialect.barrier(new_rid())
        if call is None:
            return
        ranks = self.facts.dp_size or 1
        for rank in range(ranks):
            headers = (("X-data-parallel-rank", str(rank)),) if ranks > 1 else ()
            self.call(replace(call, headers=headers), deadline=deadline)

    def scheduler_answers(self, deadline: Deadline) -> bool:
        """Whether a call that goes through the scheduler is answered, whatever it says. One it lacks counts as such."""
        try:
            self.know(deadline)
            self.ask_scheduler(deadline)
        except EngineHTTPError:
            return True
        except TransportError as error:
            return error.phase is Phase.LOCAL  # our own shortage says nothing about the engine
        except RolloutError:
            return False
        return True
