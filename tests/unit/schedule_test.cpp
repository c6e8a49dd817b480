// The schedules of examples/pipeline_parallel against the figures of the papers.
#include "examples/pipeline_parallel/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "common/error.hpp"
#include "examples/pipeline_parallel/pipeline_options.hpp"

namespace mgp {
namespace {

/// The forwards and backwards of one stage as text: "F0 F1 B0 B1".
std::string computes(const Schedule& schedule, size_t stage) {
  std::string text;
  for (const Action& action : schedule.actions.at(stage)) {
    if (action.kind != ActionKind::forward && action.kind != ActionKind::backward) continue;
    text += (text.empty() ? "" : " ") + to_string(action);
  }
  return text;
}

// Narayanan et al. 2021, figure 3: GPipe, 4 stages, 8 microbatches (numbered from 1 there).
TEST(Schedule, GpipeIsThatOfTheFigure) {
  const Schedule schedule = gpipe_schedule(4, 8);
  for (size_t stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(computes(schedule, stage), "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7");
    EXPECT_EQ(activations_kept(schedule, static_cast<int64_t>(stage)), 8);
  }
}

// Narayanan et al. 2021, figure 4 (top): 1F1B, 4 stages, 8 microbatches.
TEST(Schedule, OneFOneBIsThatOfTheFigure) {
  const Schedule schedule = one_f_one_b_schedule(4, 8);
  EXPECT_EQ(computes(schedule, 0), "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7");
  EXPECT_EQ(computes(schedule, 1), "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7");
  EXPECT_EQ(computes(schedule, 2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7");
  EXPECT_EQ(computes(schedule, 3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7");
  for (int64_t stage = 0; stage < 4; ++stage) EXPECT_EQ(activations_kept(schedule, stage), 4 - stage);
}

// Both finish at (m + p - 1) (forward + backward), figure 3 and section 2.2.1.
TEST(Schedule, BothEndAtTheSameTime) {
  for (const std::string name : {"gpipe", "1f1b"}) {
    const auto times = timetable(make_schedule(name, 4, 8), /*forward=*/1, /*backward=*/2);
    EXPECT_EQ(times[0].back().end, (8 + 4 - 1) * 3) << name;
  }
}

TEST(Schedule, IdleShares) {
  EXPECT_NEAR(predicted_idle_share(4, 8), 0.273, 5e-4);
  EXPECT_NEAR(predicted_idle_share(4, 16), 0.158, 5e-4);
  EXPECT_NEAR(predicted_idle_share(2, 4), 0.2, 1e-12);
  EXPECT_NEAR(predicted_idle_share(4, 1), 0.75, 1e-12);
  EXPECT_EQ(predicted_idle_share(1, 5), 0.0);
}

// Every size, also fewer microbatches than stages: it ends though each send waits, and costs what the formulas say.
TEST(Schedule, EverySizeEndsAndCostsWhatTheFormulasSay) {
  for (int64_t p = 1; p <= 9; ++p) {
    for (int64_t m = 1; m <= 12; ++m) {
      for (const std::string name : {"gpipe", "1f1b"}) {
        const Schedule schedule = make_schedule(name, p, m);
        ASSERT_NO_THROW(check_schedule(schedule)) << name << " " << p << " " << m;
        EXPECT_NEAR(counted_idle_share(schedule), predicted_idle_share(p, m), 1e-12) << name << " " << p << " " << m;
        EXPECT_EQ(messages_sent(schedule), 2 * (p - 1) * m);
        for (int64_t s = 0; s < p; ++s) {
          EXPECT_EQ(activations_kept(schedule, s), name == "gpipe" ? m : std::min(p - s, m));
        }
      }
    }
  }
}

TEST(Schedule, FewerMicrobatchesThanStages) {
  const Schedule schedule = one_f_one_b_schedule(4, 2);
  EXPECT_EQ(computes(schedule, 0), "F0 F1 B0 B1");
  EXPECT_EQ(computes(schedule, 2), "F0 F1 B0 B1");
  EXPECT_EQ(computes(schedule, 3), "F0 B0 F1 B1");
}

std::string failure_of(const Schedule& schedule) {
  try {
    check_schedule(schedule);
  } catch (const RunError& error) {
    return error.what();
  }
  return "";
}

void swap(Schedule& schedule, size_t stage, const Action& a, const Action& b) {
  std::vector<Action>& list = schedule.actions[stage];
  std::iter_swap(std::find(list.begin(), list.end(), a), std::find(list.begin(), list.end(), b));
}

TEST(Schedule, TwoNeighboursThatBothSendFirstStandStill) {
  Schedule schedule = one_f_one_b_schedule(2, 3);
  // The last stage receives activation 1 before it sends gradient 0. The other way round both stages would send.
  swap(schedule, 1, {ActionKind::send_gradient, 0}, {ActionKind::recv_activation, 1});
  EXPECT_EQ(
      failure_of(schedule),
      "the schedule 1f1b of 2 stages and 3 microbatches stands still: stage 0 waits at 'send activation 1', stage "
      "1 waits at 'send gradient 0'");
}

TEST(Schedule, MistakesAreFound) {
  Schedule without = gpipe_schedule(2, 2);
  without.actions[0].pop_back();  // the last backward
  EXPECT_NE(failure_of(without).find("leaves out microbatch 1 on stage 0"), std::string::npos) << failure_of(without);

  Schedule twice = gpipe_schedule(1, 2);
  twice.actions[0].push_back({ActionKind::backward, 1});
  EXPECT_NE(failure_of(twice).find("twice"), std::string::npos) << failure_of(twice);

  Schedule early = gpipe_schedule(2, 2);
  swap(early, 1, {ActionKind::recv_activation, 0}, {ActionKind::forward, 0});
  EXPECT_NE(failure_of(early).find("before its activation was received"), std::string::npos) << failure_of(early);

  Schedule unsent = gpipe_schedule(2, 1);
  unsent.actions[0].erase(unsent.actions[0].begin() + 1);  // send activation 0
  EXPECT_NE(failure_of(unsent).find("stage 1 waits at 'receive activation 0'"), std::string::npos)
      << failure_of(unsent);

  EXPECT_THROW(make_schedule("2f2b", 2, 2), UsageError);
}

TEST(Schedule, Table) {
  EXPECT_EQ(schedule_table(one_f_one_b_schedule(2, 2)),
            "schedule 1f1b, 2 stages, 2 microbatches: F forward, B backward (twice as long), . idle\n"
            "stage 0  F0 F1 .  .  B0 B0 .  B1 B1   keeps 2\n"
            "stage 1  .  F0 B0 B0 F1 B1 B1 .  .   keeps 1\n"
            "idle share 33.3 % ((p-1)/(m+p-1): 33.3 %), messages a step 4 (2(p-1)m)\n");
}

PipelineOptions base_on_gpus(int64_t rows, int world, int64_t micro_batches) {
  PipelineOptions options;
  options.preset = "base";
  options.model = preset_config("base", ModelKind::classifier);
  options.batch_size = options.global_batch_size = rows;
  options.world = world;
  options.model_ranks = world;
  options.micro_batches = micro_batches;
  options.cuda = true;
  return options;
}

TEST(PipelineMemory, OneStageWithOneMicrobatchNeedsWhatTheWholeModelNeeds) {
  for (const Precision precision : {Precision::fp32, Precision::bf16, Precision::fp64}) {
    for (const bool checkpointed : {false, true}) {
      PipelineOptions options = base_on_gpus(32, 1, 1);
      options.precision = precision;
      options.model.checkpoint_activations = checkpointed;
      const MemoryPrediction stage = predict_memory(options, pipeline_memory(plan_pipeline(options)));
      const MemoryPrediction whole = predict_memory(options, MemoryPattern{});
      EXPECT_EQ(stage.parameters, whole.parameters);
      EXPECT_EQ(stage.optimizer, whole.optimizer);
      EXPECT_EQ(stage.peak(), whole.peak()) << to_string(precision) << checkpointed;
    }
  }
}

TEST(PipelineMemory, OneFOneBKeepsLessThanGpipe) {
  PipelineOptions options = base_on_gpus(96, 4, 12);
  const PipelinePlan gpipe = plan_pipeline(options);
  options.schedule = "1f1b";
  const PipelinePlan alternating = plan_pipeline(options);
  int64_t parameters = 0;
  for (size_t stage = 0; stage < 4; ++stage) {
    const MemoryPrediction all = predict_stage(options, gpipe, stage), few = predict_stage(options, alternating, stage);
    EXPECT_LT(few.activations * 2, all.activations) << stage;  // 12 microbatches beside 4, 3, 2, 1
    parameters += few.parameters;
  }
  EXPECT_EQ(parameters, 4 * parameter_count(options.model));  // each on one stage, 4 bytes
}

TEST(PipelineMessages, BytesOfRankZero) {
  const PipelineOptions options = base_on_gpus(96, 3, 6);
  const std::vector<CallPrediction> calls = predict_messages(options);
  ASSERT_EQ(calls.size(), 2U);
  for (const CallPrediction& call : calls) {
    EXPECT_EQ(call.calls, 6);
    EXPECT_EQ(call.payload_bytes, 96 * 256 * 768 * 4);
  }
  EXPECT_TRUE(predict_messages(base_on_gpus(96, 1, 6)).empty());
}

}  // namespace
}  // namespace mgp
