#include "server/commands/call_print.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "config/check.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/formats.h"

namespace expertd {
namespace {

constexpr size_t kShownValues = 8;  // of a row
constexpr int32_t kShownRows = 4;

std::string RecipeText(v1::Recipe recipe) {
  switch (recipe) {
    case v1::RECIPE_MXFP4:
      return "mxfp4";
    case v1::RECIPE_NVFP4:
      return "nvfp4";
    default:
      return "unknown";
  }
}

std::string StateText(v1::State state) {
  const std::string name = v1::State_Name(state);
  const size_t prefix = std::strlen("STATE_");
  return name.size() > prefix ? absl::AsciiStrToLower(name.substr(prefix)) : "unknown";
}

std::string DTypeText(v1::DType dtype) { return dtype == v1::DTYPE_BF16 ? "bf16" : "f32"; }

std::string Bytes(uint64_t bytes) {
  if (bytes < 10'000) return absl::StrCat(bytes, " bytes");
  if (bytes < 10'000'000) return absl::StrFormat("%.1f kB", static_cast<double>(bytes) / 1e3);
  if (bytes < 10'000'000'000) return absl::StrFormat("%.1f MB", static_cast<double>(bytes) / 1e6);
  return absl::StrFormat("%.1f GB", static_cast<double>(bytes) / 1e9);
}

std::string RowText(const std::vector<float>& values, int64_t row, int64_t row_size) {
  const auto first = values.begin() + row * row_size;
  const auto shown = std::min<int64_t>(row_size, kShownValues);
  std::string text = absl::StrCat("  token ", row, ":");
  for (int64_t i = 0; i < shown; ++i) absl::StrAppendFormat(&text, " %.6g", first[i]);
  return absl::StrCat(text, shown < row_size ? " ...\n" : "\n");
}

std::string TimingText(const v1::Timing& timing) {
  return absl::StrFormat(
      "server: receive %d, queue %d, copy in %d, kernel %d, copy out %d, total %d us; step %d with "
      "%d rows\n",
      timing.receive_us(), timing.queue_us(), timing.copy_in_us(), timing.kernel_us(),
      timing.copy_out_us(), timing.total_us(), timing.step(), timing.step_tokens());
}

}  // namespace

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  std::string json;
  EXPERTD_CHECK(google::protobuf::util::MessageToJsonString(message, &json, options).ok());
  return json;
}

std::string InfoText(const v1::ServerInfo& info) {
  std::string text = absl::StrFormat("expertd %s (%s), %s\n", info.version(), info.commit(),
                                     StateText(info.state()));
  absl::StrAppendFormat(&text, "model     %s, %s of weights\n", info.model(),
                        Bytes(info.weight_bytes()));
  absl::StrAppendFormat(&text, "backend   %s (%s), %d ranks: %s\n", info.backend(),
                        info.backend_detail(), info.num_ranks(),
                        absl::StrJoin(info.devices(), ", "));
  absl::StrAppendFormat(&text, "workspace %s for %d tokens a rank and step\n",
                        Bytes(info.workspace_bytes()), info.max_tokens_per_rank());
  absl::StrAppendFormat(&text, "request   at most %d tokens, top-%d, message of %d bytes (%s)\n",
                        info.max_tokens(), info.max_top_k(), info.max_message_bytes(),
                        Bytes(info.max_message_bytes()));
  absl::StrAppendFormat(&text, "queue     at most %d requests, %s in flight, %d a stream\n",
                        info.max_queued_requests(), Bytes(info.max_inflight_bytes()),
                        info.max_stream_inflight());
  absl::StrAppendFormat(&text, "self-test at most %d tokens\n", info.self_test_max_tokens());
  return text;
}

std::string LayersText(const v1::ListLayersResponse& response) {
  std::string text = "layer      H      I  experts  top-k  recipe  clamp\n";
  for (const v1::LayerInfo& layer : response.layers()) {
    const std::string clamp =
        layer.swiglu_limit() > 0 ? absl::StrFormat("%g", layer.swiglu_limit()) : "none";
    absl::StrAppendFormat(&text, "%5d %6d %6d %8d %6d  %-6s  %s\n", layer.layer(),
                          layer.hidden_size(), layer.intermediate_size(), layer.num_experts(),
                          layer.top_k(), RecipeText(layer.recipe()), clamp);
  }
  return text;
}

std::string ProgressText(const v1::LoadProgress& progress) {
  return absl::StrFormat("%s: %s of %s in %.1f s\n", StateText(progress.state()),
                         Bytes(progress.bytes_done()), Bytes(progress.bytes_total()),
                         progress.elapsed_s());
}

std::string SelfTestText(const v1::SelfTestResponse& response) {
  return absl::StrFormat(
      "layer %d: %s, rel-L2 error %.2e (tolerance %.2e), %d tokens, forward %d us, reference %d "
      "us\n",
      response.layer(), response.passed() ? "passed" : "FAILED", response.rel_l2_error(),
      response.tolerance(), response.num_tokens(), response.forward_us(), response.reference_us());
}

std::string ForwardText(const v1::ForwardRequest& request, const v1::ForwardResponse& response,
                        absl::Duration round_trip) {
  const std::vector<float> values = OutputValues(response);
  std::string text = absl::StrFormat("layer %d: %d tokens of H %d, top-%d, output %s\n",
                                     request.layer(), response.num_tokens(), response.hidden_size(),
                                     request.top_k(), DTypeText(response.output_dtype()));
  double sum = 0;
  int64_t num_not_finite = 0;
  for (const float value : values) {
    sum += double{value} * value;
    if (!std::isfinite(value)) ++num_not_finite;
  }
  const int32_t rows = values.empty() ? 0 : std::min(response.num_tokens(), kShownRows);
  for (int32_t row = 0; row < rows; ++row) text += RowText(values, row, response.hidden_size());
  if (rows < response.num_tokens())
    absl::StrAppendFormat(&text, "  ... %d rows\n", response.num_tokens());
  absl::StrAppendFormat(&text, "output norm %.6g, %d of %d values not finite\n", std::sqrt(sum),
                        num_not_finite, values.size());
  text += TimingText(response.timing());
  absl::StrAppendFormat(&text, "client: %d us from send to answer\n",
                        absl::ToInt64Microseconds(round_trip));
  return text;
}

std::vector<float> OutputValues(const v1::ForwardResponse& response) {
  if (!response.output_values().empty()) {
    return {response.output_values().begin(), response.output_values().end()};
  }
  const bool bf16 = response.output_dtype() == v1::DTYPE_BF16;
  const size_t element_bytes = bf16 ? 2 : 4;
  const auto count = static_cast<size_t>(int64_t{response.num_tokens()} * response.hidden_size());
  const std::string& bytes = response.output();
  if (bytes.size() != count * element_bytes) return {};
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    if (bf16) {
      uint16_t bits = 0;
      std::memcpy(&bits, bytes.data() + 2 * i, 2);
      values[i] = Bf16ToFloat(bits);
    } else {
      std::memcpy(&values[i], bytes.data() + 4 * i, 4);
    }
  }
  return values;
}

}  // namespace expertd
