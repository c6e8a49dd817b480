// How rank 0's address gets to the others: by what the launcher's variables say, or by a file.
#pragma once

#include <string>

#include "common/launch.hpp"
#include "common/socket.hpp"

namespace mgp {

/// Whether all ranks run on this host.
bool all_local(const Launch& launch);

/// Where the ranks agreed to meet by their variables alone; on one host always on loopback. Throws UsageError naming the
/// variable that is missing.
Endpoint agreed_endpoint(const Launch& launch);

/// The rendezvous file holds one line. Written under another name and renamed, so nobody reads half of it.
void write_rendezvous_file(const std::string& path, const std::string& text);
std::string read_rendezvous_file(const std::string& path);  ///< "" while it is not there

}  // namespace mgp
