// TCP sockets, only as far as the rendezvous needs them to say clearly what is wrong: is this port free, does somebody
// listen there, under which address do other hosts reach this one.
#pragma once

#include <optional>
#include <string>

namespace mgp {

struct Endpoint {
  std::string host;
  int port = 0;
  std::string shown() const;  ///< "host:port"
};

/// "host:port" with a port of 1..65535, else nullopt.
std::optional<Endpoint> parse_endpoint(const std::string& text);

/// A listening socket on `port` (0: any free one), on loopback or on all interfaces and both IP versions. Sets `port`.
/// The socket itself is handed to the store, so nobody can take the port in between. Returns -1 and sets errno on
/// failure.
int listen_on(bool loopback, int& port);

/// Whether somebody accepts a connection within a second; if not, `reason` says why.
bool answers(const Endpoint& endpoint, std::string& reason);

/// An address of this host that other hosts can use: its name if that resolves to more than loopback, else the address
/// of its first real network interface.
std::string reachable_address(const std::string& host);

}  // namespace mgp
