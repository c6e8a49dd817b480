#include "common/metrics.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "common/error.hpp"

namespace mgp {

MetricsFile::MetricsFile(const std::string& path, bool append) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0666);
  if (descriptor_ < 0) throw RunError(fmt::format("--metrics {}: {}", path, std::strerror(errno)));
}

MetricsFile::~MetricsFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void MetricsFile::line(const nlohmann::json& object) {
  const std::string text = object.dump() + "\n";
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = ::write(descriptor_, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw RunError(fmt::format("--metrics {}: {}", path_, std::strerror(errno)));
    done += static_cast<size_t>(written);
  }
}

void MetricsFile::step(const StepNumbers& n) {
  nlohmann::json object = {{"kind", "step"},
                           {"step", n.step},
                           {"loss", n.loss},
                           {"grad_norm", n.grad_norm},
                           {"lr", n.learning_rate},
                           {"ms", n.ms},
                           {"comm_calls", n.comm_calls},
                           {"comm_bytes", n.comm_bytes},
                           {"allocated_bytes", n.allocated_bytes},
                           {"resident_bytes", n.resident_bytes},
                           {"tokens_per_second", n.tokens_per_second},
                           {"tflops", n.tflops}};
  if (!std::isnan(n.exposed_ms)) {
    object["exposed_ms"] = n.exposed_ms;
    object["overlap_lead_ms"] = n.lead_ms;
  }
  if (!std::isnan(n.gather_ms)) object["exposed_gather_ms"] = n.gather_ms;
  if (!std::isnan(n.mfu)) object["mfu"] = n.mfu;
  if (!std::isnan(n.loss_scale)) {
    object["loss_scale"] = n.loss_scale;
    object["skipped"] = n.skipped;
  }
  line(object);
}

void MetricsFile::run(const nlohmann::json& object) {
  line(object);
  ::fsync(descriptor_);
}

}  // namespace mgp
