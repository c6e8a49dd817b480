// write_pt: a pickle of our own for the structure, LibTorch's zip writer for the records.
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <map>
#include <string>
#include <tuple>

#include "common/atomic_file.hpp"
#include "common/error.hpp"
#include "common/pt_file.hpp"

namespace mgp {
namespace {

constexpr size_t kDeepest = 100;  // as read_pt

const char* storage_name(at::ScalarType type, const std::string& where) {
  switch (type) {
    case at::kDouble:
      return "DoubleStorage";
    case at::kFloat:
      return "FloatStorage";
    case at::kHalf:
      return "HalfStorage";
    case at::kBFloat16:
      return "BFloat16Storage";
    case at::kLong:
      return "LongStorage";
    case at::kInt:
      return "IntStorage";
    case at::kShort:
      return "ShortStorage";
    case at::kChar:
      return "CharStorage";
    case at::kByte:
      return "ByteStorage";
    case at::kBool:
      return "BoolStorage";
    default:
      throw RunError("cannot save " + where + ": no storage type for " + at::toString(type));
  }
}

/// Emits a pickle of protocol 2, the one that all versions of torch.load(weights_only=True) accept. LibTorch's own
/// Pickler needs the tensors' data when it emits the structure; here the structure comes first and the data record by
/// record.
class Emitter {
 public:
  struct Record {
    std::string where;
    at::Tensor tensor;
  };

  void run(const PtValue& root) {
    out_ = "\x80\x02";
    emit(root, 0);
    out_ += '.';
  }
  const std::string& pickle() const { return out_; }
  const std::vector<Record>& records() const { return records_; }  ///< record i has the name data/<i>

 private:
  void emit(const PtValue& value, size_t depth) {
    if (depth > kDeepest) throw RunError("cannot save " + where() + ": nested too deeply");
    std::visit([&](const auto& held) { emit_one(held, depth); }, value.value);
  }
  void emit_one(std::monostate, size_t) { out_ += 'N'; }
  void emit_one(bool value, size_t) { out_ += value ? '\x88' : '\x89'; }
  void emit_one(int64_t value, size_t) { emit_integer(value); }
  void emit_one(double value, size_t) {
    out_ += 'G';
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift);
  }
  void emit_one(const std::string& value, size_t) { emit_text(value); }
  void emit_one(const at::Tensor& value, size_t) { emit_tensor(value); }
  void emit_one(const PtValue::List& list, size_t depth) {
    out_ += "](";
    for (size_t i = 0; i < list.size(); ++i) emit_inside(std::to_string(i), list[i], depth);
    out_ += 'e';
  }
  void emit_one(const PtValue::Dict& dict, size_t depth) {
    out_ += "}(";
    for (const auto& [name, value] : dict) {
      emit_text(name);
      emit_inside(name, value, depth);
    }
    out_ += 'u';
  }
  void emit_inside(const std::string& part, const PtValue& value, size_t depth) {
    path_.push_back(part);
    emit(value, depth + 1);
    path_.pop_back();
  }

  void emit_little(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i));
  }
  void emit_integer(int64_t value) {
    if (value >= 0 && value < 256) {
      out_ += 'K';
      emit_little(static_cast<uint64_t>(value), 1);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
      out_ += 'J';
      emit_little(static_cast<uint64_t>(value), 4);
    } else {
      out_ += "\x8a\x08";
      emit_little(static_cast<uint64_t>(value), 8);
    }
  }
  void emit_text(const std::string& text) {
    if (text.size() > UINT32_MAX) throw RunError("cannot save " + where() + ": a text of over 4 GB");
    out_ += 'X';
    emit_little(text.size(), 4);
    out_ += text;
  }
  void emit_integers(at::IntArrayRef numbers) {
    out_ += '(';
    for (const int64_t number : numbers) emit_integer(number);
    out_ += 't';
  }

  /// torch._utils._rebuild_tensor_v2(storage, 0, sizes, strides, requires_grad=False, backward_hooks=OrderedDict())
  void emit_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) throw RunError("cannot save " + where() + ": an undefined tensor");
    if (tensor.layout() != at::kStrided) throw RunError("cannot save " + where() + ": not a dense tensor");
    std::vector<int64_t> contiguous(static_cast<size_t>(tensor.dim()));
    int64_t stride = 1;
    for (size_t i = contiguous.size(); i > 0; --i) {
      contiguous[i - 1] = stride;
      stride *= std::max<int64_t>(tensor.size(static_cast<int64_t>(i) - 1), 1);
    }
    out_ += "ctorch._utils\n_rebuild_tensor_v2\n((";
    emit_text("storage");
    out_ += std::string("ctorch\n") + storage_name(tensor.scalar_type(), where()) + "\n";
    emit_text(std::to_string(record_of(tensor)));
    emit_text("cpu");
    emit_integer(tensor.numel());
    out_ += "tQK";
    out_ += '\0';
    emit_integers(tensor.sizes());
    emit_integers(contiguous);
    out_ +=
        "\x89"
        "ccollections\nOrderedDict\n)RtR";
  }

  /// Tied weights are the same elements of the same storage, in the same order: they get one record. A tensor that only
  /// overlaps another one (a slice of a flat buffer) gets a record of its own, else the whole buffer would be written.
  size_t record_of(const at::Tensor& tensor) {
    const auto key = std::make_tuple(tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(),
                                     tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type());
    const auto [place, is_new] = keys_.emplace(key, records_.size());
    if (is_new) records_.push_back({where(), tensor});
    return place->second;
  }

  std::string where() const {
    std::string text;
    for (const std::string& part : path_) text += (text.empty() ? "" : "/") + part;
    return text;
  }

  using Key = std::tuple<const c10::StorageImpl*, int64_t, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;
  std::string out_;
  std::vector<std::string> path_;
  std::vector<Record> records_;
  std::map<Key, size_t> keys_;
};

/// LibTorch's zip writer into an AtomicFile. Two of its ways need care: no exception may pass through its C code, and
/// its destructor writes the end of the file, which must not throw while another exception is on its way.
class RecordWriter {
 public:
  explicit RecordWriter(const std::string& path)
      : file_(path), zip_([this](const void* data, size_t bytes) { return pass_on(data, bytes); }) {}
  ~RecordWriter() {
    if (zip_.finalized()) return;
    is_abandoned_ = true;
    try {
      zip_.writeEndOfFile();
    } catch (...) {  // the file is removed anyway
    }
  }
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  void write(const std::string& name, const void* data, size_t bytes) {
    guarded([&] { zip_.writeRecord(name, data, bytes); });
  }
  void write(const std::string& name, const std::string& text) { write(name, text.data(), text.size()); }
  void commit() {
    guarded([&] { zip_.writeEndOfFile(); });
    file_.commit();
  }

 private:
  size_t pass_on(const void* data, size_t bytes) {
    if (is_abandoned_) return bytes;
    try {
      file_.write(data, bytes);
      return bytes;
    } catch (...) {
      failure_ = std::current_exception();
      return 0;
    }
  }
  template <typename Call>
  void guarded(const Call& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      if (failure_) std::rethrow_exception(failure_);  // says path and errno, which LibTorch does not know
      throw RunError(std::string("cannot write the archive: ") + error.what_without_backtrace());
    }
  }

  AtomicFile file_;
  std::exception_ptr failure_;
  bool is_abandoned_ = false;
  caffe2::serialize::PyTorchStreamWriter zip_;
};

}  // namespace

void write_pt(const std::string& path, const PtValue& root, const PtSource& source) {
  Emitter emitter;
  emitter.run(root);

  // Names, order and contents as torch.save of LibTorch 2.11 has them: record sizes and places can then be computed
  // from the pickle alone, which torch.load(mmap=True) makes use of.
  RecordWriter writer(path);
  writer.write("data.pkl", emitter.pickle());
  writer.write(".format_version", "1");
  writer.write(".storage_alignment", "64");
  writer.write("byteorder", "little");
  for (size_t i = 0; i < emitter.records().size(); ++i) {
    const auto& [where, tensor] = emitter.records()[i];
    at::Tensor data = tensor.detach();
    if (tensor.is_meta()) {
      if (!source) throw RunError("cannot save " + where + ": it has no values (meta device)");
      data = source(where, tensor);
      if (!data.defined() || data.is_meta() || data.sizes() != tensor.sizes() ||
          data.scalar_type() != tensor.scalar_type()) {
        throw RunError("cannot save " + where + ": its values differ in shape or dtype from what was announced");
      }
    }
    data = data.detach().to(at::kCPU).contiguous();
    writer.write("data/" + std::to_string(i), data.const_data_ptr(), data.nbytes());
  }
  writer.commit();  // adds the record "version"
}

}  // namespace mgp
