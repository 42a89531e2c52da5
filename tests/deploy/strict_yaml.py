"""Kubernetes YAML read strictly: duplicate keys and unknown fields are errors, as they are in no parser.

The table lists the fields of the kinds that deploy/ uses, not all that Kubernetes knows: a field that is
missing here is either misspelt there or to be added here.
"""
import yaml


class StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# A dict: the fields of an object. A list of one: a list of such. A type, or several: a value of it.
TEXT, NUMBER, SWITCH, TEXTS = str, int, bool, [str]
LABELS = {"*": TEXT}
META = {"name": TEXT, "labels": LABELS, "annotations": LABELS, "namespace": TEXT}
PROBE = {"grpc": {"port": NUMBER, "service": TEXT}, "periodSeconds": NUMBER,
         "failureThreshold": NUMBER, "timeoutSeconds": NUMBER, "initialDelaySeconds": NUMBER}
CONTAINER = {
    "name": TEXT, "image": TEXT, "imagePullPolicy": TEXT, "command": TEXTS, "args": TEXTS,
    "env": [{"name": TEXT, "value": TEXT}],
    "ports": [{"name": TEXT, "containerPort": NUMBER, "protocol": TEXT}],
    "startupProbe": PROBE, "readinessProbe": PROBE, "livenessProbe": PROBE,
    "securityContext": {"allowPrivilegeEscalation": SWITCH, "readOnlyRootFilesystem": SWITCH,
                        "capabilities": {"drop": TEXTS}},
    "resources": {"requests": LABELS, "limits": LABELS},
    "volumeMounts": [{"name": TEXT, "mountPath": TEXT, "readOnly": SWITCH}],
}
POD = {
    "metadata": META,
    "spec": {
        "enableServiceLinks": SWITCH, "automountServiceAccountToken": SWITCH,
        "terminationGracePeriodSeconds": NUMBER, "restartPolicy": TEXT,
        "securityContext": {"runAsNonRoot": SWITCH, "runAsUser": NUMBER, "runAsGroup": NUMBER,
                            "fsGroup": NUMBER, "seccompProfile": {"type": TEXT}},
        "initContainers": [CONTAINER], "containers": [CONTAINER],
        "volumes": [{"name": TEXT, "emptyDir": {"sizeLimit": TEXT, "medium": TEXT}}],
    },
}
TYPE = {"apiVersion": TEXT, "kind": TEXT}
KINDS = {
    ("kustomize.config.k8s.io/v1beta1", "Kustomization"): {
        **TYPE, "namespace": TEXT, "resources": TEXTS,
        "images": [{"name": TEXT, "newName": TEXT, "newTag": TEXT}]},
    ("v1", "Namespace"): {**TYPE, "metadata": META},
    ("apps/v1", "Deployment"): {**TYPE, "metadata": META, "spec": {
        "replicas": NUMBER, "selector": {"matchLabels": LABELS}, "template": POD}},
    ("v1", "Service"): {**TYPE, "metadata": META, "spec": {
        "selector": LABELS, "type": TEXT, "clusterIP": TEXT,
        "ports": [{"name": TEXT, "port": NUMBER, "targetPort": (str, int), "appProtocol": TEXT}]}},
    ("batch/v1", "Job"): {**TYPE, "metadata": META, "spec": {
        "backoffLimit": NUMBER, "activeDeadlineSeconds": NUMBER, "template": POD}},
}


def check(value, schema, path=""):
    """Raises ValueError naming the place that does not fit."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{path}: found {value!r}, expected an object")
        for key, item in value.items():
            inner = schema.get(key, schema.get("*"))
            if inner is None:
                raise ValueError(f"{path}.{key}: unknown field, expected one of {sorted(schema)}")
            check(item, inner, f"{path}.{key}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{path}: found {value!r}, expected a list")
        for index, item in enumerate(value):
            check(item, schema[0], f"{path}[{index}]")
    else:
        types = schema if isinstance(schema, tuple) else (schema,)
        if type(value) not in types:  # exactly: True is no number
            raise ValueError(f"{path}: found {value!r}, expected {[t.__name__ for t in types]}")


def load(text, name="text"):
    """The objects of a YAML text, each of a known kind and with known fields only."""
    objects = [one for one in yaml.load_all(text, StrictLoader) if one is not None]
    for one in objects:
        kind = (one.get("apiVersion"), one.get("kind"))
        if kind not in KINDS:
            raise ValueError(f"{name}: unknown kind {kind}, expected one of {sorted(KINDS)}")
        check(one, KINDS[kind], f"{name}: {kind[1]}")
    return objects
