#include "server/encode.h"

#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"
#include "kernels/formats.h"

namespace expertd {
namespace {

void AppendValues(const OutputRows& rows, const RequestView& view, v1::ForwardResponse* response) {
  auto* values = response->mutable_output_values();
  const int64_t count = rows.count * view.hidden_size;
  if (view.key.output_dtype == DType::kF32) {
    const float* from = static_cast<const float*>(rows.data);
    values->Add(from, from + count);
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(rows.data);
  for (int64_t i = 0; i < count; ++i) values->AddAlreadyReserved(Bf16ToFloat(from[i]));
}

}  // namespace

void EncodeAnswer(const Answer& answer, const RequestView& view, uint64_t request_id,
                  absl::Time received_at, absl::Time submitted_at, v1::ForwardResponse* response) {
  const absl::Time start = absl::Now();
  response->set_request_id(request_id);
  response->set_num_tokens(view.num_tokens);
  response->set_hidden_size(static_cast<int32_t>(view.hidden_size));
  response->set_output_dtype(view.key.output_dtype == DType::kBf16 ? v1::DTYPE_BF16
                                                                   : v1::DTYPE_F32);
  const int64_t elements = view.num_tokens * view.hidden_size;
  if (view.as_numbers) {
    response->mutable_output_values()->Reserve(static_cast<int>(elements));
    for (const OutputRows& rows : answer.rows) AppendValues(rows, view, response);
  } else {
    const int64_t row_bytes = view.hidden_size * DTypeBytes(view.key.output_dtype);
    std::string* output = response->mutable_output();
    output->reserve(view.num_tokens * row_bytes);
    for (const OutputRows& rows : answer.rows) {
      output->append(static_cast<const char*>(rows.data), rows.count * row_bytes);
    }
  }

  const absl::Time end = absl::Now();
  v1::Timing* timing = response->mutable_timing();
  timing->set_receive_us(absl::ToInt64Microseconds(submitted_at - received_at));
  timing->set_queue_us(answer.timing.queue_us);
  timing->set_copy_in_us(answer.timing.copy_in_us);
  timing->set_kernel_us(answer.timing.kernel_us);
  timing->set_copy_out_us(answer.timing.copy_out_us + absl::ToInt64Microseconds(end - start));
  timing->set_total_us(absl::ToInt64Microseconds(end - received_at));
  timing->set_step(answer.timing.step);
  timing->set_step_tokens(answer.timing.step_tokens);
}

}  // namespace expertd
