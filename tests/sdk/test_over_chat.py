"""The SDK's tests of responses once more, over engines that speak chat completions only: clients see no difference."""

import unittest

import test_agents
import test_responses
import test_strict
from cluster import ENGINE_ARGUMENTS, get

CHAT_ONLY = (*ENGINE_ARGUMENTS, "--no-responses")


class StrictTypes(test_strict.StrictTypes):
    arguments = CHAT_ONLY

    @classmethod
    def tearDownClass(cls):
        for engine in cls.cluster.engines:
            status, _ = get(f"{engine.url}/v1/responses", b'{"model":"sim","input":"x"}')
            assert status == 404, status


class Agents(test_agents.Agents):
    arguments = CHAT_ONLY


class Create(test_responses.Create):
    arguments = CHAT_ONLY


def sharing_a_fleet():
    """The other tests that leave the fleet as it is."""
    bases = [
        base
        for base in vars(test_responses).values()
        if isinstance(base, type)
        and issubclass(base, test_responses.WithReplicas)
        and base not in (test_responses.WithReplicas, test_responses.Create)
        and "setUpClass" not in vars(base)
    ]
    return {base.__name__: type(base.__name__, (base,), {"arguments": CHAT_ONLY}) for base in bases}


globals().update(sharing_a_fleet())


if __name__ == "__main__":
    unittest.main()
