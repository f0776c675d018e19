"""Whether two servers are fit to stand in for each other: what differs, what it does, what to do.

Both serve one model, so most facts should be equal. Each difference gives one warning, with every
server's value; a server that has not told a fact takes no part in its comparison. None is fatal:
a mismatch may be meant, and the router works without.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server tells of itself. None: it did not tell.

    Lengths are in tokens; the chat template is a digest, or whatever else is equal for equal ones.
    """

    name: str
    served_model_name: str | None = None
    context_length: int | None = None
    version: str | None = None
    dtype: str | None = None
    max_running_requests: int | None = None
    chat_template: str | None = None


# What a difference in a fact does, and the way out.
_ADVICE = {
    "served_model_name": "requests that name a model fail on one of them; "
    "start them with the same --served-model-name",
    "context_length": "requests too long for the shorter go to the longer, whatever the load; "
    "set the same --context-length",
    "version": "outputs and load figures may differ; run the same SGLang version",
    "dtype": "answers may differ by server; set the same --dtype",
    "max_running_requests": "one queues requests while the other still runs them; set the same "
    "--max-running-requests (SGLang takes 48 under speculation if it is not set)",
    "chat_template": "the same messages become different prompts; set the same --chat-template",
}


def compare(facts: Sequence[ServerFacts]) -> list[str]:
    """Return one warning for each fact in which the servers differ."""
    warnings = []
    for fact, advice in _ADVICE.items():
        told = {server.name: getattr(server, fact) for server in facts}
        told = {name: value for name, value in told.items() if value is not None}
        if len(set(told.values())) > 1:
            values = ", ".join(f"{name} has {value}" for name, value in told.items())
            warnings.append(f"{fact} differs: {values}: {advice}")
    return warnings
