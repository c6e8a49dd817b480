#include "common/call_checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/error.hpp"

namespace mgp {

namespace {

const char* type_text(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return "f64";
    case at::kFloat:
      return "f32";
    case at::kHalf:
      return "f16";
    case at::kBFloat16:
      return "bf16";
    case at::kLong:
      return "i64";
    case at::kInt:
      return "i32";
    case at::kByte:
      return "u8";
    default:
      return nullptr;
  }
}

bool reduces(CallKind kind) {
  return kind == CallKind::all_reduce || kind == CallKind::reduce || kind == CallKind::reduce_scatter;
}

bool has_peer(CallKind kind) {
  return kind == CallKind::broadcast || kind == CallKind::reduce || kind == CallKind::send || kind == CallKind::recv;
}

class Checker {
 public:
  Checker(const Call& call, const std::string& group, int rank, int size, at::Device device)
      : call_(call), group_(group), rank_(rank), size_(size), device_(device) {}

  void run() const {
    const bool in_place = call_.input.is_same(call_.output);
    check_tensor(call_.output, in_place ? "tensor" : "output");
    if (!in_place) {
      check_tensor(call_.input, "input");
      if (call_.input.scalar_type() != call_.output.scalar_type()) {
        fail(fmt::format("output is {}, input is {}", shape_text(call_.output), shape_text(call_.input)));
      }
      check_sizes();
    }
    if (has_peer(call_.kind) && (call_.peer < 0 || call_.peer >= size_)) {
      fail(fmt::format("{} is {}, the ranks of this group are 0 to {}",
                       call_.kind == CallKind::send || call_.kind == CallKind::recv ? "peer" : "root", call_.peer,
                       size_ - 1));
    }
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw RunError(fmt::format("{} {} '{}': {}", group_, name_of(call_.kind), call_.tag.label, why));
  }

  void check_tensor(const at::Tensor& tensor, const char* side) const {
    if (!tensor.defined()) fail(fmt::format("{} is an undefined tensor", side));
    if (tensor.device() != device_) {
      fail(fmt::format("{} is on {}, this communicator is for {}", side, tensor.device().str(), device_.str()));
    }
    if (type_text(tensor.scalar_type()) == nullptr) {
      fail(fmt::format("{} has type {}; f64, f32, f16, bf16, i64, i32 and u8 can be sent", side,
                       at::toString(tensor.scalar_type())));
    }
    if (!tensor.is_contiguous()) {
      fail(fmt::format("{} is not contiguous: shape [{}], strides [{}]", side, fmt::join(tensor.sizes(), ","),
                       fmt::join(tensor.strides(), ",")));
    }
  }

  void check_sizes() const {
    const at::Tensor& large = call_.payload();
    const at::Tensor& small = call_.kind == CallKind::reduce_scatter ? call_.output : call_.input;
    const char* const large_side = call_.kind == CallKind::reduce_scatter ? "input" : "output";
    const char* const small_side = call_.kind == CallKind::reduce_scatter ? "output" : "input";
    if (large.numel() != small.numel() * size_) {
      fail(fmt::format("{} has {} elements, {} ranks x {} of {} need {}", large_side, large.numel(), size_, small_side,
                       small.numel(), small.numel() * size_));
    }
    // Both wires allow the smaller tensor to be this rank's own part of the larger one, and no other overlap.
    const auto* const large_begin = static_cast<const char*>(large.data_ptr());
    const auto* const small_begin = static_cast<const char*>(small.data_ptr());
    const bool apart = small_begin + small.nbytes() <= large_begin || large_begin + large.nbytes() <= small_begin;
    const bool own_part = small_begin == large_begin + static_cast<size_t>(rank_) * small.nbytes();
    if (small.nbytes() > 0 && !apart && !own_part) {
      fail(fmt::format("{} and {} overlap; only this rank's own part of {} may be {}", small_side, large_side,
                       large_side, small_side));
    }
  }

  const Call& call_;
  const std::string& group_;
  const int rank_;
  const int size_;
  const at::Device device_;
};

}  // namespace

const char* name_of(CallKind kind) {
  switch (kind) {
    case CallKind::all_reduce:
      return "all_reduce";
    case CallKind::all_gather:
      return "all_gather";
    case CallKind::reduce_scatter:
      return "reduce_scatter";
    case CallKind::broadcast:
      return "broadcast";
    case CallKind::reduce:
      return "reduce";
    case CallKind::send:
      return "send";
    case CallKind::recv:
      return "recv";
    case CallKind::barrier:
      return "barrier";
  }
  return "?";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::avg:
      return "avg";
    case ReduceOp::max:
      return "max";
    case ReduceOp::min:
      return "min";
  }
  return "?";
}

int64_t Call::payload_bytes() const { return kind == CallKind::barrier ? 0 : static_cast<int64_t>(payload().nbytes()); }

void check_call(const Call& call, const std::string& group, int rank, int size, at::Device device) {
  Checker(call, group, rank, size, device).run();
}

std::string shape_text(const at::Tensor& tensor) {
  const char* const type = type_text(tensor.scalar_type());
  return fmt::format("{}[{}]", type != nullptr ? type : at::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ","));
}

std::string describe(const Call& call, const std::string& group) {
  std::string text = fmt::format("{} {} '{}'", group, name_of(call.kind), call.tag.label);
  switch (call.kind) {
    case CallKind::send:
    case CallKind::reduce:
      text += fmt::format(" to rank {}", call.peer);
      break;
    case CallKind::recv:
    case CallKind::broadcast:
      text += fmt::format(" from rank {}", call.peer);
      break;
    default:
      break;
  }
  return call.kind == CallKind::barrier ? text : text + " " + shape_text(call.payload());
}

std::string signature(const Call& call) {
  std::string text = name_of(call.kind);
  if (reduces(call.kind)) text += fmt::format(" {}", name_of(call.op));
  if (has_peer(call.kind)) text += fmt::format(" root {}", call.peer);
  return text + fmt::format(" {} {}", type_text(call.payload().scalar_type()), call.payload().numel());
}

}  // namespace mgp
