"""The wire as a person sees it: the real daemon through the real grpcurl, with JSON numbers.

Answers are compared with the golden vectors, which were computed without any code of the daemon.
"""
import base64
import concurrent.futures
import copy

import harness
from golden_requests import as_bytes, as_numbers, load_requests, output_of, relative_l2
from harness import GrpcurlError, documents, grpcurl

EXPERT_SERVICE = "expertd.v1.ExpertService"
MODEL_SERVICE = "expertd.v1.ModelService"
HEALTH_SERVICE = "grpc.health.v1.Health"
FORWARD = EXPERT_SERVICE + "/Forward"
STREAM = EXPERT_SERVICE + "/ForwardStream"
SELF_TEST = EXPERT_SERVICE + "/SelfTest"
MAX_TOKENS = 34
TOKENS_PER_RANK = MAX_TOKENS // harness.RANKS  # the largest golden request fits into one rank


class WireTest(harness.TestCase):
    """One daemon for all tests of a class."""

    flags = ("--ranks", harness.RANKS, "--max-tokens-per-rank", TOKENS_PER_RANK, "--model-name", "golden")

    @classmethod
    def setUpClass(cls):
        cls.server = harness.Daemon(*cls.flags)
        cls.requests = load_requests()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def call(self, method, data=None):
        """The one answer, every field present."""
        answers = documents(grpcurl("-emit-defaults", self.server.address, method, data=data or {}))
        self.assertEqual(1, len(answers))
        return answers[0]

    def refusal(self, method, data):
        with self.assertRaises(GrpcurlError) as caught:
            self.call(method, data)
        return caught.exception

    def forward(self, request):
        return output_of(self.call(FORWARD, request))


class ReflectionTest(WireTest):
    def test_list_names_the_services(self):
        names = grpcurl(self.server.address, "list").split()
        for name in (EXPERT_SERVICE, MODEL_SERVICE, HEALTH_SERVICE):
            self.assertIn(name, names)

    def test_list_names_the_methods(self):
        methods = grpcurl(self.server.address, "list", EXPERT_SERVICE).split()
        self.assertEqual([EXPERT_SERVICE + "." + name
                          for name in ("Forward", "ForwardStream", "SelfTest")], methods)

    def test_describe_shows_services_and_messages(self):
        for symbol, part in ((EXPERT_SERVICE, "rpc Forward ("), (MODEL_SERVICE, "rpc ListLayers ("),
                             (HEALTH_SERVICE, "rpc Watch ("),
                             ("expertd.v1.ForwardRequest", "repeated float hidden_values = 9;"),
                             ("expertd.v1.ForwardResponse", "timing = 7;"),
                             ("expertd.v1.ServerInfo", "max_message_bytes")):
            self.assertIn(part, grpcurl(self.server.address, "describe", symbol), symbol)


class HealthTest(WireTest):
    def test_the_process_and_the_service_are_serving(self):
        for service in ("", EXPERT_SERVICE):
            answer = self.call(HEALTH_SERVICE + "/Check", {"service": service})
            self.assertEqual("SERVING", answer["status"], service)

    def test_an_unknown_service_is_not_found(self):
        self.assertEqual("NotFound",
                         self.refusal(HEALTH_SERVICE + "/Check", {"service": "nobody"}).code)

    def test_watch_tells_the_state_at_once_and_stays_open(self):
        with self.assertRaises(GrpcurlError) as caught:
            grpcurl("-max-time", "1", self.server.address, HEALTH_SERVICE + "/Watch",
                    data={"service": EXPERT_SERVICE})
        self.assertEqual("DeadlineExceeded", caught.exception.code)
        self.assertIn('"status": "SERVING"', str(caught.exception))


class ModelTest(WireTest):
    def test_server_info_names_model_backend_and_limits(self):
        info = self.call(MODEL_SERVICE + "/GetServerInfo")
        self.assertEqual("golden", info["model"])
        self.assertEqual(harness.BACKEND, info["backend"])
        self.assertEqual("STATE_SERVING", info["state"])
        self.assertEqual(harness.RANKS, info["num_ranks"])
        self.assertEqual(harness.RANKS, len(info["devices"]))
        self.assertEqual(MAX_TOKENS, info["max_tokens"])
        self.assertEqual(TOKENS_PER_RANK, info["max_tokens_per_rank"])
        self.assertGreaterEqual(int(info["max_message_bytes"]), MAX_TOKENS * 256 * 4)
        for field in ("version", "commit", "backend_detail", "max_top_k", "max_stream_inflight",
                      "self_test_max_tokens", "max_inflight_bytes", "max_queued_requests"):
            self.assertTrue(info[field], field)
        for field in ("weight_bytes", "workspace_bytes"):
            self.assertGreater(int(info[field]), 0, field)

    def test_the_layers_are_those_of_the_checkpoint(self):
        expected = [{"layer": layer, "hidden_size": 256, "intermediate_size": 128, "num_experts": 8,
                     "top_k": 6, "recipe": "RECIPE_MXFP4", "swiglu_limit": 10} for layer in (0, 1)]
        self.assertEqual(expected, self.call(MODEL_SERVICE + "/ListLayers")["layers"])

    def test_every_expert_has_one_slot(self):
        placement = self.call(MODEL_SERVICE + "/GetPlacement")
        found = (placement["num_experts"], placement["num_ranks"], placement["slots_per_rank"])
        self.assertEqual((8, harness.RANKS, 8 // harness.RANKS), found)
        self.assertEqual(list(range(8)), sorted(placement["expert_of_slot"]))

    def test_all_bytes_are_loaded(self):
        progress = self.call(MODEL_SERVICE + "/GetLoadProgress")
        self.assertEqual("STATE_SERVING", progress["state"])
        self.assertEqual(progress["bytes_total"], progress["bytes_done"])
        self.assertGreater(int(progress["bytes_total"]), 0)


class SelfTestTest(WireTest):
    def test_every_layer_passes(self):
        for layer in (0, 1):
            for tokens in (0, 1, 8):
                answer = self.call(SELF_TEST, {"layer": layer, "num_tokens": tokens, "seed": 5})
                self.assertTrue(answer["passed"], answer)
                self.assertEqual(max(tokens, 1), answer["num_tokens"])
                self.assertLess(answer["rel_l2_error"], answer["tolerance"])
                self.assertLessEqual(answer["tolerance"], 0.005)

    def test_too_many_tokens_are_refused(self):
        error = self.refusal(SELF_TEST, {"layer": 0, "num_tokens": 9})
        self.assertEqual("InvalidArgument", error.code)
        for part in ("num_tokens", "9", "8"):
            self.assertIn(part, error.message)

    def test_an_unknown_layer_is_not_found(self):
        error = self.refusal(SELF_TEST, {"layer": 2})
        self.assertEqual("NotFound", error.code)
        self.assertIn("0-1", error.message)


class ForwardTest(WireTest):
    def check(self, request, found, bound, name):
        self.assertEqual(request["T"] * request["H"], len(found), name)
        self.assertLessEqual(relative_l2(found, request["expected"]), bound, name)

    def test_numbers_are_answered_with_the_golden_numbers(self):
        self.assertGreaterEqual(len(self.requests), 10)
        for name, request in self.requests.items():
            answer = self.call(FORWARD, as_numbers(request))
            self.assertEqual(("7", request["T"], request["H"], ""),
                             (answer["request_id"], answer["num_tokens"], answer["hidden_size"],
                              answer["output"]), name)
            if request["T"] > 0:
                self.assertEqual("DTYPE_F32", answer["output_dtype"], name)
            self.check(request, output_of(answer), 2 * request["expected_rel_l2_bf16"], name)

    def test_bytes_are_answered_with_bytes(self):
        for name, request in self.requests.items():
            answer = self.call(FORWARD, as_bytes(request))
            self.assertEqual([], answer["output_values"], name)
            self.assertEqual("DTYPE_BF16", answer["output_dtype"], name)
            self.check(request, output_of(answer), 2 * request["expected_rel_l2_bf16"], name)

    def test_masked_rows_are_exactly_zero(self):
        found = self.forward(as_numbers(self.requests["l0-t1-masked"]))
        self.assertEqual({0.0}, set(found))

    def test_a_row_has_the_same_bits_in_every_batch(self):
        width = 256
        for layer in (0, 1):
            alone = self.forward(as_numbers(self.requests[f"l{layer}-t1"]))
            batch = self.forward(as_numbers(self.requests[f"l{layer}-t17"]))
            self.assertEqual(alone, batch[9 * width:10 * width])

    def test_a_nan_weight_touches_its_own_row_alone(self):
        request = as_numbers(self.requests["l0-t3"])
        clean = self.forward(request)
        request["routing_weight_values"][0] = "NaN"
        found = self.forward(request)
        self.assertTrue(all(value != value for value in found[:256]))
        self.assertEqual(clean[256:], found[256:])

    def test_the_timing_block_is_filled(self):
        timing = self.call(FORWARD, as_numbers(self.requests["l0-t17"]))["timing"]
        self.assertGreater(int(timing["total_us"]), 0)
        self.assertGreater(int(timing["kernel_us"]), 0)
        self.assertGreaterEqual(int(timing["total_us"]), int(timing["kernel_us"]))
        self.assertEqual(17, timing["step_tokens"])

    def test_bf16_output_can_be_asked_for_with_numbers(self):
        request = as_numbers(self.requests["l0-t1"])
        request["output_dtype"] = "DTYPE_BF16"
        found = self.forward(request)
        self.check(self.requests["l0-t1"], found, 2 * self.requests["l0-t1"]["expected_rel_l2_bf16"],
                   "l0-t1")


class StreamTest(WireTest):
    def test_a_bad_request_gets_its_error_item_and_the_others_their_answers(self):
        good = as_numbers(self.requests["l0-t1"])
        sent = [{**good, "request_id": "1"}, {**good, "request_id": "2", "layer": 9},
                {**good, "request_id": "3", "hidden_size": 255}, {**good, "request_id": "4"}]
        items = documents(grpcurl("-emit-defaults", self.server.address, STREAM, data=sent))
        by_id = {item["request_id"]: item for item in items}
        self.assertEqual({"1", "2", "3", "4"}, set(by_id))
        self.assertEqual(4, len(items))
        alone = self.forward(good)
        for good_id in ("1", "4"):
            self.assertEqual(alone, output_of(by_id[good_id]["result"]))
        self.assertEqual(5, by_id["2"]["error"]["code"])  # NOT_FOUND
        self.assertIn("layer", by_id["2"]["error"]["message"])
        self.assertEqual(3, by_id["3"]["error"]["code"])  # INVALID_ARGUMENT
        self.assertIn("hidden_size", by_id["3"]["error"]["message"])


def _set(**fields):
    def change(request):
        request.update(fields)
    return change


def _drop_last(field):
    def change(request):
        request[field].pop()
    return change


def _resize(field, extra):
    """One byte more or less in a base64 field."""
    def change(request):
        data = base64.b64decode(request[field])
        data = data + b"\0" if extra > 0 else data[:-1]
        request[field] = base64.b64encode(data).decode()
    return change


def _set_id(value):
    def change(request):
        request["expert_id_values"][7] = value
    return change


# What is wrong, as which form it is sent, the change, the code, and what the message must name: field, found,
# expected. The request is l0-t3: T 3, H 256, K 6.
REFUSED = [
    ("negative T", as_numbers, _set(num_tokens=-1), "InvalidArgument", ["num_tokens", "-1", "34"]),
    ("too many tokens", as_numbers, _set(num_tokens=35), "InvalidArgument",
     ["num_tokens", "35", "34"]),
    ("T too small", as_numbers, _set(num_tokens=2), "InvalidArgument",
     ["hidden_values", "768", "512"]),
    ("wrong H", as_numbers, _set(hidden_size=128), "InvalidArgument", ["hidden_size", "128", "256"]),
    ("no H", as_numbers, _set(hidden_size=0), "InvalidArgument", ["hidden_size", "0", "256"]),
    ("K zero", as_numbers, _set(top_k=0), "InvalidArgument", ["top_k", "0", "32"]),
    ("K too large", as_numbers, _set(top_k=33), "InvalidArgument", ["top_k", "33", "32"]),
    ("wrong K", as_numbers, _set(top_k=5), "InvalidArgument", ["expert_id_values", "18", "15"]),
    ("a hidden value short", as_numbers, _drop_last("hidden_values"), "InvalidArgument",
     ["hidden_values", "767", "768"]),
    ("an id short", as_numbers, _drop_last("expert_id_values"), "InvalidArgument",
     ["expert_id_values", "17", "18"]),
    ("a weight short", as_numbers, _drop_last("routing_weight_values"), "InvalidArgument",
     ["routing_weight_values", "17", "18"]),
    ("no hidden states", as_numbers, _set(hidden_values=[]), "InvalidArgument",
     ["hidden_states", "0 bytes", "1536"]),
    ("id too large", as_numbers, _set_id(8), "InvalidArgument", ["expert_ids", "8", "0 to 7"]),
    ("id too small", as_numbers, _set_id(-2), "InvalidArgument", ["expert_ids", "-2", "-1"]),
    ("bytes and numbers", as_numbers, _set(hidden_states="AAAA"), "InvalidArgument",
     ["hidden_states", "hidden_values"]),
    ("unknown hidden dtype", as_numbers, _set(hidden_dtype=77), "InvalidArgument",
     ["hidden_dtype", "77", "DTYPE_BF16"]),
    ("unknown output dtype", as_numbers, _set(output_dtype=77), "InvalidArgument",
     ["output_dtype", "77", "DTYPE_BF16"]),
    ("a byte short", as_bytes, _resize("hidden_states", -1), "InvalidArgument",
     ["hidden_states", "1535", "1536"]),
    ("a byte long", as_bytes, _resize("hidden_states", 1), "InvalidArgument",
     ["hidden_states", "1537", "1536"]),
    ("an id byte short", as_bytes, _resize("expert_ids", -1), "InvalidArgument",
     ["expert_ids", "71", "72"]),
    ("a weight byte long", as_bytes, _resize("routing_weights", 1), "InvalidArgument",
     ["routing_weights", "73", "72"]),
    ("f32 named, bf16 sent", as_bytes, _set(hidden_dtype="DTYPE_F32"), "InvalidArgument",
     ["hidden_states", "1536", "3072"]),
    ("unknown layer", as_numbers, _set(layer=2), "NotFound", ["layer", "2", "0-1"]),
    ("negative layer", as_numbers, _set(layer=-1), "NotFound", ["layer", "-1", "0-1"]),
    ("unknown model", as_numbers, _set(model="other"), "NotFound", ["model", "other", "golden"]),
]


class RefusalTest(WireTest):
    def test_each_wrong_request_is_refused_by_name(self):
        good = self.requests["l0-t3"]
        before = self.forward(as_numbers(good))
        for what, form, change, code, parts in REFUSED:
            with self.subTest(what):
                request = copy.deepcopy(form(good))
                change(request)
                error = self.refusal(FORWARD, request)
                self.assertEqual(code, error.code, error)
                for part in parts:
                    self.assertIn(part, error.message)
        self.assertEqual(before, self.forward(as_numbers(good)))

    def test_the_model_may_be_named(self):
        request = as_numbers(self.requests["l0-t1"])
        self.assertEqual(self.forward(request), self.forward({**request, "model": "golden"}))

    def test_a_message_over_the_cap_is_refused_and_the_server_lives(self):
        cap = int(self.call(MODEL_SERVICE + "/GetServerInfo")["max_message_bytes"])
        good = as_numbers(self.requests["l0-t1"])
        over = {**good, "hidden_states": base64.b64encode(bytes(cap + 1)).decode()}
        del over["hidden_values"]
        self.assertEqual("ResourceExhausted", self.refusal(FORWARD, over).code)
        self.assertEqual(256, len(self.forward(good)))

    def test_the_largest_request_fits_below_the_cap(self):
        values = [0.1] * (MAX_TOKENS * 256)
        ids = [-1] * (MAX_TOKENS * 32)
        answer = self.forward({"layer": 0, "num_tokens": MAX_TOKENS, "hidden_size": 256, "top_k": 32,
                               "hidden_dtype": "DTYPE_F32", "hidden_values": values,
                               "expert_id_values": ids, "routing_weight_values": [1.5] * len(ids)})
        self.assertEqual((MAX_TOKENS * 256, {0.0}), (len(answer), set(answer)))


class QueueTest(WireTest):
    """A step waits a second for more requests, so that requests stay in the queue.

    An idle stream is open beside the others: with a request of every stream a step would not wait.
    """

    flags = ("--batch-wait-us", "1000000", "--max-queued-requests", "1")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        no_tokens = {"layer": 0, "num_tokens": 0, "hidden_size": 256, "top_k": 1}
        cls.idle = harness.IdleStream(cls.server.address, STREAM, no_tokens)

    @classmethod
    def tearDownClass(cls):
        cls.idle.stop()
        super().tearDownClass()

    def test_a_full_queue_says_when_to_come_back(self):
        request = as_numbers(self.requests["l0-t1"])
        items = documents(grpcurl("-emit-defaults", self.server.address, STREAM, data=[
            {**request, "request_id": "1"}, {**request, "request_id": "2"},
            {**request, "request_id": "3"}]))
        errors = [item["error"] for item in items if "error" in item]
        self.assertEqual([8, 8], [error["code"] for error in errors])  # RESOURCE_EXHAUSTED
        for error in errors:
            self.assertGreater(error["retry_pushback_ms"], 0)
            self.assertIn("queue", error["message"])
        self.assertEqual(1, sum("result" in item for item in items))

    def test_the_pushback_is_a_trailer_of_unary_calls(self):
        def ask(_):
            try:
                return grpcurl("-v", self.server.address, FORWARD,
                               data=as_numbers(self.requests["l0-t1"]))
            except GrpcurlError as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(ask, range(4)))
        refused = [result for result in results if isinstance(result, GrpcurlError)]
        self.assertIn(len(refused), (1, 2, 3))
        for error in refused:
            self.assertEqual("ResourceExhausted", error.code)
            self.assertRegex(str(error), r"grpc-retry-pushback-ms: [1-9]")

    def test_a_deadline_that_passes_in_the_queue_is_deadline_exceeded(self):
        request = {**as_numbers(self.requests["l0-t1"]), "timeout_ms": 100}
        items = documents(grpcurl("-emit-defaults", self.server.address, STREAM, data=request))
        self.assertEqual([4], [item["error"]["code"] for item in items])  # DEADLINE_EXCEEDED

    def test_a_step_goes_at_once_when_every_stream_has_a_request(self):
        server = harness.Daemon("--batch-wait-us", "1000000")
        try:
            answers = documents(grpcurl("-emit-defaults", server.address, STREAM,
                                        data=as_numbers(self.requests["l0-t1"])))
            self.assertLess(int(answers[0]["result"]["timing"]["queue_us"]), 900_000)
        finally:
            server.stop()


if __name__ == "__main__":
    harness.main(needs_grpcurl=True)
