#include "common/mesh.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common/error.hpp"

namespace mgp {

namespace {

std::string divisors_of(int number) {
  std::string text;
  for (int candidate = 1; candidate <= number; ++candidate) {
    if (number % candidate == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", candidate);
  }
  return text;
}

}  // namespace

std::vector<int> Mesh2D::row_ranks(int row) const {
  std::vector<int> ranks;
  for (int column = 0; column < columns; ++column) ranks.push_back(row * columns + column);
  return ranks;
}

std::vector<int> Mesh2D::column_ranks(int column) const {
  std::vector<int> ranks;
  for (int row = 0; row < rows; ++row) ranks.push_back(row * columns + column);
  return ranks;
}

std::string Mesh2D::picture(const std::string& row_name, const std::string& column_name) const {
  const auto width = std::max<size_t>(2, std::to_string(rows * columns - 1).size());
  std::string text = fmt::format("ranks, {} x {}: a line is one {} group, a column one {} group\n", rows, columns,
                                 row_name, column_name);
  for (int row = 0; row < rows; ++row) {
    text += "  ";
    for (int column = 0; column < columns; ++column) text += fmt::format(" {:>{}}", row * columns + column, width);
    text += '\n';
  }
  return text;
}

Mesh2D make_mesh(int world, int columns, const std::string& flag) {
  if (columns < 1 || columns > world || world % columns != 0) {
    throw UsageError(fmt::format("{} {}: {} ranks cannot be cut into rows of {}; {} can be {}", flag, columns, world,
                                 columns, flag, divisors_of(world)));
  }
  return Mesh2D{world / columns, columns};
}

MeshGroups split_mesh(Communicator& world, const Mesh2D& mesh, const std::string& row_name,
                      const std::string& column_name) {
  if (mesh.rows * mesh.columns != world.size()) {
    throw UsageError(fmt::format("a mesh of {} x {} needs {} ranks, the communicator '{}' has {}", mesh.rows,
                                 mesh.columns, mesh.rows * mesh.columns, world.name(), world.size()));
  }
  const int row = mesh.row_of(world.rank());
  const int column = mesh.column_of(world.rank());
  // Every rank splits in the same order, rows first: two that split in different orders would wait for each other.
  std::optional<Communicator> row_group = world.split(row, column, row_name);
  std::optional<Communicator> column_group = world.split(column, row, column_name);
  return MeshGroups{std::move(*row_group), std::move(*column_group)};
}

}  // namespace mgp
