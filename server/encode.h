#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "expertd/v1/expertd.pb.h"
#include "server/request.h"

namespace expertd {

// Copies the answer's rows into the response, in the form that the request came in. The answer is
// OK. received_at: when the handler got the message; submitted_at: when it was validated.
void EncodeAnswer(const Answer& answer, const RequestView& view, uint64_t request_id,
                  absl::Time received_at, absl::Time submitted_at, v1::ForwardResponse* response);

}  // namespace expertd
