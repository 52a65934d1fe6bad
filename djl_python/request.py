"""A request of a rolling batch: its input, its generated tokens and the text to send."""

from __future__ import annotations

from typing import Any

from djl_python.output_formatter import adapt_legacy_output_formatter, get_output_formatter, takes_request_output
from djl_python.request_io import TextGenerationOutput, TextInput, Token
from djl_python.utils import is_streaming


class Request:
    """A request of a rolling batch."""

    def __init__(self, request_input: TextInput) -> None:
        """Prepare the request. If `server_parameters` is empty, it becomes a copy of the client's parameters."""
        self.id = request_input.request_id
        self.request_input = request_input
        self.input_text = request_input.input_text
        self.adapter = request_input.adapters
        self.last_token = False
        if not request_input.server_parameters:
            request_input.server_parameters = dict(request_input.parameters)
        self.parameters: dict[str, Any] = request_input.server_parameters
        name = self.parameters.pop("output_formatter", request_input.output_formatter)
        stream = bool(self.parameters.pop("stream", False))
        # `details` affects only the form of the answer, so it is not passed to the engine.
        self.parameters.pop("details", None)
        self.output_formatter, self.content_type = get_output_formatter(name, stream, request_input.tgi_compat)
        request_input.output_formatter = self.output_formatter
        self.legacy_formatter = not takes_request_output(self.output_formatter)
        self.request_output = TextGenerationOutput(request_id=self.id, input=request_input)
        self._next_text = ""
        self._error_message: str | None = None
        self._error_code: int | None = None

    def __repr__(self) -> str:
        return f"<Request id: {self.id} Input {self.input_text} Finished {self.last_token}>"

    def set_next_token(
        self, next_token: Token | str, last_token: bool = False, finish_reason: str | None = None
    ) -> None:
        """Add a generated token. A string becomes a token with the id -1."""
        token = Token(-1, next_token) if isinstance(next_token, str) else next_token
        token.request_id = self.id
        self.request_output.set_next_token(token, is_last_token=last_token, finish_reason=finish_reason)
        self.last_token = last_token
        if last_token:
            self.request_output.finished = True

    def get_next_token(self) -> str:
        """Return the text to send now. The text stays the same until `reset_next_token` is called.

        Raises:
            RuntimeError: A custom formatter for a streamed request does not read the next token.
        """
        if not self._next_text:
            self._next_text = self._format()
        return self._next_text

    def reset_next_token(self) -> None:
        self._next_text = ""

    def is_last_token(self) -> bool:
        return self.last_token

    def get_content_type(self) -> str | None:
        """Return the Content-Type header, or None for a custom formatter."""
        return self.content_type

    def get_error_message(self) -> str | None:
        return self._error_message

    def set_error_message(self, error_message: str) -> None:
        self._error_message = error_message

    def get_error_code(self) -> int | None:
        return self._error_code

    def set_error_code(self, code: int) -> None:
        self._error_code = code

    def get_client_request_id(self) -> str | None:
        return self.request_input.client_request_id

    def _format(self) -> str:
        if self.legacy_formatter:
            return adapt_legacy_output_formatter(self.request_output)
        if self.content_type == "application/json":  # Other built-in formatters return one record per call.
            return self.output_formatter(self.request_output)
        is_custom = self.content_type is None
        if is_custom and not is_streaming(self.request_input.parameters):
            return self.output_formatter(self.request_output)
        return self._format_unread_tokens()

    def _format_unread_tokens(self) -> str:
        sequence, text = self.request_output.best_sequence, ""
        while sequence.has_next_token():
            unread = sequence.unread
            text += self.output_formatter(self.request_output)
            if sequence.unread == unread:
                raise RuntimeError("The output formatter of a streamed request must call get_next_token()")
        return text
