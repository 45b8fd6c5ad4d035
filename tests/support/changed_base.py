"""A base model whose weights change between two attempts."""

from pathlib import Path


def change_weights(base: Path) -> None:
    """Change one number of a model's weights; the file's size stays as it is."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    tensors[max(tensors)].flat[0] += 0.5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
