"""A base model whose weights change between two attempts."""

from pathlib import Path


def change_weights(base: Path) -> None:
    """Change one number of a model's weights; the file's size stays as it is."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    tensors[max(tensors)].flat[0] += 0.5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def write_teacher(base: Path, folder: Path) -> Path:
    """Write a copy of a model with other weights, and return its folder."""
    import shutil

    import numpy
    from safetensors.numpy import load_file, save_file

    shutil.copytree(base, folder)
    draw = numpy.random.default_rng(0)
    tensors = {
        name: (tensor + 0.5 * tensor.std() * draw.standard_normal(tensor.shape)).astype(tensor.dtype)
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
