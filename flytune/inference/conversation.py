"""A conversation with a tuned model: each answer is shown while the model writes it."""

from collections.abc import Callable
from typing import Any

from flytune.data.messages import Message
from flytune.errors import DataError
from flytune.inference.batch import InferenceModel
from flytune.models import Generation, positions
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
        self._system: dict[str, Any] = {"system": system_prompt} if system_prompt else {}
        torch.manual_seed(generation.seed)

    def clear(self) -> None:
        """Forget all questions and answers."""
        self.messages = []

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """Return the model's answer to a question, whose pieces `show` gets as they are written.

        Raises:
            DataError: the conversation is longer than the model can read, or its template refuses it.
        """
        import torch
        from transformers import TextStreamer

        class Pieces(TextStreamer):
            """Text as it is written, up to the last complete word."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        row = {"messages": asked, **self._system} if self.remembers else {"prompt": question}
        tokens = self.format.tokens(row, "this conversation")
        tokenizer, network = self.format.tokenizer, self.model.model
        settings = self.generation.model_copy(update={"max_new_tokens": self._room(len(tokens))})
        configure(network, tokenizer, settings, self.format.ends)
        prompt = torch.tensor([tokens], device=next(network.parameters()).device)
        pieces = Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.no_grad():
            output = network.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), streamer=pieces
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
