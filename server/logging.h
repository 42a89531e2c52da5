#pragma once

#include "config/server_config.h"

namespace expertd {

// The process's log: standard error, one event a line, as text or as JSON objects.
void SetUpLogging(LogLevel level, LogFormat format);

}  // namespace expertd
