"""The `greenlane` command: what a person types.

Owns the commands and their help. Imports nothing heavy at the top, so that `--help` is quick; never imports the engine
core: `engine` and `worker` become its processes, `serve` starts them.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from frontend.cli_flags import Value, takes_flags

app = typer.Typer(
    help="Greenlane serves language models: a text frontend, an engine core and its workers, as separate processes.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="Text gRPC address of a running server.")]
Authorities = Annotated[
    str | None, typer.Option("--ssl-ca-certs", metavar="FILE", help="Speak TLS; who signed the server's certificate.")
]
Shown = Annotated[str | None, typer.Option("--ssl-certfile", metavar="FILE", help="Certificate to show to the server.")]
ShownKey = Annotated[str | None, typer.Option("--ssl-keyfile", metavar="FILE", help="Key of that certificate.")]
ApiKeyFile = Annotated[
    str | None, typer.Option("--api-key-file", metavar="FILE", help="File whose first bearer token is sent.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer, in tokens; default: the rest of the context.")]
ChatTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus of the distribution to draw from; default: the model's.")]
Seed = Annotated[int | None, typer.Option(help="Makes the answer repeatable.")]
Stats = Annotated[bool, typer.Option("--stats", help="Afterwards, print times and token counts to stderr.")]


def main() -> None:
    """Entry point of the console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"greenlane {version('greenlane')}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options of the command itself."""


def _serve(given: dict[str, Value], config: Path | None, ready_fd: int | None) -> None:
    """Start and supervise everything on this machine: an engine core, its workers and the frontends.

    When ready, one line tells the addresses. Ctrl-C finishes open requests and stops; twice stops at once.
    """
    from frontend.serve import serve

    raise typer.Exit(serve(given, config, ready_fd))


app.command("serve")(takes_flags(_serve))


@app.command(context_settings=PASS_THROUGH)
def engine(ctx: typer.Context) -> None:
    """Run an engine core alone, with workers of its own (`greenlane engine --help` shows its flags)."""
    _become("engine_core", "engine", *ctx.args)


@app.command(context_settings=PASS_THROUGH)
def frontend(ctx: typer.Context) -> None:
    """Run a frontend alone, for an engine core that runs already (`greenlane frontend --help` shows its flags)."""
    _become("frontend", *ctx.args)


@app.command(context_settings=PASS_THROUGH)
def worker(ctx: typer.Context) -> None:
    """Run a worker for an engine core that waits for it (`greenlane worker --help` shows its flags)."""
    _become("engine_core", "worker", *ctx.args)


def _become(module: str, *arguments: str) -> NoReturn:
    """Replace this process. -P: a folder called like our packages in the working directory must not run."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this and exit; default: a conversation.")] = None,
    address: Address = DEFAULT_ADDRESS,
    ssl_ca_certs: Authorities = None,
    ssl_certfile: Shown = None,
    ssl_keyfile: ShownKey = None,
    api_key_file: ApiKeyFile = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_tokens: ChatTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stats: Stats = False,
) -> None:
    """Talk with a running server. Ctrl-C stops an answer, Ctrl-D ends; piped, every line is one message."""
    from frontend.chat import ChatSession, SamplingOptions, Server, hold_conversation

    sampling = SamplingOptions(max_tokens, temperature, top_p, seed)
    server = Server(address, ssl_ca_certs, ssl_certfile, ssl_keyfile, api_key_file)
    raise typer.Exit(hold_conversation(ChatSession(server, sampling, system), question, show_stats=stats))


@app.command()
def complete(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    address: Address = DEFAULT_ADDRESS,
    ssl_ca_certs: Authorities = None,
    ssl_certfile: Shown = None,
    ssl_keyfile: ShownKey = None,
    api_key_file: ApiKeyFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stats: Stats = False,
) -> None:
    """Continue a text, as it stands, on a running server."""
    from frontend.chat import SamplingOptions, Server, complete_text

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingOptions(max_tokens, temperature, top_p, seed)
    server = Server(address, ssl_ca_certs, ssl_certfile, ssl_keyfile, api_key_file)
    raise typer.Exit(complete_text(server, text, sampling, show_stats=stats))


@app.command()
def check(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Also check that this model can be served.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="The device meant for it.")] = "cpu",
    port: Annotated[int, typer.Option(help="HTTP port that should be free.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Text gRPC port that should be free.")] = 50051,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tell whether this machine is fit to serve: Python, torch, GPU, lanes, model, ports. Exit status 1: not fit."""
    from frontend.check import check_machine, print_findings

    raise typer.Exit(print_findings(check_machine(model, device, (port, grpc_port)), as_json=as_json))


@app.command()
def trace(
    log: Annotated[Path, typer.Argument(metavar="FILE", help="What `greenlane serve --step-log FILE` wrote.")],
    out: Annotated[str | None, typer.Option(metavar="NAME", help="Path of the files; default: FILE's, bare.")] = None,
) -> None:
    """Show what a worker did when: a summary, a picture (NAME.svg, NAME.png), NAME.trace.json for ui.perfetto.dev."""
    from frontend.trace.command import trace as show

    raise typer.Exit(show(log, out))


@app.command()
def bench(
    url: Annotated[str, typer.Option(metavar="URL", help="Any OpenAI-style server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of its model; default: its first.")] = "",
    decoders: Annotated[int, typer.Option(help="Requests that stream all the time.")] = 16,
    inject_len: Annotated[int, typer.Option(help="Tokens of each prompt that arrives.")] = 4096,
    qps: Annotated[float, typer.Option(help="Prompts that arrive a second.")] = 2.0,
    n: Annotated[int, typer.Option("--n", help="Prompts that arrive.")] = 20,
    seconds: Annotated[float, typer.Option(help="Time measured before they do.")] = 4.0,
    out: Annotated[int, typer.Option(help="Tokens of a decoder; 0: as many as fit, at most 8000.")] = 0,
    vocab: Annotated[int, typer.Option(help="Prompts are random token ids below this.")] = 4000,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw an SVG there.")] = None,
    ssl_ca_certs: Authorities = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Measure the pace of decoding while prompts arrive, on any OpenAI-style server.

    The server must take token ids and ignore_eos in /v1/completions. For ordinary load (arrivals, sweeps, data sets)
    use aiperf, guidellm or vllm bench serve.
    """
    from frontend.bench.command import Files
    from frontend.bench.command import bench as measure
    from frontend.bench.mix import Mix

    mix = Mix(model, vocab, decoders, out, inject_len, qps, n, seconds)
    raise typer.Exit(measure(url, mix, Files(json, plot), ssl_ca_certs, api_key_file))
