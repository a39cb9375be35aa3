"""``ratp serve``: answer images over HTTP."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ratp.cli.console import print_note, say, stderr
from ratp.cli.options import MethodFile, OwnBackbone, Quiet


def serve(
    deployment: Annotated[Path, typer.Argument(help="Directory of the deployment.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="RATP_TOKEN",
            help="Secret that POST /rollback and POST /adapt need; without one, they are off. Better in $RATP_TOKEN: "
            "other users of this machine can see options.",
            show_default=False,
        ),
    ] = None,
    adapt: Annotated[
        str | None,
        typer.Option(help="never, ask, auto or online, in place of the deployment's own setting.", show_default=False),
    ] = None,
    max_bytes: Annotated[int, typer.Option(metavar="N", help="Largest size of an image file.")] = 20_000_000,
    max_pixels: Annotated[int, typer.Option(metavar="N", help="Most pixels of an image.")] = 50_000_000,
    rate: Annotated[float, typer.Option(metavar="N", help="Requests per second and client address.")] = 200,
    timeout: Annotated[float, typer.Option(metavar="SEC", help="Time for an image to arrive.")] = 30,
    method: MethodFile = None,
    backbone: OwnBackbone = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, mps or auto.")] = "auto",
    quiet: Quiet = False,
) -> None:
    """Serve a deployed model over HTTP: one image per request, to class, confidence and version.

    POST /predict and /observe take an image as the body; GET / is a page that shows the state.
    """
    from ratp.cli.progress import interruptible
    from ratp.deploy.deployment import Deployment
    from ratp.deploy.serve import Limits
    from ratp.deploy.serve import serve as listen

    limits = Limits(max_bytes, max_pixels, rate, timeout)
    console = stderr()
    with (
        interruptible(console, between_steps=False, advice="The server has stopped."),
        Deployment(deployment, device=device, method=method, backbone=backbone) as model,
    ):
        if adapt is not None:
            model.settings = replace(model.settings, adapt=adapt)  # type: ignore[arg-type]  # checked there
        if not _is_loopback(host):
            print_note(
                f"{host} can be reached from other machines: whoever can do so may use the model. Requests are not "
                "encrypted.",
                console,
            )

        def ready(address: str) -> None:
            if not quiet:
                level = model.level if model.is_calibrated else "off, until the first images show what is usual"
                say(f"version {model.version} answers at {address}; alarm {level}; --adapt {model.settings.adapt}")
                say(f'Try: curl --data-binary @IMAGE -H "Content-Type: image/*" {address}/predict')

        listen(model, host=host, port=port, limits=limits, token=token or None, ready=ready)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
