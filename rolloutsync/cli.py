"""The command line: ``rolloutsync demo | sim | abort | status``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from rolloutsync.client import RolloutClient
from rolloutsync.clock import Clock
from rolloutsync.errors import RolloutError
from rolloutsync.sample import Status

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:  # pragma: no cover - needs an environment without the extra
    sys.exit(f"the command line needs more packages ({missing}): pip install 'rolloutsync[cli,sim]'")

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rolloutsync.sample import Sample

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(width=None if sys.stdout.isatty() else 120)

Urls = Annotated[list[str], typer.Argument(help="Base URLs of the engines.", metavar="URL...")]
ApiKey = Annotated[str | None, typer.Option(envvar="ROLLOUTSYNC_API_KEY", help="Sent as a bearer token.")]
AdminKey = Annotated[str | None, typer.Option(envvar="ROLLOUTSYNC_ADMIN_API_KEY", help="For control endpoints.")]


@app.command()
def demo(
    engines: Annotated[int, typer.Option(min=1, help="Simulated engines to start.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to generate from.")] = 64,
    n: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 4,
) -> None:
    """Generate a batch on simulated engines, cut a long one short, and show what came of both."""
    from rolloutsync.sim import SimFleet  # noqa: PLC0415 - an extra, needed by this command alone

    console.print(f"starting {engines} simulated engines ...")
    simulated = SimFleet(engines=engines, max_running_requests=32, tokens_per_second=150.0, random_when_unseeded=True)
    with simulated as fleet, RolloutClient(fleet.urls) as client:
        _demo(client, prompts, n)


def _demo(client: RolloutClient, prompts: int, n: int) -> None:
    batch = [[(17 * number + k) % 499 + 3 for k in range(12)] for number in range(prompts)]
    console.print(f"generating {prompts} prompts x {n} ...")
    clock = Clock()
    begun = clock.monotonic()
    samples = client.generate(batch, {"temperature": 1.0, "max_new_tokens": 256}, n=n, progress=True)
    took = clock.monotonic() - begun
    console.print("starting a long batch and cutting it with abort_until_idle() ...")
    begun = clock.monotonic()
    job = client.start(batch, {"max_new_tokens": 20_000, "ignore_eos": True}, n=n)
    job.wait(1.0)
    report = client.abort_until_idle()
    cut, cut_took = job.result(), clock.monotonic() - begun
    console.print(str(report), highlight=False)
    console.print(_summary([("whole batch", samples, took), ("long batch, cut", cut, cut_took)]))
    console.print(_engine_table(client))


def _summary(rows: Sequence[tuple[str, Sequence[Sample], float]]) -> Table:
    table = Table(title="samples")
    for column in ("", *(status.value for status in Status), "tokens", "tokens/s", "retries", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for name, samples, seconds in rows:
        tokens = sum(len(sample.output_ids) for sample in samples)
        counts = [str(sum(sample.status is status for sample in samples)) for status in Status]
        retries = sum(max(0, sample.attempts - 1) for sample in samples)
        table.add_row(name, *counts, str(tokens), f"{tokens / seconds:.0f}", str(retries), f"{seconds:.2f}")
    return table


def _engine_table(client: RolloutClient) -> Table:
    table = Table(title="engines")
    columns = ("engine", "state", "version", "weights", "ranks", "in flight", "limit", "requests", "retries", "reason")
    for column in columns:
        table.add_column(column)
    totals = client.stats().engines
    for engine in client.engines():
        total = totals[engine.url]
        facts = [engine.version or "?", engine.weight_version or "?", str(engine.dp_size or "?")]
        counts = [str(engine.in_flight), str(engine.limit), str(total.requests), str(total.retries)]
        table.add_row(engine.url, engine.state.value, *facts, *counts, engine.reason)
    return table


@app.command()
def sim(
    engines: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the first; the others follow.")] = 30000,
    dialect: Annotated[str, typer.Option(help="sglang or vllm.")] = "sglang",
    version: Annotated[str, typer.Option(help="To behave as; by default the newest that is known.")] = "",
    max_running_requests: Annotated[int, typer.Option(min=1, help="Of each engine and rank.")] = 64,
    tokens_per_second: Annotated[float, typer.Option(min=0.001, help="Of each running request.")] = 200.0,
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of each engine.")] = 1,
) -> None:
    """Run simulated engines on 127.0.0.1 until Ctrl-C."""
    from rolloutsync.sim import run_engines  # noqa: PLC0415 - an extra, needed by this command alone

    def announce(urls: list[str]) -> None:
        for url in urls:
            console.print(url, highlight=False)
        console.print("ready; Ctrl-C ends them")

    run_engines(
        engines,
        port,
        on_ready=announce,
        dialect=dialect,
        version=version,
        max_running_requests=max_running_requests,
        tokens_per_second=tokens_per_second,
        dp_size=dp_size,
        random_when_unseeded=True,
    )


@app.command()
def abort(
    urls: Urls,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds.")] = 60.0,
    api_key: ApiKey = None,
    admin_api_key: AdminKey = None,
) -> None:
    """Abort everything on the engines and prove that they are idle. Exit code 1 if that fails."""
    with RolloutClient(urls, api_key=api_key, admin_api_key=admin_api_key) as client:
        report = client.abort_until_idle(timeout, raise_on_timeout=False)
    console.print(str(report), highlight=False)
    raise typer.Exit(0 if report.idle else 1)


@app.command()
def status(urls: Urls, api_key: ApiKey = None, admin_api_key: AdminKey = None) -> None:
    """Show what the engines are and what they are doing. Exit code 1 if one is not live."""
    with RolloutClient(urls, api_key=api_key, admin_api_key=admin_api_key) as client:
        loads = client.loads()
        engines = client.engines()
    table = Table(title="engines")
    for column in ("engine", "state", "version", "weights", "ranks", "limit", "load", "reason"):
        table.add_column(column)
    for engine in engines:
        facts = [engine.version or "?", engine.weight_version or "?", str(engine.dp_size or "?"), str(engine.limit)]
        table.add_row(engine.url, engine.state.value, *facts, str(loads.get(engine.url, "?")), engine.reason)
    console.print(table)
    raise typer.Exit(0 if all(engine.state.value == "live" for engine in engines) else 1)


def main() -> None:
    """Entry point: an error of ours is one line, not a traceback."""
    try:
        app()
    except (RolloutError, ValueError, TypeError) as error:
        console.print(f"rolloutsync: {error}", style="red", highlight=False, markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
