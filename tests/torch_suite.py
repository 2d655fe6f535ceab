"""PyTorch's own tests of a backend of ``torch.distributed`` (its class ``DistributedTest``), on CPUs, with 4 ranks.

    python tests/torch_suite.py                         # all of them, with gloo and with antiphon, and where they differ
    python tests/torch_suite.py antiphon test_reduce_sum test_isend

Torch starts each rank afresh for each test, which takes seconds as every process imports torch. Here the ranks are forks of a
server that has imported it, and a test takes what it takes.
"""

import multiprocessing
import os
import sys
import unittest
from typing import Any

#: The backend as which the tests see that under test when they are defined: what they skip, they skip for all but gloo.
os.environ.update(BACKEND="gloo", WORLD_SIZE="4", INIT_METHOD="file://", MASTER_ADDR="127.0.0.1")

import torch.testing._internal.distributed.distributed_test as definitions

#: Tests that choose what to do on CPUs by the name of the backend, and know only gloo's.
BY_NAME = "test_accumulate_gradients"
#: What tests say to ranks through the environment.
PLACE = ("BACKEND", "TEMP_DIR", "INIT_METHOD", "WORLD_SIZE")


class TorchSuite(definitions.TestDistBackend, definitions.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests, of the backend that the environment variable ``TORCH_SUITE_BACKEND`` names."""

    def setUp(self) -> None:
        super().setUp()
        os.environ["BACKEND"] = os.environ["TORCH_SUITE_BACKEND"]
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "antiphon.torch"])
        os.environ["PYTHONPATH"] = os.path.dirname(__file__)  # where the server finds this module
        place = {name: os.environ[name] for name in PLACE}

        def process(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return context.Process(target=_rank_main, name=name, args=(place, *args))

        self._start_processes(process)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        if test_name.startswith(BY_NAME):
            definitions.BACKEND = "gloo"
        super().run_test(test_name, parent_pipe)


def _rank_main(place: dict[str, str], rank: int, test: str, *arguments: Any) -> None:
    os.environ.update(place)
    definitions.BACKEND, definitions.INIT_METHOD = place["BACKEND"], place["INIT_METHOD"]
    if place["BACKEND"] == "antiphon":
        import antiphon.torch  # noqa: F401  # registers the backend
    TorchSuite._run(rank, test, *arguments)


def run(backend: str, names: list[str]) -> unittest.TestResult:
    """Runs tests of this backend."""
    os.environ["TORCH_SUITE_BACKEND"] = backend
    suite = unittest.TestSuite(TorchSuite(name) for name in names)
    return unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(suite)


def passed(result: unittest.TestResult, names: list[str]) -> set[str]:
    """The tests that went well, which those that were skipped did not."""
    others = [*result.failures, *result.errors, *result.skipped]
    return set(names) - {test._testMethodName for test, _ in others}  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    every = unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    backends, names = arguments[:1] or ["gloo", "antiphon"], arguments[1:] or list(every)
    found = {backend: passed(run(backend, names), names) for backend in backends}
    for backend, good in found.items():
        print(f"{backend}: {len(good)} of {len(names)} pass")
    if len(found) == 2:
        print("gloo alone:", *sorted(found["gloo"] - found["antiphon"]), sep="\n  ")
        print("antiphon alone:", *sorted(found["antiphon"] - found["gloo"]), sep="\n  ")


if __name__ == "__main__":
    # Under its own name, by which the ranks find it.
    import torch_suite

    torch_suite.main(sys.argv[1:])
