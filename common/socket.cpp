#include "common/socket.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>

namespace mgp {

std::string Endpoint::shown() const { return fmt::format("{}:{}", host, port); }

std::optional<Endpoint> parse_endpoint(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  Endpoint endpoint{text.substr(0, colon), 0};
  std::from_chars(text.data() + colon + 1, text.data() + text.size(), endpoint.port);
  if (endpoint.port < 1 || endpoint.port > 65535) return std::nullopt;
  return endpoint;
}

int listen_on(bool loopback, int& port) {
  int error = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    if (loopback && family == AF_INET6) continue;
    const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      error = errno;
      continue;
    }
    const int on = 1;
    const int off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));  // a port that waits in TIME_WAIT is free
    sockaddr_storage address{};
    socklen_t length = 0;
    if (family == AF_INET6) {
      setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
      auto* v6 = reinterpret_cast<sockaddr_in6*>(&address);
      v6->sin6_family = AF_INET6;
      v6->sin6_addr = in6addr_any;
      v6->sin6_port = htons(static_cast<uint16_t>(port));
      length = sizeof(*v6);
    } else {
      auto* v4 = reinterpret_cast<sockaddr_in*>(&address);
      v4->sin_family = AF_INET;
      v4->sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
      v4->sin_port = htons(static_cast<uint16_t>(port));
      length = sizeof(*v4);
    }
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, SOMAXCONN) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
      port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                      : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
      return fd;
    }
    error = errno;
    close(fd);
    if (error == EADDRINUSE || error == EACCES) break;  // not a matter of the IP version
  }
  errno = error;
  return -1;
}

bool answers(const Endpoint& endpoint, std::string& reason) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (code != 0) {
    reason = fmt::format("host name '{}': {}", endpoint.host, gai_strerror(code));
    return false;
  }
  bool connected = false;
  for (const addrinfo* at = found; at != nullptr && !connected; at = at->ai_next) {
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    int error = connect(fd, at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd wait{fd, POLLOUT, 0};
      error = ETIMEDOUT;
      socklen_t length = sizeof(error);
      if (poll(&wait, 1, 1000) > 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    connected = error == 0;
    if (!connected) reason = std::strerror(error);
    close(fd);
  }
  freeaddrinfo(found);
  return connected;
}

std::string reachable_address(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  addrinfo* found = nullptr;
  bool by_name = false;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) == 0) {
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      const uint32_t v4 = ntohl(reinterpret_cast<const sockaddr_in*>(at->ai_addr)->sin_addr.s_addr);
      by_name = by_name || (v4 >> 24) != 127;
    }
    freeaddrinfo(found);
  }
  if (by_name) return host;
  std::string address = host;
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return address;
  for (const ifaddrs* at = interfaces; at != nullptr; at = at->ifa_next) {
    const std::string name = at->ifa_name;
    const bool is_virtual = name.rfind("docker", 0) == 0 || name.rfind("virbr", 0) == 0 || name.rfind("br-", 0) == 0;
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET || (at->ifa_flags & IFF_LOOPBACK) || is_virtual)
      continue;
    char text[INET_ADDRSTRLEN] = {};
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr, text, sizeof(text));
    address = text;
    break;
  }
  freeifaddrs(interfaces);
  return address;
}

}  // namespace mgp
