#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "expertd/v1/expertd.pb.h"
#include "google/protobuf/message.h"

// What `expertd call` shows: text for people, protobuf JSON for programs.
namespace expertd {

// The JSON form of a message, every field present, the names grpcurl uses too.
std::string ToJson(const google::protobuf::Message& message);

std::string InfoText(const v1::ServerInfo& info);
std::string LayersText(const v1::ListLayersResponse& response);
std::string ProgressText(const v1::LoadProgress& progress);
std::string SelfTestText(const v1::SelfTestResponse& response);  // one line
std::string ForwardText(const v1::ForwardRequest& request, const v1::ForwardResponse& response,
                        absl::Duration round_trip);

// The output as numbers, whichever way it came. Empty if the byte count does not fit [T, H].
std::vector<float> OutputValues(const v1::ForwardResponse& response);

}  // namespace expertd
