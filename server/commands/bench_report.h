#pragma once

#include <string>

#include "expertd/v1/expertd.pb.h"
#include "server/load_generator.h"

// How `expertd bench` says what it measured: text for people, JSON for programs. The JSON's keys
// are stable: latency_us{min,mean,p50,p90,p99,max}, requests_per_s, tokens_per_s, errors{CODE:
// count}, server_us{receive,queue,copy_in,kernel,copy_out,total} (means), step_tokens_mean.
namespace expertd {

std::string LoadReportText(const LoadOptions& options, const LoadReport& report);
std::string LoadReportJson(const LoadOptions& options, const v1::ServerInfo& server,
                           const LoadReport& report);

}  // namespace expertd
