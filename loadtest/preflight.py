"""What is asked of a server before a run: does it answer, take the key, have the model."""

import httpx

from loadtest.provenance import API_KEY_VARIABLE

TIMEOUT_S = 10.0


class InputError(Exception):
    """What the user asked for cannot be; the message says why."""


class UnreachableError(InputError):
    """Nobody answers."""


def check_server(url: str, model: str, api_key: str | None) -> None:
    """Raise InputError unless the server answers, takes the key and has the model, if it lists."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(
            url.rstrip("/") + "/v1/models", headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(f"{url} does not answer: {error}") from None
    if answer.status_code in (401, 403):
        given = "the API key is refused" if api_key else "an API key is needed"
        raise InputError(
            f"{url}: {given} (HTTP {answer.status_code}): {API_KEY_VARIABLE}, --api-key-file or "
            "--api-key"
        )
    if answer.status_code != 200:
        return  # it may well serve without listing
    try:
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return
    if model not in names:
        raise InputError(f"{url} has no model {model!r}, only: {', '.join(names)}")
