"""`vssm serve`: models over HTTP."""

from pathlib import Path

from tyro.conf import Positional

from vssm.serve.settings import Settings

__all__ = ["serve_models"]


def serve_models(
    models: Positional[tuple[str, ...]] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    insecure: bool = False,
    device: str = "auto",
    limits: Settings = Settings(),  # noqa: B008 (it is immutable)
) -> None:
    """Serves models over HTTP, with a page to try them out at /.

    Arguments:
        models: Run folders, folders of forecast --save, names of shipped models or hf://OWNER/NAME,
            each optionally after NAME=. By default the shipped models.
        host: The address to listen on; one that others can reach needs --token-file or --insecure.
        port: The port; 0 for any that is free.
        token_file: A file with the token that clients must send.
        insecure: Serve on an address that others can reach without a token.
        device: Where to run: auto, cpu or cuda.
        limits: Limits.
    """
    try:
        from vssm.serve.run import serve
    except ImportError as error:
        raise ValueError(
            f"serving needs {error.name}; install it with: pip install 'vssm[serve]'"
        ) from None
    serve(models, host, port, token_file, insecure, device, limits)
