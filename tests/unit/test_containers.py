"""What kvpatch asks of the files in docs/containers; their schemas are checked by scripts/site."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("yaml")  # of .venv; scripts/pythons is without

import tomllib
import yaml

from kvpatch.cli import COMMANDS, balance, parser
from kvpatch.environ import KVCACHED_IPC_NAME, SWITCH
from kvpatch.supported import KVCACHED, validated
from kvpatch.versions import in_words

FOLDER = Path(__file__).parents[2] / "docs/containers"
UNITS = {"Gi": 1 << 30, "gb": 1 << 30}
TIER = "--kv-offloading-size"


def text(name):
    return (FOLDER / name).read_text()


def size(words):
    """Bytes of ``40Gi`` or ``20gb``; Compose's gb is Kubernetes' Gi."""
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", words).groups()
    return int(number) * UNITS[unit]


def after(arguments, name):
    return arguments[arguments.index(name) + 1]


def tier(arguments):
    return int(after(arguments, TIER)) << 30


COMPOSE = yaml.safe_load(text("compose.yaml"))["services"]
SERVED = {name: one for name, one in COMPOSE.items() if "command" in one}
MANIFEST = list(yaml.safe_load_all(text("two-models.yaml")))
(DEPLOYMENT,) = (one for one in MANIFEST if one["kind"] == "Deployment")
POD = DEPLOYMENT["spec"]["template"]["spec"]
FIRST, SECOND = POD["initContainers"][0], POD["containers"][0]
ENGINES = (FIRST, SECOND)


def environment(container):
    return {one["name"]: one["value"] for one in container["env"]}


def test_the_image_is_of_a_validated_release_and_of_kvcached():
    dockerfile = text("Dockerfile")
    release = re.search("^ARG VLLM=(.*)$", dockerfile, re.M)[1]
    assert release in validated()
    assert re.search("^ARG KVCACHED=(.*)$", dockerfile, re.M)[1] == in_words(KVCACHED)
    assert set(re.findall(r"vllm-kvpatch:([\w.]+)", "".join(map(text, names())))) == {release}


def names():
    return sorted(path.name for path in FOLDER.iterdir())


def test_the_image_is_built_from_what_the_wheel_needs():
    root = FOLDER.parents[1]
    wanted = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line[0] == "!"}
    project = tomllib.loads((root / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    shown = {name for name in included if name.startswith("docs/")}
    assert wanted == {"kvpatch", "LICENSE", "README.md", "pyproject.toml"} | shown
    assert all((root / name).exists() for name in wanted)


@pytest.mark.parametrize("container", ENGINES, ids=lambda one: one["name"])
def test_an_engine_of_the_pod_has_what_it_needs(container):
    assert environment(container)[SWITCH.name] == "1"
    port = int(after(container["args"], "--port"))
    assert container["ports"] == [{"name": container["name"], "containerPort": port}]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/health", "port": container["name"]}] * 3
    # The tier, and as much again for vLLM itself.
    assert size(container["resources"]["limits"]["memory"]) >= 2 * tier(container["args"])
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    # What describe shows of a refused one.
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_both_tiers_fit_into_the_shared_memory_of_the_pod():
    (volume,) = (one["emptyDir"] for one in POD["volumes"] if one["name"] == "shm")
    assert volume["medium"] == "Memory"
    assert size(volume["sizeLimit"]) > sum(tier(one["args"]) for one in ENGINES)


def test_both_engines_have_the_same_gpu():
    (claim,) = POD["resourceClaims"]
    (template,) = (one for one in MANIFEST if one["kind"] == "ResourceClaimTemplate")
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    for container in ENGINES:
        assert container["resources"]["claims"] == [{"name": claim["name"]}]


def test_the_engines_are_told_apart():
    for words in (
        [environment(one)[KVCACHED_IPC_NAME.name] for one in ENGINES],
        [one["args"][0] for one in ENGINES],
        [one["ports"][0]["containerPort"] for one in ENGINES],
        [one["environment"][KVCACHED_IPC_NAME.name] for one in SERVED.values()],
    ):
        assert len(set(words)) == 2


def test_the_second_engine_waits_for_the_first():
    assert FIRST["restartPolicy"] == "Always"  # else the second would wait for its end
    assert SERVED["code"]["depends_on"] == {"chat": {"condition": "service_healthy"}}


def test_one_kvpatch_sees_both_engines():
    assert POD["shareProcessNamespace"] is True
    assert not {"hostIPC", "hostPID"} & POD.keys()


def test_every_service_has_its_engine():
    services = {
        one["metadata"]["name"]: one["spec"]["ports"][0]["targetPort"]
        for one in MANIFEST
        if one["kind"] == "Service"
    }
    assert services == {one["name"]: one["name"] for one in ENGINES}


@pytest.mark.parametrize("name", SERVED)
def test_an_engine_of_compose_has_what_it_needs(name):
    one = SERVED[name]
    assert one["environment"][SWITCH.name] == "1"
    assert size(one["shm_size"]) > tier(one["command"])
    assert size(one["mem_limit"]) >= 2 * tier(one["command"])
    (gpu,) = one["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["device_ids"] == ["0"]


def test_prometheus_scrapes_both_and_grafana_asks_it():
    (job,) = yaml.safe_load(text("prometheus.yml"))["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{name}:8000" for name in SERVED]
    (source,) = yaml.safe_load(text("grafana-datasource.yaml"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    for service in ("prometheus", "grafana"):
        for volume in COMPOSE[service]["volumes"]:
            assert (FOLDER / volume.partition(":")[0]).exists(), volume


def test_a_model_claim_with_a_tier_takes_sleep_mode_back():
    arguments = yaml.safe_load(text("modelclaim.yaml"))["spec"]["engineConfig"]["args"]
    assert {TIER, "--no-enable-sleep-mode"} <= arguments.keys()  # KVP341 else
    assert all(isinstance(value, str) for value in arguments.values())  # as AIBrix's schema has it


def test_the_time_slicing_configuration_offers_a_gpu_for_each_engine():
    inside = yaml.safe_load(yaml.safe_load(text("time-slicing.yaml"))["data"]["config.yaml"])
    (resource,) = inside["sharing"]["timeSlicing"]["resources"]
    assert resource == {"name": "nvidia.com/gpu", "replicas": len(ENGINES)}


DISK = list(yaml.safe_load_all(text("disk-tier.yaml")))
(DISK_POD,) = (one["spec"]["template"]["spec"] for one in DISK if one["kind"] == "Deployment")


@pytest.mark.parametrize("pod", [POD, DISK_POD], ids=["two-models", "disk-tier"])
def test_a_pod_is_of_one_user_that_can_write_its_home(pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert "runAsUser" not in container["securityContext"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        home = environment(container)["HOME"]
        if container["name"] != "balance":  # which keeps nothing
            assert home in [one["mountPath"] for one in container["volumeMounts"]]


def test_the_sidecar_balances_engines_of_the_pod():
    (sidecar,) = (one for one in POD["containers"] if one["name"] == "balance")
    words = sidecar["command"][1:] + sidecar["args"]
    options = balance.read(parser(COMMANDS).parse_args(words))
    assert set(options.terms) == {environment(one)[KVCACHED_IPC_NAME.name] for one in ENGINES}
    assert {"name": "shm", "mountPath": "/dev/shm"} in sidecar["volumeMounts"]


def test_the_disk_of_a_tier_is_a_volume_and_its_names_are_stable():
    (engine,) = DISK_POD["containers"]
    transfer = json.loads(after(engine["args"], "--kv-transfer-config"))
    (tier,) = transfer["kv_connector_extra_config"]["secondary_tiers"]
    mounts = [one["mountPath"] for one in engine["volumeMounts"]]
    assert str(Path(tier["root_dir"]).parent) in mounts
    assert environment(engine)["PYTHONHASHSEED"] == "0"


def test_a_pod_monitor_names_ports_of_the_pod():
    monitor = yaml.safe_load(text("podmonitor.yaml"))["spec"]
    assert monitor["selector"] == DEPLOYMENT["spec"]["selector"]
    ports = [one["ports"][0]["name"] for one in ENGINES]
    assert [one["port"] for one in monitor["podMetricsEndpoints"]] == ports
