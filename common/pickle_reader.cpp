#include "common/pickle_reader.hpp"

#include <bit>
#include <cstdio>
#include <utility>

#include "common/pickle_opcodes.hpp"

namespace mgp {
namespace {

using Kind = Pickle::Kind;
using Node = Pickle::Node;

constexpr size_t kMostMarks = 1000;  // open brackets; a real file nests a handful
constexpr uint32_t kUnset = UINT32_MAX;

class Machine {
 public:
  Machine(const std::string& bytes, const std::function<bool(const std::string&)>& allowed, const InputFile& file)
      : bytes_(bytes), allowed_(allowed), file_(file) {}

  Pickle run() {
    // These three never change, so one node of each is enough.
    none_ = add(Kind::none);
    false_ = add(Kind::boolean);
    true_ = add(Kind::boolean);
    pickle_.nodes[true_].integer = 1;
    for (;;) {
      opcode_at_ = at_;
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == STOP) break;
      step(opcode);
    }
    if (stack_.size() != 1 || !marks_.empty()) damaged("leaves " + std::to_string(stack_.size()) + " values, not one");
    if (at_ != bytes_.size()) damaged("goes on after its end");
    pickle_.root = stack_.back();
    return std::move(pickle_);
  }

 private:
  [[noreturn]] void damaged(const std::string& text) const {
    file_.damaged("its pickle, at byte " + std::to_string(opcode_at_) + ": " + text);
  }

  // ── bytes ──
  const char* take(uint64_t count) {
    if (count > bytes_.size() - at_) damaged("wants " + std::to_string(count) + " bytes where fewer are left");
    const char* from = bytes_.data() + at_;
    at_ += static_cast<size_t>(count);
    return from;
  }
  uint64_t unsigned_number(size_t count) {
    const char* from = take(count);
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i) value |= uint64_t{static_cast<unsigned char>(from[i])} << (8 * i);
    return value;
  }
  std::string line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string::npos) damaged("a name without an end");
    std::string text = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return text;
  }

  // ── nodes, stack and memo ──
  uint32_t add(Kind kind) {
    if (pickle_.nodes.size() >= kMostPickleNodes) damaged("more than " + std::to_string(kMostPickleNodes) + " values");
    pickle_.nodes.emplace_back().kind = kind;
    return static_cast<uint32_t>(pickle_.nodes.size() - 1);
  }
  Node& push(Kind kind) {
    const uint32_t node = add(kind);
    stack_.push_back(node);
    return pickle_.nodes[node];
  }
  size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  uint32_t pop() {
    if (stack_.size() <= bottom()) damaged("takes a value where there is none");
    const uint32_t node = stack_.back();
    stack_.pop_back();
    return node;
  }
  Node& top() {
    if (stack_.size() <= bottom()) damaged("uses a value where there is none");
    return pickle_.nodes[stack_.back()];
  }
  std::vector<uint32_t> pop_to_mark() {
    if (marks_.empty()) damaged("closes a bracket that was not opened");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<uint32_t> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void put(uint64_t slot) {
    top();
    if (slot >= kMostPickleNodes) damaged("memo " + std::to_string(slot) + " is out of range");
    if (slot >= memo_.size()) memo_.resize(static_cast<size_t>(slot) + 1, kUnset);
    memo_[static_cast<size_t>(slot)] = stack_.back();
    ++memoized_;
  }
  void get(uint64_t slot) {
    if (slot >= memo_.size() || memo_[static_cast<size_t>(slot)] == kUnset) {
      damaged("memo " + std::to_string(slot) + " was never filled");
    }
    stack_.push_back(memo_[static_cast<size_t>(slot)]);
  }

  // ── instructions ──
  void push(Kind kind, std::vector<uint32_t> items) { push(kind).items = std::move(items); }
  void push_tuple(size_t count) {
    std::vector<uint32_t> items(count);
    for (size_t i = count; i > 0; --i) items[i - 1] = pop();
    push(Kind::tuple, std::move(items));
  }
  void push_integer(int64_t value) { push(Kind::integer).integer = value; }
  void push_real() {  // the one number with its highest byte first
    uint64_t bits = 0;
    const char* from = take(8);
    for (int i = 0; i < 8; ++i) bits = bits << 8 | static_cast<unsigned char>(from[i]);
    push(Kind::real).real = std::bit_cast<double>(bits);
  }
  void push_text(uint64_t size) {
    const char* from = take(size);
    push(Kind::text).text.assign(from, static_cast<size_t>(size));
  }
  void push_long(uint64_t size) {
    if (size > 8) {
      take(size);
      damaged("an integer of " + std::to_string(size) + " bytes, at most 8 are read");
    }
    uint64_t value = unsigned_number(static_cast<size_t>(size));
    if (size > 0 && size < 8 && (value >> (8 * size - 1)) != 0) value |= ~uint64_t{0} << (8 * size);  // negative
    push_integer(static_cast<int64_t>(value));
  }
  void push_global(const std::string& name) {
    if (!allowed_(name)) file_.fail("asks for " + printable(name) + ", which this reader does not allow");
    push(Kind::global).text = name;
  }
  void append(const std::vector<uint32_t>& items, Kind kind) {
    Node& target = top();
    if (target.kind != kind) damaged("adds items to something that takes none");
    if (kind == Kind::dictionary && items.size() % 2 != 0) damaged("a dictionary key without a value");
    target.items.insert(target.items.end(), items.begin(), items.end());
  }
  void reduce() {
    const uint32_t arguments = pop();
    const uint32_t function = pop();
    if (pickle_.nodes[function].kind != Kind::global || pickle_.nodes[arguments].kind != Kind::tuple) {
      damaged("a call of something that is not a function");
    }
    if (pickle_.nodes[function].text == "collections.OrderedDict") {
      if (!pickle_.nodes[arguments].items.empty()) damaged("an OrderedDict that is not made empty");
      return push(Kind::dictionary, {});  // filled afterwards, as a plain dictionary
    }
    push(Kind::call, {function, arguments});
  }
  void step(unsigned char opcode);

  const std::string& bytes_;
  const std::function<bool(const std::string&)>& allowed_;
  const InputFile& file_;
  size_t at_ = 0, opcode_at_ = 0;
  Pickle pickle_;
  std::vector<uint32_t> stack_, memo_;
  std::vector<size_t> marks_;  // sizes of the stack where a bracket was opened
  uint64_t memoized_ = 0;
  uint32_t none_ = 0, false_ = 0, true_ = 0;
};

void Machine::step(unsigned char opcode) {
  switch (opcode) {
    case PROTO: {
      const uint64_t protocol = unsigned_number(1);
      if (protocol < 2 || protocol > 5) damaged("protocol " + std::to_string(protocol) + ", 2 to 5 are read");
      return;
    }
    case FRAME:  // a hint for reading ahead
      if (unsigned_number(8) > bytes_.size() - at_) damaged("a frame that ends after the pickle");
      return;
    case MARK:
      if (marks_.size() >= kMostMarks) damaged("more than " + std::to_string(kMostMarks) + " open brackets");
      marks_.push_back(stack_.size());
      return;

    case NONE:
      return stack_.push_back(none_);
    case NEWTRUE:
      return stack_.push_back(true_);
    case NEWFALSE:
      return stack_.push_back(false_);
    case BININT:
      return push_integer(static_cast<int32_t>(unsigned_number(4)));
    case BININT1:
      return push_integer(static_cast<int64_t>(unsigned_number(1)));
    case BININT2:
      return push_integer(static_cast<int64_t>(unsigned_number(2)));
    case LONG1:
      return push_long(unsigned_number(1));
    case LONG4:
      return push_long(unsigned_number(4));
    case BINFLOAT:
      return push_real();
    case SHORT_BINUNICODE:
      return push_text(unsigned_number(1));
    case BINUNICODE:
      return push_text(unsigned_number(4));
    case BINUNICODE8:
      return push_text(unsigned_number(8));

    case EMPTY_LIST:
      return push(Kind::list, {});
    case EMPTY_DICT:
      return push(Kind::dictionary, {});
    case EMPTY_TUPLE:
      return push(Kind::tuple, {});
    case TUPLE1:
      return push_tuple(1);
    case TUPLE2:
      return push_tuple(2);
    case TUPLE3:
      return push_tuple(3);
    case TUPLE:
      return push(Kind::tuple, pop_to_mark());
    case APPEND:
      return append({pop()}, Kind::list);
    case APPENDS:
      return append(pop_to_mark(), Kind::list);
    case SETITEM: {
      const uint32_t value = pop();
      const uint32_t key = pop();
      return append({key, value}, Kind::dictionary);
    }
    case SETITEMS:
      return append(pop_to_mark(), Kind::dictionary);

    case BINPUT:
      return put(unsigned_number(1));
    case LONG_BINPUT:
      return put(unsigned_number(4));
    case MEMOIZE:
      return put(memoized_);
    case BINGET:
      return get(unsigned_number(1));
    case LONG_BINGET:
      return get(unsigned_number(4));

    case GLOBAL: {
      const std::string module = line();
      return push_global(module + "." + line());
    }
    case STACK_GLOBAL: {
      const uint32_t name = pop();
      const uint32_t module = pop();
      if (pickle_.nodes[name].kind != Kind::text || pickle_.nodes[module].kind != Kind::text) {
        damaged("a name that is no text");
      }
      return push_global(pickle_.nodes[module].text + "." + pickle_.nodes[name].text);
    }
    case BINPERSID:
      return push(Kind::persistent, {pop()});
    case REDUCE:
      return reduce();
    case BUILD: {  // attributes; PyTorch hangs layer versions on a state dict this way, which nobody needs here
      pop();
      if (top().kind != Kind::dictionary) damaged("attributes for something that takes none");
      return;
    }
    default: {
      char hex[8];
      std::snprintf(hex, sizeof hex, "0x%02x", opcode);
      damaged(std::string("opcode ") + hex + " is not one that torch.save writes for plain data");
    }
  }
}

}  // namespace

Pickle read_pickle(const std::string& bytes, const std::function<bool(const std::string&)>& allowed,
                   const InputFile& file) {
  return Machine(bytes, allowed, file).run();
}

}  // namespace mgp
