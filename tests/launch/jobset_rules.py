"""What a cluster takes as a JobSet: JobSet's schema and its webhook's rules, by hand, and Kubernetes' schema of a Job.

The rules are those of JobSet 0.10 (kubernetes-sigs/jobset: the CRD, pkg/webhooks) for the fields that a manifest of
fiddlex has. The package kubernetes-validate carries Kubernetes' schemas. No server was tried.
"""

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate

# The type of each field, `!` where it is required; a tuple: one of these values; a list: of such elements.
ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
SCHEMA = {
    "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
    "kind!": ("JobSet",),
    "metadata!": {"name!": str, "annotations": dict, "labels": dict},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate"),
            "rules": [
                {
                    "name!": str,
                    "action!": ACTIONS,
                    "onJobFailureReasons": [str],
                    "onJobFailureMessagePatterns": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": dict}],
    },
}
# Of the webhook, and of the API server for labels.
_RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}


def refusals(manifest: dict[str, Any]) -> list[str]:
    """Why a cluster would not take the manifest, or would drop a part of it; empty when it takes all."""
    found = list(_schema(manifest, SCHEMA, "$"))
    return found or [*_webhook(manifest), *_jobs(manifest)]


def _schema(value: Any, schema: Any, where: str) -> Iterator[str]:
    """Strictly: a server drops a field that it does not know."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{where}: no object"
            return
        fields = {name.rstrip("!"): rule for name, rule in schema.items()}
        yield from (f"{where} lacks {name[:-1]}" for name in schema if name[-1] == "!" and name[:-1] not in value)
        for name, inner in value.items():
            if name in fields:
                yield from _schema(inner, fields[name], f"{where}.{name}")
            else:
                yield f"{where} has no field {name}"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{where}: no array"
            return
        for index, inner in enumerate(value):
            yield from _schema(inner, schema[0], f"{where}[{index}]")
    elif isinstance(schema, tuple):
        if value not in schema:
            yield f"{where}: {value!r} is none of {schema}"
    elif type(value) is not schema:
        yield f"{where}: {value!r} is no {schema.__name__}"


def _webhook(manifest: dict[str, Any]) -> Iterator[str]:
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    jobs = [each["name"] for each in spec["replicatedJobs"]]
    rules = spec["failurePolicy"]["rules"]
    for rule in rules:
        if not _RULE.fullmatch(rule["name"]) or len(rule["name"]) > 128:
            yield f"failurePolicy: the rule's name {rule['name']!r} may have letters, digits, _ , and : only"
        if sum(rule["name"] == each["name"] for each in rules) > 1:
            yield f"failurePolicy: two rules have the name {rule['name']}"
        yield from (f"{reason} is no reason" for reason in {*rule.get("onJobFailureReasons", ())} - _REASONS)
        yield from (f"there is no job {job}" for job in {*rule.get("targetReplicatedJobs", ())} - {*jobs})
    subdomain = spec["network"]["subdomain"]
    longest = [subdomain]
    for replicated in spec["replicatedJobs"]:
        job = replicated["template"]["spec"]
        longest.append(f"{name}-{replicated['name']}-{replicated['replicas'] - 1}-{job['completions'] - 1}-abcde")
        if job["parallelism"] * replicated["replicas"] >= 2**31:
            yield f"{replicated['name']} has too many pods"
    yield from (f"{each} is no label of DNS" for each in longest if not _DNS_LABEL.fullmatch(each) or len(each) > 63)
    for value in manifest["metadata"].get("labels", {}).values():
        if not _LABEL_VALUE.fullmatch(value) or len(value) > 63:
            yield f"{value} is no value of a label"


def _jobs(manifest: dict[str, Any]) -> Iterator[str]:
    for replicated in manifest["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
        for version in ("1.31", kubernetes_validate.latest_version()):  # 1.31: the first with podFailurePolicy for good
            try:
                kubernetes_validate.validate(job, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"Kubernetes {version}: {error}"
        for rule in job["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {}).get("values", [])
            if codes != sorted(set(codes)):
                yield f"exit codes {codes} must be in order, each once"
