"""A conversation with a tuned model: each answer is shown while the model writes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytune import files, limits
from flytune.data.messages import Message
from flytune.errors import DataError
from flytune.inference.batch import InferenceModel
from flytune.models import Generation, images, positions
from flytune.models.generation import configure
from flytune.sentences import counted


class Conversation:
    """Questions and answers of one conversation; without a chat template each text is continued alone."""

    def __init__(
        self, model: InferenceModel, generation: Generation, system_prompt: str | None = None
    ) -> None:
        """Begin a conversation.

        Args:
            model: the model that answers.
            generation: settings; an answer has no more tokens than the model has positions for.
            system_prompt: the first message; by default that of the model's training.
        """
        import torch

        self.model = model
        self.generation = generation
        self.format = model.own_format
        self.remembers = self.format.tokenizer.chat_template is not None
        self.messages: list[Message] = []
        self._images: list[dict[str, Any]] = []
        """Images of the next question, parts of its content."""
        self._system: dict[str, Any] = {"system": system_prompt} if system_prompt else {}
        torch.manual_seed(generation.seed)

    def clear(self) -> None:
        """Forget all questions and answers."""
        self.messages, self._images = [], []

    def add_image(self, file: Path) -> None:
        """Put an image file before the next question.

        Raises:
            DataError: it cannot be read as an image, or the model reads text alone.
        """
        if self.format.processor is None:
            raise DataError(f"{file}: this model was trained on text alone; ask without images")
        if not self.remembers:
            raise DataError(f"{file}: the model has no chat template, which would say where an image is")
        try:
            content = files.read_regular(file.expanduser(), limits.IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; name an image file") from None
        picture = images.opened(content, self.format.columns.max_pixels, str(file))
        self._images.append({"type": "image", "image": picture})

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """Return the model's answer to a question, and to the images before it, whose pieces `show` gets as
        they are written.

        Raises:
            DataError: the conversation is longer than the model can read, or its template refuses it.
        """
        import torch
        from transformers import TextStreamer

        class Pieces(TextStreamer):
            """Text as it is written, up to the last complete word."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        content: Any = question
        if self._images:
            content = [*self._images, {"type": "text", "text": question}]
            self._images = []
        asked: list[Message] = [*self.messages, {"role": "user", "content": content}]
        parts = [part for turn in asked if isinstance(turn["content"], list) for part in turn["content"]]
        pictures = [part["image"] for part in parts if "image" in part]
        row = {"messages": asked, **self._system} if self.remembers else {"prompt": question}
        tokens = self.format.tokens(row, "this conversation", pictures)
        tokenizer, network = self.format.tokenizer, self.model.model
        settings = self.generation.model_copy(update={"max_new_tokens": self._room(len(tokens))})
        configure(network, tokenizer, settings, self.format.ends)
        input_ids = torch.tensor([tokens])
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if self.format.processor is not None:
            inputs |= self.format.processor.inputs([pictures], input_ids)
        device = next(network.parameters()).device
        pieces = Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.no_grad():
            output = network.generate(
                **{name: values.to(device) for name, values in inputs.items()}, streamer=pieces
            )
        text = str(tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True))
        if self.remembers:
            self.messages = [*asked, {"role": "assistant", "content": text}]
        return text

    def _room(self, length: int) -> int:
        """Return the largest number of tokens that an answer may have after `length` tokens."""
        limit = positions.of_model(self.model.model)
        if limit is None:
            return self.generation.max_new_tokens
        if length >= limit.tokens:
            raise DataError(
                f"this conversation: {counted(length, 'token')} are more than the model's context of "
                f"{limit.tokens:,}; begin again with /new"
            )
        return min(self.generation.max_new_tokens, limit.tokens - length)
