"""River Explorer: `python app.py` loads a model, opens the page, and serves it. Also what a Hugging Face Space runs."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys

from app.limits import add_flags, from_flags

FIRST_PORT = 7860
PORTS_TRIED = 20


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. On a Space (SPACE_ID is set) the page listens on every address and opens no browser."""
    on_space = bool(os.environ.get("SPACE_ID"))
    parser = argparse.ArgumentParser(prog="app.py", description="Watch early-exit decoding live in the browser.")
    parser.add_argument("--model", help="hub id, local folder or .gguf file (default: the packaged SmolLM2-135M)")
    parser.add_argument("--host", default="0.0.0.0" if on_space else "127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help=f"port (default: the first free one from {FIRST_PORT})")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--dtype", default="auto", help="auto, fp32, fp16 or bf16")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument(
        "--offload-after", type=int, metavar="N", help="keep N backbone layers in memory; bring the others back for tokens that need them"
    )
    parser.add_argument("--no-browser", action="store_true", default=on_space, help="do not open a browser")
    add_flags(parser)
    return parser.parse_args(argv)


def choose_port(host: str, wanted: int | None) -> int:
    """The wanted port, or else the first free one from 7860.

    Raises:
        SystemExit: with a sentence, if no such port is free.
    """
    candidates = [wanted] if wanted is not None else range(FIRST_PORT, FIRST_PORT + PORTS_TRIED)
    for port in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OverflowError:
                sys.exit(f"{port} is not a port. Give a number between 1 and 65535.")
            except OSError:
                continue
            return port
    if wanted is not None:
        sys.exit(f"Port {wanted} is in use or not allowed. Leave out --port to take the next free one.")
    sys.exit(f"The ports {candidates[0]} to {candidates[-1]} are all in use. Give another one with --port.")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    port = choose_port(args.host, args.port)

    from app.model_host import ModelHost
    from app.runs import Runs

    def load(progress):
        import river_core

        options = {"device": args.device, "dtype": args.dtype, "threads": args.threads, "offload_after": args.offload_after}
        return river_core.load(args.model, **options, progress=progress)

    def compare(*positional, **named):
        import river_core

        return river_core.compare(*positional, **named)

    # The engine's libraries load while Gradio is still being imported, and the page opens before the model is there.
    host = ModelHost(load)
    limits = from_flags(args)
    runs = Runs(host, compare, limits=limits).open()

    from app.ui import build, launch_options

    demo = build(host, runs)
    _, url, _ = demo.launch(
        server_name=args.host,
        server_port=port,
        inbrowser=not args.no_browser,
        quiet=True,
        prevent_thread_lock=True,
        **launch_options(limits),
    )
    print(f"River Explorer is at {url} (Ctrl+C ends it)", flush=True)
    demo.block_thread()


if __name__ == "__main__":
    main()
