#!/usr/bin/env python3
"""A checkpoint that expertd has no part in: numpy quantises by the written rules, the public safetensors
package writes the files, expertd serves them, and its answers are what numpy computes in float64.

    safetensors_interop.py EXPERTD [--venv DIR]

Exit status 77 (skipped) if numpy or safetensors is missing, 1 instead if EXPERTD_REQUIRE_TOOLS=1.
"""
import argparse
import base64
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

TIMEOUT_S = 60
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 192, 96, 6, 3, 2
MATRICES = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}


def import_packages(venv):
    """numpy and safetensors, from the running interpreter or from the test environment's."""
    try:
        import numpy
        import safetensors
        return numpy, safetensors
    except ImportError as error:
        python = pathlib.Path(venv or ".") / "bin" / "python"
        if venv and python.exists() and os.environ.get("EXPERTD_INTEROP_AGAIN") != "1":
            os.environ["EXPERTD_INTEROP_AGAIN"] = "1"
            os.execv(python, [str(python), *sys.argv])
        print(f"skipped: {error}; scripts/setup all installs it")
        sys.exit(1 if os.environ.get("EXPERTD_REQUIRE_TOOLS") == "1" else 77)


parser = argparse.ArgumentParser()
parser.add_argument("expertd")
parser.add_argument("--venv")
arguments = parser.parse_args()
np, safetensors = import_packages(arguments.venv)

# ---- number formats, by the written rules (OCP MX 1.0, OCP OFP8) ----------------------------------------
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
                 for e in range(16) for m in range(8)][:127])


def round_to(grid, values):
    """Index of the nearest grid value, ties to the even index, saturating."""
    between = (grid[1:] + grid[:-1]) / 2
    low = np.searchsorted(between, values, side="left")    # a tie goes down
    high = np.searchsorted(between, values, side="right")  # a tie goes up
    return np.where(low % 2 == 0, low, high)


def encode_e2m1(values):
    return round_to(E2M1, np.abs(values)) | np.where(np.signbit(values), 8, 0)


def quantise_mxfp4(weight):
    """Scale 2^(floor(log2(amax)) - 2) per 32 of K; 2 is the exponent of E2M1's largest value."""
    blocks = weight.reshape(len(weight), -1, 32)
    amax = np.abs(blocks).max(axis=2)
    exponent = np.floor(np.log2(np.where(amax > 0, amax, 1))) - 2
    codes = encode_e2m1(blocks / np.exp2(exponent)[..., None])
    scales = np.where(amax > 0, exponent + 127, 0).astype(np.uint8)
    return codes.reshape(weight.shape), scales, None


def quantise_nvfp4(weight):
    """Second level amax / (6 * 448) per matrix, block scale E4M3(block amax / 6 / second level) per 16."""
    second_level = np.float32(np.abs(weight).max() / (6 * 448))
    blocks = weight.reshape(len(weight), -1, 16)
    scales = round_to(E4M3, np.abs(blocks).max(axis=2) / 6 / second_level).astype(np.uint8)
    step = E4M3[scales] * float(second_level)
    codes = encode_e2m1(blocks / np.where(step > 0, step, 1)[..., None])
    return codes.reshape(weight.shape), scales, second_level


def dequantise(codes, scales, second_level):
    values = E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    if second_level is None:
        return values * np.repeat(np.exp2(scales.astype(float) - 127), 32, axis=1)
    return values * np.repeat(E4M3[scales], 16, axis=1) * float(second_level)


def to_bf16(values):
    bits = np.asarray(values, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(bits):
    return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)


# ---- the checkpoint --------------------------------------------------------------------------------------
FAMILIES = {
    "deepseek-v4 mxfp4": {
        "prefix": "layers.{}.ffn.experts.{}.", "names": {"gate": "w1", "up": "w3", "down": "w2"},
        "quantise": quantise_mxfp4, "limit": 4.0,
        "config": {"model_type": "deepseek_v4", "n_routed_experts": EXPERTS, "swiglu_limit": 4.0,
                   "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}},
    "deepseek-v4 nvfp4": {
        "prefix": "layers.{}.ffn.experts.{}.", "names": {"gate": "w1", "up": "w3", "down": "w2"},
        "quantise": quantise_nvfp4, "limit": 4.0,
        "config": {"model_type": "deepseek_v4", "n_routed_experts": EXPERTS, "swiglu_limit": 4.0,
                   "expert_dtype": "fp4",
                   "quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}}},
    "qwen3 nvfp4": {
        "prefix": "model.layers.{}.mlp.experts.{}.",
        "names": {m: m + "_proj" for m in MATRICES}, "quantise": quantise_nvfp4, "limit": None,
        "config": {"model_type": "qwen3_moe", "num_experts": EXPERTS,
                   "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}},
}


def make_weights(rng):
    """Rows and matrices of different size, so that block scales and second levels differ; one zero block."""
    def matrix(shape):
        rows = np.exp2(rng.uniform(-2, 1, (shape[0], 1)))
        weight = rng.standard_normal(shape) / np.sqrt(shape[1]) * rows * rng.uniform(0.5, 3)
        weight[3, 32:64] = 0
        return weight.astype(np.float32).astype(np.float64)
    return [[{name: matrix(shape) for name, shape in MATRICES.items()} for _ in range(EXPERTS)]
            for _ in range(LAYERS)]


def tensors_of(family, stem, codes, scales, second_level):
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)  # low nibble = even K
    if second_level is None:
        return {stem + ".weight": ("int8", packed), stem + ".scale": ("float8_e8m0fnu", scales)}
    return {stem + ".weight": ("uint8", packed), stem + ".weight_scale": ("float8_e4m3fn", scales),
            stem + ".weight_scale_2": ("float32", np.array(second_level, np.float32)),
            stem + ".input_scale": ("float32", np.array(0.01, np.float32))}


def write_shard(path, tensors):
    specs = {name: safetensors.TensorSpec(dtype=dtype, shape=list(array.shape),
                                          data_ptr=array.ctypes.data, data_len=array.nbytes)
             for name, (dtype, array) in tensors.items()}
    safetensors.serialize_file(specs, path, {"format": "pt"})


def write_checkpoint(directory, family, weights):
    """Writes the files and returns the dequantised matrices."""
    directory.mkdir()
    values, index = [], {}
    for layer, experts in enumerate(weights):
        tensors, values_of_layer = {}, []
        for number, expert in enumerate(experts):
            values_of_layer.append({})
            for matrix, weight in expert.items():
                quantised = family["quantise"](weight)
                stem = family["prefix"].format(layer, number) + family["names"][matrix]
                tensors.update(tensors_of(family, stem, *quantised))
                values_of_layer[-1][matrix] = dequantise(*quantised)
        shard = f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors"
        tensors = {name: (dtype, np.ascontiguousarray(array)) for name, (dtype, array) in tensors.items()}
        write_shard(directory / shard, tensors)
        index.update({name: shard for name in tensors})
        values.append(values_of_layer)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}))
    config = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "hidden_act": "silu",
              "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS, **family["config"]}
    (directory / "config.json").write_text(json.dumps(config))
    return values


# ---- what a layer computes -------------------------------------------------------------------------------
def forward(experts, hidden, ids, weights, limit):
    out = np.zeros_like(hidden)
    for t, row in enumerate(hidden):
        for expert, weight in zip(ids[t], weights[t]):
            if expert < 0:
                continue
            gate, up = experts[expert]["gate"] @ row, experts[expert]["up"] @ row
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            out[t] += float(weight) * (experts[expert]["down"] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def make_request(rng, layer, tokens):
    hidden = to_bf16(rng.standard_normal((tokens, HIDDEN)) * 1.5)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], "<i4")
    weights = rng.uniform(0.1, 1, (tokens, TOP_K)).astype("<f4")
    ids[1] = -1
    ids[2, 0] = ids[2, 1]
    ids[3, -1] = -1
    return layer, hidden, ids, weights


def as_bytes(layer, hidden, ids, weights, output):
    b64 = lambda array: base64.b64encode(array.tobytes()).decode()
    return {"layer": layer, "numTokens": len(ids), "hiddenSize": HIDDEN, "topK": TOP_K,
            "hiddenDtype": "DTYPE_BF16", "hiddenStates": b64(hidden), "expertIds": b64(ids),
            "routingWeights": b64(weights), "outputDtype": output}


def as_numbers(layer, hidden, ids, weights):
    return {"layer": layer, "numTokens": len(ids), "hiddenSize": HIDDEN, "topK": TOP_K,
            "hiddenValues": from_bf16(hidden).ravel().tolist(),
            "expertIdValues": ids.ravel().tolist(),
            "routingWeightValues": weights.astype(float).ravel().tolist()}


def output_of(response):
    if response.get("outputValues"):  # an empty list is printed too
        values = np.array(response["outputValues"], np.float64)
    else:
        raw = base64.b64decode(response["output"])
        values = (np.frombuffer(raw, "<f4").astype(np.float64) if response["outputDtype"] == "DTYPE_F32"
                  else from_bf16(np.frombuffer(raw, "<u2")))
    return values.reshape(-1, HIDDEN)


# ---- the daemon ------------------------------------------------------------------------------------------
class Daemon:
    def __init__(self, checkpoint, work):
        self.work, self.log_path = work, work / "expertd.log"
        address_file = work / "address"
        self.log = open(self.log_path, "w")
        self.process = subprocess.Popen(
            [arguments.expertd, "serve", str(checkpoint), "--listen", "127.0.0.1:0", "--backend", "cpu",
             "--ranks", "2", "--threads", "2", "--address-file", str(address_file)],
            stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + TIMEOUT_S
        while not address_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.fail("did not start")
            time.sleep(0.02)
        self.address = address_file.read_text().strip()
        self.call("--health", "--wait", f"{TIMEOUT_S}s")

    def fail(self, message):
        print(self.log_path.read_text())
        sys.exit(f"expertd serve {message}")

    def call(self, *options):
        done = subprocess.run([arguments.expertd, "call", self.address, *options],
                              capture_output=True, text=True, timeout=2 * TIMEOUT_S)
        if done.returncode != 0:
            self.fail(f"answered call {' '.join(options)} with {done.returncode}: {done.stderr}")
        return done.stdout

    def forward(self, request):
        path = self.work / "request.json"
        path.write_text(json.dumps(request))
        return output_of(json.loads(self.call("--input", str(path), "--json", "--timeout", "30s")))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=TIMEOUT_S)
        if status != 0:
            self.fail(f"ended with {status} after SIGTERM, expected 0")

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def check(label, actual, expected):
    assert actual.shape == expected.shape, (label, actual.shape, expected.shape)
    assert (actual[1] == 0).all(), f"{label}: a masked row is not exactly 0"
    error = relative_error(actual, expected)
    print(f"  {label}: rel-L2 {error:.2e}")
    assert error < 0.005, f"{label}: rel-L2 {error:.3e}, expected < 5e-3"


def run_family(name, family, work):
    print(name)
    rng = np.random.default_rng(20 + len(name))
    values = write_checkpoint(work / "checkpoint", family, make_weights(rng))
    daemon = Daemon(work / "checkpoint", work)
    try:
        for layer in range(LAYERS):
            request = make_request(rng, layer, tokens=9)
            _, hidden, ids, weights = request
            expected = forward(values[layer], from_bf16(hidden), ids, weights, family["limit"])
            swapped = [{**e, "gate": e["up"], "up": e["gate"]} for e in values[layer]]
            wrong = forward(swapped, from_bf16(hidden), ids, weights, family["limit"])
            assert relative_error(wrong, expected) > 0.05, "this input would not show a mistake"
            check(f"layer {layer}, bytes, bf16 out", daemon.forward(as_bytes(*request, "DTYPE_BF16")), expected)
            check(f"layer {layer}, bytes, f32 out", daemon.forward(as_bytes(*request, "DTYPE_F32")), expected)
            check(f"layer {layer}, numbers", daemon.forward(as_numbers(*request)), expected)
        daemon.stop()
    finally:
        daemon.kill()


def main():
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory(prefix="expertd-interop-") as work:
            run_family(name, family, pathlib.Path(work))
    print("ok")


main()
