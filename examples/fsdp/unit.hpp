// A unit of sharded training: the parameters that are gathered, used, and freed together. Both ways of cutting it over the
// ranks (flat_unit.hpp, and fsdp2/dim0_unit.hpp) answer the same calls; unit_runner.hpp decides when they are made.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "common/communicator.hpp"
#include "common/model_config.hpp"
#include "common/named_tensors.hpp"
#include "common/shards.hpp"

namespace mgp {

/// What is sharded between steps. (ZeRO: Rajbhandari et al., arXiv 1910.02054.)
enum class ShardStrategy {
  full,       ///< ZeRO-3: parameters, gradients, optimizer state; a unit is freed after its forward
  grad,       ///< ZeRO-2: a unit stays gathered from its forward to its backward
  optimizer,  ///< ZeRO-1: parameters stay gathered, gradients whole until backward has ended
  none        ///< nothing: as DDP, with one all-reduce a unit
};

/// Parameters of one unit, as the model holds them: name, whole shape, and the module's own tensor.
struct UnitParameters {
  std::string name;  ///< "embedding", "layer 3", "head"
  std::vector<ParameterShape> shapes;
  std::vector<at::Tensor> tensors;
};

class Unit {
 public:
  virtual ~Unit() = default;

  const std::string& name() const { return whole_.name; }
  /// The module's tensors. Between free() and finish_gather() they have no memory behind them.
  const std::vector<at::Tensor>& parameters() const { return whole_.tensors; }
  /// What this rank holds for good, and what the optimizer steps: fp32 (or fp64) pieces of the parameters.
  const std::vector<Piece>& pieces() const { return pieces_; }
  const NamedTensors& shards() const { return shards_; }  ///< one of each piece

  /// Starts the all-gather of the whole parameters, in the dtype of the computation. Their memory is allocated first.
  virtual void start_gather() = 0;
  /// The current stream waits for it; the parameters can be used.
  virtual void finish_gather() = 0;
  /// Gives the memory of the whole parameters back. What autograd saved stays valid: it holds the storage, whose bytes
  /// come back at the same place of the program before they are used.
  virtual void free() = 0;

  /// Starts the reduce-scatter of the gradients (sum over ranks, fp32 or fp64) and drops the whole ones. A parameter
  /// without a gradient counts as zeros.
  virtual void start_reduce() = 0;
  /// The current stream waits for it; `.grad` of the pieces is there.
  virtual void finish_reduce() = 0;

  /// One line for each parameter: where its elements lie. For --debug info.
  virtual std::string layout() const = 0;

  /// Bytes of the whole parameters while they are gathered, padding included.
  virtual int64_t gathered_bytes() const = 0;

  /// Whether anything of it is trained. A frozen unit is gathered like the others, and never reduced.
  bool trained() const;
  /// Whether any of it is not.
  bool has_frozen() const;

 protected:
  explicit Unit(UnitParameters parameters) : whole_(std::move(parameters)) {}
  /// `.grad` of each shard becomes its view of the reduced gradient.
  void hand_out_gradients();

  UnitParameters whole_;
  std::vector<Piece> pieces_;
  NamedTensors shards_;
  std::vector<at::Tensor> gradients_;  // views of the reduced gradient, one of each piece, padding left out
};

/// Sizes of a unit, for predictions. Elements when it is whole, padding included.
struct UnitSize {
  int64_t elements = 0;
  int64_t trained = 0;  ///< of them: what is reduced; 0 for a frozen unit
};

/// Resizes the memory behind `tensor` to `bytes` (0 frees it) and leaves every tensor that shares it in place: autograd's
/// saved tensors and the model's parameters see the new memory. The content is undefined.
void resize_memory(const at::Tensor& tensor, int64_t bytes);

/// Shapes of the parameters of each unit, from the configuration alone.
std::vector<std::vector<ParameterShape>> unit_shapes(const ModelConfig& config);

/// The model cut into units in the order of its forward: embedding and positions, each layer, final norm and head.
std::vector<UnitParameters> units_of(const ModelConfig& config, const NamedTensors& parameters);

}  // namespace mgp
