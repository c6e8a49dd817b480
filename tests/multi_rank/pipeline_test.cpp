// Messages between the stages of a pipeline, in the order of real schedules. Every rank is a stage.
#include <thread>

#include "examples/pipeline_parallel/neighbours.hpp"
#include "examples/pipeline_parallel/schedule.hpp"
#include "world.hpp"

namespace {

using namespace mgp;
using mgp_test::world;

/// Walks through `schedule` and expects the right values on every stage, with stages that add 1 on the way down and double on the way up. Microbatch m has m % 3 + 1
/// rows of `elements` numbers, and begins with the value 100 m. `late`: this stage comes later than the others.
void expect_exchange(const Schedule& schedule, int64_t elements, int late = -1) {
  const int stage = world().rank(), last = world().size() - 1;
  Neighbours neighbours(world(), at::kFloat, schedule.micro_batches);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(world().device());
  std::vector<at::Tensor> down(static_cast<size_t>(schedule.micro_batches)), up = down;
  for (const Action& action : schedule.actions[static_cast<size_t>(stage)]) {
    if (stage == late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int64_t m = action.microbatch;
    const std::vector<int64_t> shape = {m % 3 + 1, elements};
    at::Tensor& y = down[static_cast<size_t>(m)];
    at::Tensor& dx = up[static_cast<size_t>(m)];
    switch (action.kind) {
      case ActionKind::recv_activation:
        neighbours.recv_activation(m, shape);
        break;
      case ActionKind::forward:
        y = (stage == 0 ? at::full(shape, 100.0 * static_cast<double>(m), options) : neighbours.activation(m)) + 1;
        break;
      case ActionKind::send_activation:
        neighbours.send_activation(m, y);
        break;
      case ActionKind::recv_gradient:
        neighbours.recv_gradient(m, shape);
        break;
      case ActionKind::backward:
        dx = (stage == last ? y : neighbours.gradient(m)) * 2;
        break;
      case ActionKind::send_gradient:
        // As mean pooling hands out gradients: a stride of 0. What is sent must be laid out all the same.
        neighbours.send_gradient(m, dx.slice(1, 0, 1).expand(shape));
        break;
    }
  }
  neighbours.finish();
  for (int64_t m = 0; m < schedule.micro_batches; ++m) {
    const double top = 100.0 * static_cast<double>(m) + last + 1;  // what the last stage made of it
    const at::Tensor& dx = up[static_cast<size_t>(m)];
    ASSERT_EQ(dx.sizes(), (std::vector<int64_t>{m % 3 + 1, elements}));
    EXPECT_TRUE(dx.eq(top * static_cast<double>(1 << (last - stage + 1))).all().item<bool>())
        << schedule.name << ", microbatch " << m << ", stage " << stage;
  }
}

TEST(Pipeline, EveryScheduleRunsToItsEnd) {
  for (const std::string name : {"gpipe", "1f1b"}) {
    for (const int64_t m : {1, 2, 3, 6, 7}) expect_exchange(make_schedule(name, world().size(), m), /*elements=*/5);
  }
}

// Small messages are buffered and hide an order in which both neighbours send first; large ones wait for their receive.
TEST(Pipeline, LargeMessages) {
  for (const std::string name : {"gpipe", "1f1b"}) {
    expect_exchange(make_schedule(name, world().size(), 5), /*elements=*/1 << 20);  // 4, 8 and 12 MiB
  }
}

TEST(Pipeline, AStageThatIsLate) {
  for (int late = 0; late < world().size(); ++late) {
    for (const std::string name : {"gpipe", "1f1b"})
      expect_exchange(make_schedule(name, world().size(), 6), 1000, late);
  }
}

TEST(Pipeline, EachDirectionHasALedgerOfItsOwn) {
  const Schedule schedule = one_f_one_b_schedule(world().size(), 4);
  const std::vector<LedgerRow> before = world().ledger().rows();
  expect_exchange(schedule, /*elements=*/8);
  const int64_t payload = (1 + 2 + 3 + 1) * 8 * 4;  // rows of the four microbatches x elements x bytes
  const int stage = world().rank(), last = world().size() - 1;
  int64_t sent = 0;
  for (const LedgerRow& row : difference(world().ledger().rows(), before)) {
    if (row.call != "send" && row.call != "recv") continue;
    EXPECT_EQ(row.calls, 4);
    EXPECT_EQ(row.payload_bytes, payload);
    EXPECT_EQ(row.purpose, Purpose::training);
    const bool down = row.group == "activations";
    EXPECT_TRUE(down || row.group == "gradients") << row.group;
    EXPECT_TRUE((row.call == "send") == down ? stage < last : stage > 0) << row.group << " " << row.call;
    if (row.call == "send") sent += row.calls;
  }
  EXPECT_EQ(sent, messages_sent(schedule, stage));
}

}  // namespace
