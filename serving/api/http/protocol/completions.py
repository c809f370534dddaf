"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from serving.api.http.protocol.common import Choice, ChoicesResponse, GenerationRequest, Items, TokenIds, refusal

PromptField = (
    str
    | Annotated[Items[str], Field(min_length=1)]
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[Items[TokenIds], Field(min_length=1)]
)


class CompletionRequest(GenerationRequest):
    """Continue one prompt or several."""

    prompt: PromptField
    echo: bool = Field(False, description="Return the prompt before the output, including its log-probabilities.")
    logprobs: int | None = Field(
        None, ge=0, le=1024, description="Report log-probabilities, and this many alternatives."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=1024, description="Return log-probabilities of the prompt's tokens, and this many alternatives."
    )
    prompt_logprob_token_ids: TokenIds | None = Field(
        None, description="Return prompt_logprobs: of the prompt's own tokens, and of these ids at each position."
    )
    best_of: int | None = Field(None, description="Not supported unless it equals n.")
    suffix: str | None = Field(None, description="Not supported.")

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, as a list."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else [*self.prompt]  # type: ignore[list-item]

    @property
    def num_continued(self) -> int:
        return 0 if self.scores_prompt or (self.echo and self.logprobs is not None) else len(self.prompts)

    @model_validator(mode="after")
    def _refuse(self) -> CompletionRequest:
        if self.suffix:
            raise refusal("suffix", "suffix is not supported: the model continues texts and cannot fill gaps")
        if self.best_of is not None and self.best_of != self.n:
            raise refusal("best_of", "best_of is not supported: use n, and choose among the answers yourself")
        if self.max_tokens == 0 and not (self.echo or self.scores_prompt):
            raise refusal(
                "max_tokens",
                "max_tokens must be at least 1 (0 needs echo, prompt_logprobs or prompt_logprob_token_ids)",
            )
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether the response has `prompt_logprobs`."""
        return self.prompt_logprobs is not None or bool(self.prompt_logprob_token_ids)


PromptLogprob = dict[str, float | int | None]
"""`logprob` and `rank` (null: not among the requested alternatives) of one token at one position of a prompt. A
dictionary, because there may be a million of them."""


class CompletionLogprobs(BaseModel):
    """Log-probabilities of each token of a choice; a prompt's first token has none."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class CompletionResponse(ChoicesResponse):
    """A response, or one event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
