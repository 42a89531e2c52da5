#pragma once

// How expertd ends. Stable: supervisors and scripts read these.
namespace expertd::exit_codes {

inline constexpr int kOk = 0;      // done, or drained after SIGTERM
inline constexpr int kFailed = 1;  // the job was done and its answer is no (inspect, call, bench)
inline constexpr int kUsage = 2;   // flags, environment, file; or what this build or machine lacks
inline constexpr int kDataError = 65;    // the checkpoint cannot be served (sysexits EX_DATAERR)
inline constexpr int kUnavailable = 69;  // the server could not be reached (EX_UNAVAILABLE)
inline constexpr int kSoftware = 70;  // sticky device error, step that will not end (EX_SOFTWARE)
inline constexpr int kOsError = 71;   // address in use, out of memory or threads (EX_OSERR)
inline constexpr int kTempFail = 75;  // loading took too long; restart may help (EX_TEMPFAIL)

}  // namespace expertd::exit_codes
