"""Golden requests as the JSON numbers a person would type, and answers compared with what is right."""
import base64
import json
import math
import pathlib
import struct

import harness


def load_requests():
    """The golden requests by name, each with its tensors as lists of Python floats and ints."""
    with open(harness.golden("requests.json")) as file:
        case = json.load(file)
    found = {}
    for request in case["requests"]:
        tensors = {key: pathlib.Path(harness.golden(request[key])).read_bytes()
                   for key in ("hidden", "ids", "weights", "expected_f64")}
        found[request["name"]] = {**request, "H": case["hidden_size"], "bytes": tensors,
                                  "expected": unpack("d", tensors["expected_f64"])}
    return found


def unpack(kind, data):
    return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


def floats_of_bf16(data):
    return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]


def as_numbers(request):
    """ForwardRequest in JSON with every tensor as numbers."""
    return {**_shape(request), "hidden_values": floats_of_bf16(request["bytes"]["hidden"]),
            "expert_id_values": unpack("i", request["bytes"]["ids"]),
            "routing_weight_values": unpack("f", request["bytes"]["weights"])}


def as_bytes(request):
    """The same with every tensor as bytes, in JSON's base64."""
    encoded = {key: base64.b64encode(value).decode() for key, value in request["bytes"].items()}
    return {**_shape(request), "hidden_states": encoded["hidden"], "expert_ids": encoded["ids"],
            "routing_weights": encoded["weights"]}


def _shape(request):
    return {"request_id": 7, "layer": request["layer"], "num_tokens": request["T"],
            "hidden_size": request["H"], "top_k": request["K"]}


def output_of(response):
    """The answer as floats, whichever form it has."""
    if response.get("output_values"):
        return [float(value) for value in response["output_values"]]  # "NaN" is a string in JSON
    data = base64.b64decode(response.get("output", ""))
    return unpack("f", data) if response.get("output_dtype") == "DTYPE_F32" else floats_of_bf16(data)


def relative_l2(found, expected):
    """||found - expected|| / ||expected||; for an expected zero only an exact zero is 0."""
    difference = math.sqrt(sum((a - b) ** 2 for a, b in zip(found, expected)))
    norm = math.sqrt(sum(b * b for b in expected))
    return difference / norm if norm > 0 else (0.0 if difference == 0 else math.inf)
