"""Argument checks that the contracts of all operations share. None of them reads a value from a device."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: torch.dtype | tuple[torch.dtype, ...]
) -> None:
    """Check that an argument is a tensor of a shape (None for any length) and of one of the dtypes.

    Raises:
        TypeError: it is no tensor, or of another dtype.
        ValueError: it has another shape.
    """
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it first")
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}; convert it first")
    is_right = tensor.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not is_right:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(
            f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}; reshape it or correct the argument it must agree with"
        )


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Check that all tensors lie on one device.

    Raises:
        ValueError: they do not.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must lie on one device, got {given}; move them to one")


def check_count(name: str, value: int, *, at_least: int) -> None:
    """Check that an argument is an integer of at least some size.

    Raises:
        TypeError: it is no integer.
        ValueError: it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}); pass an int")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}; raise it")


def check_temperature(temperature: float) -> None:
    """Check that a temperature divides logits to something finite.

    Raises:
        ValueError: it is not a positive finite number.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a positive finite number, got {temperature}; greedy choice needs no softmax")
