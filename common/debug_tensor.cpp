// For the debugger only: describes a tensor in text. .gdbinit calls it from the command "pt TENSOR", because the
// LibTorch that a debugger sees is a release build whose tensors cannot be read member by member.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>

namespace {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined tensor";
  std::ostringstream out;
  out << tensor.sizes() << " " << tensor.dtype() << " " << tensor.device();
  if (!tensor.is_contiguous()) out << " strides " << tensor.strides();
  if (tensor.requires_grad()) out << (tensor.is_leaf() ? " leaf" : "") << " requires_grad";
  if (tensor.is_leaf() && tensor.grad().defined()) out << " has grad";
  if (tensor.numel() == 0) return out.str();
  if (!tensor.has_storage() || tensor.storage().nbytes() == 0) {
    out << "\n  no memory behind it (a shard that is not gathered)";
    return out.str();
  }

  // Only what is shown is copied to the host, apart from the statistics, which are computed where the tensor is.
  const at::Tensor flat = tensor.detach().reshape({-1});
  const int64_t shown = std::min<int64_t>(8, flat.numel());
  const at::Tensor first = flat.slice(0, 0, shown).to(at::kCPU, at::kDouble);
  out << "\n  [";
  for (int64_t i = 0; i < shown; ++i) out << (i ? ", " : "") << first[i].item<double>();
  out << (shown < flat.numel() ? ", ...]" : "]");
  if (!flat.is_complex()) {
    const at::Tensor values = flat.to(at::kDouble);
    out << "\n  min " << values.min().item<double>() << "  max " << values.max().item<double>() << "  mean "
        << values.mean().item<double>();
    const int64_t bad = (~at::isfinite(values)).sum().item<int64_t>();
    if (bad > 0) out << "  NOT FINITE: " << bad << " of " << flat.numel();
  }
  return out.str();
}

}  // namespace

/// Takes the address of an at::Tensor. The text stays valid until the next call.
extern "C" const char* mgp_describe_tensor(const void* tensor);

extern "C" const char* mgp_describe_tensor(const void* tensor) {
  static std::string text;
  try {
    const at::NoGradGuard no_grad;
    text = describe(*static_cast<const at::Tensor*>(tensor));
  } catch (const std::exception& error) {
    text = std::string("cannot be shown: ") + error.what();
  }
  return text.c_str();
}
