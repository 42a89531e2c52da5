#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "config/check.h"

namespace expertd {

// A connection that a test can break. `address` is 127.0.0.1:PORT; the caller, or the channel made
// from it, closes it.
inline int ConnectTcp(const std::string& address) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
  EXPERTD_CHECK(descriptor >= 0);
  EXPERTD_CHECK(connect(descriptor, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0);
  EXPERTD_CHECK(fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK) == 0);
  return descriptor;
}

}  // namespace expertd
