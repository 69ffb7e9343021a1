"""Recorded decode steps: MLU graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qiao.contract import hookimpl

from qiao_cambricon import _sdk, rules


@hookimpl
def capture(function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
    """Run once on a stream aside, so that nothing is loaded while recording, then record.

    Raises ``NotImplementedError`` where the environment or an operator of the region keeps it from being recorded.
    """
    if reason := rules.why_not_captured():
        raise NotImplementedError(reason)
    mlu = _sdk.runtime()
    if not hasattr(mlu, "MLUGraph"):
        raise NotImplementedError("this torch_mlu has no graphs")
    with mlu.device(device):
        aside = mlu.Stream()
        aside.wait_stream(mlu.current_stream())
        with mlu.stream(aside):
            function(*example)
        mlu.current_stream().wait_stream(aside)
        graph = mlu.MLUGraph()
        result = _recorded(mlu, graph, function, example)

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _recorded(mlu: Any, graph: Any, function: Callable[..., Any], example: tuple[Any, ...]) -> Any:
    try:
        with mlu.graph(graph):
            return function(*example)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if "captur" not in str(error).lower():
            raise
        raise NotImplementedError(f"torch_mlu refuses to record it: {error}") from error
