"""The example for Kubernetes is valid, and its parts fit each other."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from opgraft.cli import serve

EXAMPLE = Path(__file__).parents[2] / "examples/leaderworkerset.yaml"
SCHEMA = json.loads(Path(__file__).with_name("leaderworkerset.json").read_text(encoding="utf-8"))
NAME = "leaderworkerset.sigs.k8s.io/name"
"""The label of each pod of a set."""


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """The objects of the example, by kind."""
    found = yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def pods(documents: dict[str, Any]) -> dict[str, Any]:
    """The templates of pods, by role."""
    template = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {role: template[f"{role}Template"] for role in ("leader", "worker")}


def options_of(pod: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the options of the server, as the command parses them."""
    (container,) = pod["spec"]["containers"]
    script = container["args"][0].replace("$LWS_GROUP_SIZE", str(size))
    # A shell goes on in the next line here.
    words = shlex.split(script.replace("\\\n", ""))
    begin = words.index("serve") + 1
    assert words[begin - 2] == "opgraft"
    context = serve.command.make_context("serve", words[begin:])
    return {name: value for name, value in context.params.items() if value is not None}


def test_the_set_fits_the_schema(documents: dict[str, Any]) -> None:
    """Each field of the set is one of LeaderWorkerSet or of pods, with a value of its type."""
    Draft202012Validator.check_schema(SCHEMA)
    check = Draft202012Validator(SCHEMA)
    example = documents["LeaderWorkerSet"]
    assert [error.message for error in check.iter_errors(example)] == []
    wrong = copy.deepcopy(example)
    wrong["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    wrong["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["arg"] = []
    del wrong["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert len(list(check.iter_errors(wrong))) == 3


def test_ranks_are_the_devices(documents: dict[str, Any], pods: dict[str, Any]) -> None:
    """A group has as many devices as ranks, a stage for each host."""
    size = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    found = options_of(pods["leader"], size)
    tensor, stages = int(found["parallel__tensor"]), int(found["parallel__pipeline"])
    assert (stages, found["parallel__executor"]) == (size, "ray")
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == tensor


def test_a_pod_ends_after_the_drain(pods: dict[str, Any]) -> None:
    """The workers stay for the whole drain of the server, and Kubernetes kills nobody before."""
    drain = float(options_of(pods["leader"], 2)["server__drain_seconds"])
    (worker,) = pods["worker"]["spec"]["containers"]
    stays = int(worker["lifecycle"]["preStop"]["exec"]["command"][1])
    assert drain < stays < pods["worker"]["spec"]["terminationGracePeriodSeconds"]
    assert drain < pods["leader"]["spec"]["terminationGracePeriodSeconds"]


def test_clients_reach_the_server_alone(documents: dict[str, Any], pods: dict[str, Any]) -> None:
    """The service selects leaders and their port, which alone is open for pods outside of the set."""
    (container,) = pods["leader"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == int(options_of(pods["leader"], 2)["server__port"])
    of_set = {NAME: documents["LeaderWorkerSet"]["metadata"]["name"]}
    service = documents["Service"]["spec"]
    assert service["selector"] == {**of_set, **pods["leader"]["metadata"]["labels"]}
    assert [each["targetPort"] for each in service["ports"]] == [port["name"]]
    policy = documents["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == of_set
    inside, outside = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": of_set}}]}
    assert outside == {"ports": [{"port": port["name"]}]}


def test_every_mount_is_a_volume(pods: dict[str, Any]) -> None:
    """Each mount names a volume of its pod, and each file of the command lies in a mount."""
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert sorted(mounts) == sorted(volume["name"] for volume in pod["spec"]["volumes"])
    options = options_of(pods["leader"], 2)
    assert Path(options["model"]).parent == Path("/models")
    assert Path(options["server__api_key_file"]).parent == Path("/keys")
