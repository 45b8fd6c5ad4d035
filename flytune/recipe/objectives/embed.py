"""The section of objective embed."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from flytune import limits
from flytune.recipe.data import Data
from flytune.recipe.objectives.base import ObjectiveSection
from flytune.recipe.training import Training
from flytune.row_names import QUERIES, RowKindName

Prompt = Annotated[str, Field(max_length=limits.NAME)]


class Embed(ObjectiveSection):
    """An embedding model: vectors of texts, of which those that belong together are near."""

    row_kind: ClassVar[RowKindName] = QUERIES
    head: ClassVar[str] = "vectors"
    refused_formats: ClassVar[dict[str, str]] = {
        form: f"is not what objective: embed trains: rows of query and positive; {advice}"
        for form, advice in {
            "messages": "write objective: sft",
            "sharegpt": "write objective: sft",
            "instruction": "leave it out, and map the columns: {query: instruction, positive: output}",
            "prompt_completion": "leave it out, and map the columns: {query: prompt, positive: completion}",
            "text": "write objective: sft",
            "tokens": "write objective: sft",
            "preference": "leave it out, and map the columns: {query: prompt, positive: chosen, "
            "negatives: rejected}",
            "unpaired": "write objective: kto",
        }.items()
    }
    refused: ClassVar[dict[str, str]] = {
        "data.packing: true": "objective: {name} pads its rows; remove it",
        "data.min_trained_fraction": "objective: {name} has no loss of tokens; remove it",
        "data.too_long: split": "objective: {name} has one vector for a text, not one for each piece; use "
        "truncate, drop or error",
        "data.completion_only_loss: false": "objective: {name} has one loss for a query, whatever its tokens "
        "are; remove it",
        "data.add_eos_token: false": "objective: {name} takes the vector of a text at its end token; remove "
        "it",
        "data.add_bos_token": "objective: {name} begins texts as the tokenizer does, so that every program "
        "does; remove it",
        "data.system_prompt": "objective: {name} has no chats; write query_prompt there",
        "training.router_aux_loss_coef": "objective: {name} has no balance loss; leave it out",
        "training.neftune_noise_alpha": "objective: {name} runs each text twice, with other noise each time; "
        "remove it",
        "training.torch_compile": "objective: {name} is not tested with it; remove it",
    }

    name: Literal["embed"]
    """`embed` trains an embedding model on queries with documents (docs/objectives.md)."""
    pooling: Literal["last", "mean", "cls"] = "last"
    """Hidden state that is the vector of a text: after its last token, the mean over all its tokens, or after
    its first one; a decoder's first token sees no other, and an encoder is made for mean or cls."""
    temperature: Annotated[float, Field(ge=0.001, le=1)] = 0.05
    """Divisor of the cosine similarities in the loss; 0.05 is a scale of 20 in sentence-transformers."""
    negatives: Annotated[int, Field(ge=0, le=limits.NEGATIVES)] = 0
    """Number of documents of each row that do not belong to its query; the other rows' documents are
    negatives in any case."""
    matryoshka_dims: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=16)] = Field(default=[])
    """Numbers of first dimensions whose vectors are trained too (Kusupati et al. 2022): the loss is the sum
    over them and the complete vector; empty: the complete vector alone."""
    query_prompt: Prompt = ""
    """Text before each query, in the export too."""
    document_prompt: Prompt = ""
    """Text before each document, in the export too."""

    @field_validator("matryoshka_dims")
    @classmethod
    def _each_once(cls, dims: list[int]) -> list[int]:
        twice = sorted({dim for dim in dims if dims.count(dim) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is there twice; name each once")
        return dims

    @property
    def negatives_of_a_row(self) -> int:
        return self.negatives

    @property
    def text_prompts(self) -> list[str]:
        prompts = [self.query_prompt, self.document_prompt]
        return prompts if any(prompts) else []

    def problems(self, data: Data, training: Training) -> list[str]:
        problems = super().problems(data, training)
        if training.global_batch_size == 1 and not self.negatives:
            problems.append(
                f"training.global_batch_size: 1: objective: {self.name} compares a query with the documents "
                "of the other rows of its step; write more"
            )
        return problems
