"""What every engine asks of a request before it takes it on."""

from collections.abc import Collection

from cauce.types import GenerationRequest


def check_request(request: GenerationRequest, *, running: Collection[tuple[int, int]], vocabulary: int) -> None:
    """Raises ValueError for a request that no engine can answer.

    Args:
        running: (task, index) of the samples in flight.
        vocabulary: token ids are below it.
    """
    sampling, where = request.sampling, f"request for task {request.task}"
    twice = [i for i in request.indices if (request.task, i) in running or request.indices.count(i) > 1]
    if twice or not request.indices:
        raise ValueError(f"{where}: indices {request.indices}: each once, and none in flight already ({twice})")
    if sampling.max_tokens < 1 or not 0.0 <= sampling.temperature < float("inf"):
        raise ValueError(f"{where}: max_tokens {sampling.max_tokens} (at least 1), temperature {sampling.temperature}")
    ids = request.prompt_ids
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"{where}: prompt_ids must be 1 or more numbers from 0 to {vocabulary - 1}")
