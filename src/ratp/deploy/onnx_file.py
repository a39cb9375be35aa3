"""Converts, shrinks and runs ONNX models: the only module that imports onnx and onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ratp._core.environment import check_installed

INPUT, OUTPUTS = "images", ("probabilities", "logits")
# Images that are run at a time.
BATCH = 16


def check_onnx() -> None:
    """Raises a ConfigError unless the libraries of the extra are there."""
    check_installed(("onnx", "onnxscript", "onnxruntime"), "ONNX", 'pip install "ratp-cdsl[onnx]"')


def to_onnx(program: ExportedProgram, about: Mapping[str, str]) -> bytes:
    """Converts a program whose input is a batch of images, with a batch of any size, and adds metadata."""
    from onnx import helper

    with _quietly():
        converted = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=OUTPUTS,
            dynamic_shapes={INPUT: {0: "n"}},
            external_data=False,
            verbose=False,
        )
    assert converted is not None
    model = converted.model_proto
    helper.set_model_props(model, dict(about))
    return bytes(model.SerializeToString())


def run_onnx(model: bytes, images: Tensor) -> Tensor:
    """Returns a model's logits of images."""
    from onnxruntime import InferenceSession

    session = InferenceSession(model, providers=["CPUExecutionProvider"])
    outputs = (session.run([OUTPUTS[1]], {INPUT: part.numpy()})[0] for part in in_batches(images))
    return torch.cat([torch.from_numpy(logits) for logits in outputs])


def in_batches(images: Tensor) -> list[Tensor]:
    """Splits images into the first alone, then batches, so that a file is tried with batches of several sizes."""
    return [part for part in (images[:1], *torch.split(images[1:], BATCH)) if len(part)]


def to_half(model: bytes) -> bytes:
    """Converts weights and arithmetic to 16-bit floats; input and outputs keep their types."""
    from onnx import load_model_from_string
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with _quietly():
        half = convert_float_to_float16(load_model_from_string(model), keep_io_types=True)
    return bytes(half.SerializeToString())


def to_int8(model: bytes, images: Tensor) -> bytes:
    """Converts convolutions and matrix products to 8-bit integers, with ranges measured on images."""
    from onnx import load_model_from_string
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._parts = iter(torch.split(images, BATCH))

        def get_next(self) -> dict[str, object] | None:
            part = next(self._parts, None)
            return None if part is None else {INPUT: part.numpy()}

    with TemporaryDirectory() as folder, _quietly():
        path = Path(folder) / "int8.onnx"
        quantize_static(
            load_model_from_string(model),
            path,
            Reader(),
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],  # so preprocessing stays exact
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return path.read_bytes()


@contextmanager
def _quietly() -> Iterator[None]:
    """Hides what the converters say of their own workings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
