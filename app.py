"""River Explorer: `python app.py` loads a model, opens the page, and serves it. Also what a Hugging Face Space runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import webbrowser

from app.limits import add_flags, from_flags
from app.serving import FIRST_PORT, bare, choose_port, in_url, on_zerogpu, read_root_path, spare_the_proxy, to_open

ENVIRONMENT = """environment variables:
  GRADIO_SERVER_NAME, GRADIO_SERVER_PORT, GRADIO_ROOT_PATH   as --host, --port, --root-path
  GRADIO_MCP_SERVER   True is --mcp, for a Space, which takes no options
  GRADIO_TEMP_DIR     where files to download lie for a day (default: the system's folder for temporary files)
  SPACE_ID            is set on a Hugging Face Space: the page listens on every address and opens no browser
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. On a Space (SPACE_ID is set) the page listens on every address and opens no browser."""
    on_space = bool(os.environ.get("SPACE_ID"))
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Watch early-exit decoding live in the browser.",
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="hub id, local folder or .gguf file (default: the packaged SmolLM2-135M)")
    address = os.environ.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if on_space else "127.0.0.1")
    parser.add_argument("--host", default=address, help="address to listen on, IPv4 or IPv6 (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=os.environ.get("GRADIO_SERVER_PORT"), help=f"port (default: the first free one from {FIRST_PORT})"
    )
    parser.add_argument("--root-path", metavar="PATH", help="path under which a proxy serves the page, such as /river")
    parser.add_argument(
        "--mcp", action="store_true", help="also offer /trace to agents, as a tool of a server of the Model Context Protocol"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--dtype", default="auto", help="auto, fp32, fp16 or bf16")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument(
        "--offload-after", type=int, metavar="N", help="keep N backbone layers in memory; bring the others back for tokens that need them"
    )
    parser.add_argument("--no-browser", action="store_true", default=on_space, help="do not open a browser")
    add_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    host_name = bare(args.host)
    root_path = read_root_path(args.root_path)
    port = choose_port(host_name, args.port)
    spare_the_proxy(host_name)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # Gradio greets with signs that not every terminal has

    if on_zerogpu():
        from app import zerogpu  # before PyTorch

    from app.model_host import ModelHost
    from app.runs import Runs

    def load(progress):
        import river_core

        options = {"device": args.device, "dtype": args.dtype, "threads": args.threads, "offload_after": args.offload_after}
        return river_core.load(args.model, **options, progress=progress)

    def compare(*positional, **named):
        import river_core

        return river_core.compare(*positional, **named)

    if on_zerogpu():
        import river_core

        options = {"name": args.model, "device": "cuda", "dtype": args.dtype, "threads": args.threads, "offload_after": args.offload_after}
        lent = zerogpu.place(river_core.load, river_core.compare, **options)
        load, compare = (lambda progress: lent), zerogpu.compare

    # The engine's libraries load while Gradio is still being imported, and the page opens before the model is there.
    host = ModelHost(load)
    limits = from_flags(args)
    runs = Runs(host, compare, limits=limits).open()

    from app.ui import build, launch_options

    demo = build(host, runs)
    try:
        demo.launch(
            server_name=in_url(host_name),
            server_port=port,
            root_path=root_path,
            mcp_server=args.mcp or None,  # None: as GRADIO_MCP_SERVER says
            quiet=True,
            prevent_thread_lock=True,
            **launch_options(limits),
        )
    except ImportError as error:
        if "mcp" not in str(error):
            raise
        sys.exit("--mcp needs a library that is not installed here: pip install -r requirements.txt")
    url = to_open(host_name, port)
    print(f"River Explorer is at {url} (Ctrl+C ends it)", flush=True)
    if not args.no_browser:
        webbrowser.open(url)
    demo.block_thread()


if __name__ == "__main__":
    main()
